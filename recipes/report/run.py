"""A run as it lies in its folder: finished, stopped, diverged, failed or still being written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...lars import Schedule
from ..errors import RecipeError
from ..files import DamagedFileError, number, object_in, read_text, whole
from ..schema.load import RECIPE, bases, load
from ..schema.names import recipe_name
from ..schema.recipe import Recipe
from ..training.folder.checkpoint import CHECKPOINTS, latest
from ..training.folder.names import ENDING, STATE, SUMMARY
from ..training.folder.outcome import Line, State, begun_metrics, state_of
from ..training.schedule import as_logged, learning_rates
from ..training.timeline import Timeline, timeline_of
from ..training.watch.clocks import PARTS
from .positions import Positions

#: Keys of a recipe that say where a run lies and what is written beside it, and not how it trains:
#: runs that differ in them alone are runs of one recipe.
_BESIDE = ("run_dir", "resume", "track", "profile", "mlperf")


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        folder: Its folder.
        recipe_name: Name of its recipe; empty if that is not known.
        train: Lines of the training split, ascending by step.
        val: Lines of the evaluations.
        trust_ratios: Lines with the least, the median and the greatest trust ratio of each layer.
        recipe: The recipe; None if it cannot be read.
        keys: Value of each key of the recipe that training depends on, such as ``optimizer.lr``.
        recipe_text: The file of the recipe.
        summary: Content of ``summary.json``; empty without one.
        time_spent: Wall time of the last process of a run that has ended, in seconds, by
            :data:`PARTS`; empty if it is not known.
        from_step: Step at which that process began.
        timeline: Steps, epochs and images of the whole run; None if the number of training images
            is not known.
        status: Its state, as ``largebatch runs`` has it.
        reason: Why it ended, or the last line of its metrics; may be empty.
        notes: What could not be read, a sentence each.
    """

    folder: Path
    recipe_name: str
    train: list[Line]
    val: list[Line]
    trust_ratios: list[Line]
    recipe: Recipe | None
    keys: dict[str, Any]
    recipe_text: str
    summary: dict[str, Any]
    time_spent: dict[str, float]
    from_step: int
    timeline: Timeline | None
    status: State
    reason: str
    notes: tuple[str, ...]

    @property
    def seed(self) -> int | str | None:
        """The seed; None if it is not known. Of a recipe that is not valid it may be any text."""
        seed = self.keys.get("seed")
        return seed if seed is None or isinstance(seed, int) else str(seed)

    @property
    def step(self) -> int:
        """The last step that is in the metrics."""
        return int(max(lines[-1]["step"] for lines in (self.train, self.val) if lines))

    @property
    def epoch(self) -> float:
        """Epochs of images read up to :attr:`step`."""
        return float(max(lines[-1]["epoch"] for lines in (self.train, self.val) if lines))

    @property
    def last_step(self) -> int | None:
        """Step at which the run was to stop; None if it is not known."""
        if self.timeline and self.recipe:
            return self.timeline.last_step(self.recipe)
        return whole(self.summary.get("total_steps"))

    @cached_property
    def schedule(self) -> Schedule | None:
        """The learning rate by step, from 0; None if it is not known, or not the one logged."""
        if self.recipe is None or self.timeline is None:
            return None
        try:
            schedule = learning_rates(self.recipe, self.timeline).schedule
        except RecipeError:  # of a version that read its lengths in another way
            return None
        return schedule if as_logged(schedule, self.train) else None

    @cached_property
    def positions(self) -> Positions:
        """Where its steps lie in epochs, images and seconds."""
        return Positions(self.train, self.val, self.timeline)


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        NoMetricsError: The run has no metrics yet.
        RecipeError: The folder holds no run.
    """
    metrics = begun_metrics(folder)
    train, val, notes = metrics.train, metrics.val, metrics.notes
    status, reason = state_of(folder, metrics)
    recipe, keys, text = _recipe(folder, notes)
    summary = object_in(folder / SUMMARY)
    time_spent, from_step = _time_spent(folder, summary, status)
    run = Run(
        folder=folder,
        recipe_name=recipe_name(text) or str(summary.get("recipe", "")),
        train=train,
        val=val,
        trust_ratios=metrics.of("trust_ratio"),
        recipe=recipe,
        keys=keys,
        recipe_text=text,
        summary=summary,
        time_spent=time_spent,
        from_step=from_step,
        timeline=_timeline(folder, recipe, [*train, *val]) if recipe else None,
        status=status,
        reason=reason,
        notes=(),
    )
    if recipe and run.timeline is None:
        notes.append(
            "The number of training images is not known: the learning rate is drawn where it was "
            "logged, not at each step."
        )
    elif recipe and run.schedule is None:
        notes.append(
            "The schedule of the recipe does not give the learning rates that were logged, as of a "
            "run that was resumed with others: they are drawn as logged, not at each step."
        )
    if untimed := run.positions.untimed:
        what = "step was" if untimed == 1 else "steps were"
        notes.append(f"{untimed} {what} not timed, before the run was resumed.")
    return replace(run, notes=tuple(notes))


def _time_spent(
    folder: Path, summary: dict[str, Any], status: State
) -> tuple[dict[str, float], int]:
    """Where the wall time of the last process went, and the step at which it began."""
    if status == "running":  # what the files tell is of an earlier process
        return {}, 0
    facts = summary if status == "finished" else object_in(folder / ENDING)
    spent = facts.get("time_spent")
    found = {
        part: seconds
        for part in PARTS
        if isinstance(spent, dict) and (seconds := number(spent.get(part))) is not None
    }
    return found, whole(facts.get("from_step")) or 0


def _recipe(folder: Path, notes: list[str]) -> tuple[Recipe | None, dict[str, Any], str]:
    """The recipe in a run's folder, the value of each of its keys, and its text."""
    path = folder / RECIPE
    recipe, content, text = None, {}, ""
    try:
        text = read_text(path)
        recipe = load(str(path)).recipe
        content = recipe.model_dump(mode="json", by_alias=True)
    except (OSError, DamagedFileError) as error:
        notes.append(f"{RECIPE} cannot be read: {getattr(error, 'strerror', None) or error}.")
    except RecipeError as error:  # such as one of a version with other keys
        notes.append(f"{RECIPE} is not valid today: {' '.join(str(error).split())}.")
        try:
            content = bases(str(path))[-1]
        except RecipeError:
            content = {}
    return recipe, {k: v for k, v in _flat(content).items() if k not in _BESIDE}, text


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted keys, without those of :data:`_BESIDE`."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if not prefix and key in _BESIDE:
            continue
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + str(key)] = value
    return flat


def _timeline(folder: Path, recipe: Recipe, lines: list[Line]) -> Timeline | None:
    """The timeline of a run, if it has the epochs that the run logged."""
    for images in (_images_in_checkpoint(folder), recipe.data.train_images):
        try:
            timeline = timeline_of(recipe, images) if images else None
        except RecipeError:
            continue
        # Epochs are logged with 4 decimals.
        if timeline and all(abs(timeline.epoch(n["step"]) - n["epoch"]) < 1e-4 for n in lines):
            return timeline
    return None


def _images_in_checkpoint(folder: Path) -> int | None:
    """Number of training images that the newest checkpoint notes; None without one."""
    newest = latest(folder / CHECKPOINTS)
    found: Any = object_in(newest / STATE) if newest else None
    for name in ("loader", "fingerprint", "images"):
        found = found.get(name) if isinstance(found, dict) else None
    return whole(found) or None
