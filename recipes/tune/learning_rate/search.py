"""The coarse-to-fine search for a recipe's peak learning rate and warm-up.

As in Jia et al. 2018 (arXiv 1807.11205, section 3.1: "coarse-to-fine tuning"): many short runs find
where good settings are, a few long ones decide among them. Every trial is the recipe's own training
under its batch, accumulation, ranks and precision, scored on training images that are held out.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...errors import RecipeError
from ...ranks import Job
from ...schema.load import bases, load
from ...schema.recipe import Recipe
from ...schema.sections import Resume
from ...training.data import build_sources
from ...training.folder.checkpoint import CHECKPOINTS
from ...training.schedule import learning_rates
from ...training.timeline import timeline_of
from ..runs import held_out, measure
from .budget import Budget, Lengths, next_stage
from .choose import next_settings
from .pruner import BehindHigherRates
from .report import describe, title
from .space import Settings, guesses, own_settings, space_of
from .study import About, Begun, Study
from .trial_recipe import (
    EVALUATE_EVERY,
    fraction,
    kept,
    longest_warmup,
    setting_overrides,
)
from .trials import STAGES, Found, Metric, Stage, Tried, ranked
from .watch import Guessing, Watch

#: Epochs of a search without another budget, over those of the recipe.
DEFAULT_EPOCHS = 8.0
#: The end of the message about a budget in which no trial could finish.
TOO_SHORT = "no trial has finished; valid: more of them"


@dataclass(frozen=True)
class Options:
    """What a search is asked for.

    Attributes:
        lr: Range of the peak learning rate. Default: a factor of 30 around the recipe's.
        also: What is varied beside rate and warm-up: ``power``, ``momentum``, ``weight_decay``,
            ``trust_coefficient``.
        coarse: Length of a coarse trial over that of the recipe, above 0; 1: no coarse stage.
        metric: What is best on the held-out images: ``top1``, ties by the loss, or ``loss``.
        trials: Number of trials of all workers together; None: no limit.
        epochs: Epochs of all workers together; None: no limit, or :data:`DEFAULT_EPOCHS` times the
            recipe's if there is no other limit.
        minutes: Time of this call; None: no limit.
        seed: Seed of the points and the sampler. The trials train with the recipe's seed.
        guesses: Settings to try first, in place of those from the recipe and what it extends.
            Values that one lacks are the recipe's.
    """

    lr: tuple[float, float] | None = None
    also: tuple[str, ...] = ()
    coarse: float = 0.25
    metric: Metric = "top1"
    trials: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    seed: int = 0
    guesses: tuple[Mapping[str, float], ...] = ()


def search(
    recipe: str,
    overrides: Sequence[str],
    job: Job,
    out: Path,
    options: Options | None = None,
    say: Callable[[str], None] = print,
) -> Found:
    """Search for the best peak learning rate and warm-up of a recipe.

    Call it again with the same arguments to resume, with a larger budget to go on, and from
    several jobs at once, on machines that share ``out``, to share the work.

    Args:
        recipe: Name or path of the recipe.
        overrides: Overrides of the form ``key=value``, for every trial. ``data.holdout`` sets the
            number of training images that score the trials; by default a tenth of them.
        job: The ranks; all call this together, and train each trial together.
        out: Folder of the study, which is made or continued.
        options: The search; by default, that of ``Options()``.
        say: Is given a line for each trial, on rank 0.

    Returns:
        The result, on every rank.

    Raises:
        RecipeError, DataError: The recipe, the data or an option is invalid, the folder holds a
            study of something else, or no trial has finished.
        SystemExit: The process was told to end by a signal. The trial is run again by the
            next call.
    """
    return _Search(recipe, overrides, job, Path(out), options or Options(), say).run()


class _Search:
    """One worker of a search: the ranks of a job."""

    def __init__(
        self,
        recipe: str,
        overrides: Sequence[str],
        job: Job,
        out: Path,
        options: Options,
        say: Callable[[str], None],
    ) -> None:
        self._start = time.monotonic()
        minutes = math.inf if options.minutes is None else options.minutes
        self._deadline = self._start + 60 * minutes
        self._recipe, self._job, self._out, self._options = recipe, job, out, options
        self._given, self._asked = list(overrides), tuple(kept(overrides))
        self._say = say if job.is_main else lambda line: None
        self._precision = ""  # of the trial before
        with job.raise_on_all_ranks():
            self._prepare()
        self._study: Study | None = None
        with job.raise_on_all_ranks():
            if job.is_main:
                pruner = BehindHigherRates.of(self._full, self._held_out)
                self._study = Study(out, self._about(), options.metric, pruner)

    def _prepare(self) -> None:
        """Check what was asked for, before anything is written."""
        options, asked = self._options, load(self._recipe, self._given).recipe
        if asked.resume.from_:
            raise RecipeError("resume: trials start anew; valid here: resume=false")
        for name in ("trials", "epochs", "minutes"):
            limit = getattr(options, name)
            if limit is not None and not limit > 0:
                raise RecipeError(f"--{name}: {limit:g} is no budget; valid: above 0")
        if not 0 < options.coarse <= 1:
            raise RecipeError(f"--coarse: {options.coarse:g} is no share; valid: above 0, up to 1")
        self._held_out = held_out(asked)
        hold_out = f"data.holdout={self._held_out}"
        self._base = [*self._asked, hold_out]
        # With the user's `scale`, which the trials do not have: they set the rate.
        loaded = load(self._recipe, [*self._given, hold_out])
        self._name, self._full = loaded.name, loaded.recipe
        train, _ = build_sources(self._full)
        images, self._guessing = len(train), Guessing(len(train.classes))
        self._timeline = timeline_of(self._full, images, self._job.world_size)
        self._space = space_of(
            self._full, options.also, options.lr, longest_warmup(self._full, self._timeline)
        )
        warmup = fraction(self._full.schedule.warmup, self._full, self._timeline)
        own = own_settings(self._full, self._space, warmup)
        self._guesses = [
            {d.name: d.clipped(float({**own, **guess}[d.name])) for d in self._space}
            for guess in options.guesses
        ] or guesses(own, self._space, self._full, bases(self._recipe))
        coarse = None if options.coarse == 1 else options.coarse * self._full.epochs
        self._lengths = Lengths(coarse, self._full.epochs)
        limits = (options.trials, options.epochs, options.minutes)
        epochs = options.epochs
        if limits == (None, None, None):
            epochs = DEFAULT_EPOCHS * self._full.epochs
        if epochs is not None and epochs < self._full.epochs:
            raise RecipeError(
                f"--epochs: {epochs:g} does not hold one run of the recipe, {self._full.epochs:g} "
                "epochs; valid: at least that, or a recipe with fewer epochs"
            )
        self._budget = Budget(options.trials, epochs, options.minutes)
        longest = {**self._guesses[0], "warmup": self._space[1].high}
        for stage in STAGES:  # whether trials fit the data, before the first one
            trial = self._load_trial(stage, longest)
            learning_rates(trial, timeline_of(trial, images, self._job.world_size))

    def _about(self) -> About:
        """What the study is of: it is not continued for anything else."""
        data = self._full.data.model_copy(update={"path": None})  # elsewhere on other machines
        same = {"run_dir": None, "resume": Resume(), "data": data}
        return About(
            self._name,
            self._full.model_copy(update=same),
            {d.name: (d.low, d.high) for d in self._space},
            self._options.metric,
            self._options.coarse,
        )

    def _trial_overrides(self, stage: Stage, settings: Settings) -> list[str]:
        share = self._lengths.of(stage) / self._lengths.fine
        return [
            *self._base,
            *setting_overrides(self._full, self._timeline, settings, share),
            f"evaluate_every={EVALUATE_EVERY}dur",
            "gradient_noise_every=null",  # which may be longer than a coarse trial
        ]

    def _load_trial(self, stage: Stage, settings: Settings) -> Recipe:
        return load(self._recipe, self._trial_overrides(stage, settings)).recipe

    def run(self) -> Found:
        """Run trials until the budget is used up."""
        while True:
            begun = None
            with self._job.raise_on_all_ranks():
                if self._study:
                    begun = self._begin(self._study)
            order = [begun.stage, begun.trial.params, str(begun.folder)] if begun else []
            told = json.loads(self._job.from_main(json.dumps(order)))
            if not told:
                break
            stage, settings, folder = told
            self._train(begun, stage, settings, Path(folder))
        return self._found()

    def _begin(self, study: Study) -> Begun | None:
        """Begin the next trial on rank 0, None if none fits into the budget."""
        options = self._options
        with study.locked():
            for trial in study.give_up_killed():
                self._say(f"{title(trial)}: its worker has ended, so it is run again")
            trials = study.trials()
            stage = next_stage(
                trials,
                self._lengths,
                self._budget,
                time.monotonic() - self._start,
                study.machine,
            )
            if stage is None:
                return None
            here = [t for t in trials if t.stage == stage]
            coarse = [t for t in trials if t.stage == "coarse"] if stage == "fine" else []
            settings = next_settings(
                here, coarse, self._space, self._guesses, options.metric, options.seed
            )
            return study.begin(stage, settings, self._space)

    def _train(self, begun: Begun | None, stage: Stage, settings: Settings, folder: Path) -> None:
        """Train a trial on all ranks, and note how it ended."""
        study = self._study
        watch = None
        if study and begun:
            epochs = self._lengths.of(stage)
            watch = Watch(
                partial(study.report, begun),
                self._guessing,
                epochs=epochs,
                warmup=settings["warmup"] * epochs,
                deadline=self._deadline,
            )
        overrides = self._trial_overrides(stage, settings)
        if self._precision:  # which `auto` would take time to choose again
            overrides.append(f"precision={self._precision}")
        try:
            if watch and begun:
                with begun.alive():
                    outcome = measure(self._recipe, overrides, self._job, folder, watch)
            else:
                outcome = measure(self._recipe, overrides, self._job, folder)
        except BaseException:
            if study and begun:
                with suppress(Exception):
                    last = begun.last
                    study.tell(begun, "interrupted", last.epoch if last else 0.0, 0.0)
            raise
        finally:
            if study:
                shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        with self._job.raise_on_all_ranks():
            if study and begun and watch:
                ended = study.tell(begun, watch.state(outcome), outcome.epochs, outcome.seconds)
                self._say(describe(ended))
        self._precision = outcome.precision
        if outcome.signal:
            raise SystemExit(128 + outcome.signal)

    def _found(self) -> Found:
        trials = self._job.gather(self._study.trials() if self._study else [])[0]
        with self._job.raise_on_all_ranks():
            best = self._best(trials)
        return Found(
            recipe=self._recipe,
            overrides=self._asked,
            best=best,
            best_overrides=tuple(setting_overrides(self._full, self._timeline, best.settings)),
            trials=tuple(trials),
            space=self._space,
            epochs=self._lengths.fine,
            coarse=self._options.coarse,
            held_out=self._held_out,
            metric=self._options.metric,
            folder=self._out,
        )

    def _best(self, trials: Sequence[Tried]) -> Tried:
        order = ranked([t for t in trials if t.state == "finished"], self._options.metric)
        if order:
            return order[0]
        if any(t.state == "running" for t in trials):
            raise RecipeError(
                f"--out: no trial of {self._out} has finished yet, and other workers still train "
                "some; valid: the same command once they have"
            )
        ended = [t for t in trials if t.state in ("diverged", "pruned")]
        if not ended:
            limit = "epochs" if self._options.minutes is None else "minutes"
            raise RecipeError(f"--{limit}: {TOO_SHORT}")
        rate = self._space[0]
        raise RecipeError(
            f"--lr: none of {len(ended)} trials between {rate.low:g} and {rate.high:g} "
            "finished, as their losses diverged; valid: a range of lower rates"
        )
