"""What a search varies, and the overrides that give a recipe the values of a trial.

Settings are values by name: ``lr`` is the peak learning rate, ``warmup`` the warm-up as a share of
the run, and the others are the recipe's keys of that name. All lengths are shares of the run, so
that they fit a trial of any number of epochs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

from optuna.distributions import FloatDistribution

from ....lars import Span
from ...errors import RecipeError
from ...schema.optimizers import entry_of
from ...schema.recipe import Recipe
from ...training.timeline import Timeline

Settings = dict[str, float]
Space = dict[str, FloatDistribution]

#: The range of the learning rate reaches from the recipe's over this to the recipe's times this.
REACH = 30.0
#: Longest warm-up that is tried, as a share of the run, unless the recipe's is longer.
LONGEST_WARMUP = 0.4
#: Warm-up of the first trials where the recipe has none, as a share of the run.
USUAL_WARMUP = 0.15
#: Places in the range of the rate, on a logarithmic scale, of the first trials after the recipe's.
FIRST_PLACES = (0.3, 0.7, 0.1, 0.9)

_KEYS = {
    "lr": "optimizer.lr",
    "momentum": "optimizer.momentum",
    "weight_decay": "optimizer.weight_decay",
    "trust_coefficient": "optimizer.trust_coefficient",
    "power": "schedule.power",
}
#: What can be varied beside learning rate and warm-up.
FURTHER = ("power", "momentum", "weight_decay", "trust_coefficient")


def space_of(
    recipe: Recipe, timeline: Timeline, also: Iterable[str], lr: tuple[float, float] | None
) -> Space:
    """Return the ranges of a search, those of ``lr`` and ``warmup`` first.

    Args:
        recipe: The recipe.
        timeline: The timeline of its run.
        also: What is varied too, of :data:`FURTHER`.
        lr: Range of the learning rate. Default: a factor of :data:`REACH` around the recipe's.

    Raises:
        RecipeError: A range is empty, or the recipe does not have a value that is asked for.
    """
    least, own = lowest_peak(recipe), recipe.optimizer.lr
    if lr is None:
        if own == 0:
            raise RecipeError("optimizer.lr: 0 gives no range of rates; valid: a range by --lr")
        lr = max(rounded(own / REACH), least), max(rounded(own * REACH), 2 * least)
    elif not (0 < lr[0] < lr[1] < math.inf):
        raise RecipeError(
            f"--lr: {lr[0]:g}..{lr[1]:g} is an empty range; valid: LOW..HIGH with 0 < LOW < HIGH"
        )
    elif lr[0] < least:
        raise RecipeError(
            f"--lr: {lr[0]:g} is below schedule.start or schedule.end, {least:g}; valid: LOW of at "
            "least that, or other values of these keys"
        )
    longest = max(LONGEST_WARMUP, _own_warmup(recipe, timeline))
    schedule = recipe.schedule
    ends = schedule.milestones[:1]
    if schedule.decay is not None and schedule.decay_from == "start":
        ends = (schedule.decay,)
    longest = min([longest, *(0.9 * _share(span, recipe, timeline) for span in ends)])
    found = {
        "lr": FloatDistribution(*lr, log=True),
        "warmup": FloatDistribution(0.0, math.floor(1000 * longest) / 1000),
    }
    return {**found, **{name: _further(name, recipe) for name in also}}


def _further(name: str, recipe: Recipe) -> FloatDistribution:
    schedule, options = recipe.schedule, recipe.optimizer
    known = ["weight_decay", *entry_of(options.name).keys]
    known += ["power"] if schedule.name == "polynomial" else []
    valid = [key for key in FURTHER if key in known]
    if name not in valid:
        raise RecipeError(f"--also: {name} cannot be varied here; valid: {', '.join(valid)}")
    own: float = schedule.power if name == "power" else getattr(options, name)
    if name in ("power", "momentum"):
        low, high = (0.5, 4.0) if name == "power" else (0.5, 0.98)
        return FloatDistribution(min(low, own), max(high, own))
    low, high = (own / 10, own * 10) if own else (1e-6, 1e-3)
    return FloatDistribution(low, high, log=True)


def lowest_peak(recipe: Recipe) -> float:
    """The lowest peak that the recipe's schedule can have."""
    return max(recipe.schedule.start, recipe.schedule.end)


def own_settings(recipe: Recipe, timeline: Timeline, space: Space) -> Settings:
    """The recipe's own values, or those of the ranges that are nearest to them."""
    values = {key: getattr(recipe.optimizer, key) for key in _KEYS if key != "power"}
    values |= {"power": recipe.schedule.power, "warmup": _own_warmup(recipe, timeline)}
    return {name: min(max(values[name], d.low), d.high) for name, d in space.items()}


def first_settings(own: Settings, space: Space) -> list[Settings]:
    """The settings of the first trials: the recipe's own, then rates over the whole range."""
    rate, warmup = space["lr"], own["warmup"] or min(USUAL_WARMUP, space["warmup"].high)
    places = (rate.low * (rate.high / rate.low) ** place for place in FIRST_PLACES)
    found = [own, *({**own, "warmup": warmup, "lr": rounded(lr)} for lr in places)]
    return [settings for i, settings in enumerate(found) if settings not in found[:i]]


def rounded(value: float) -> float:
    """``value`` in three significant digits."""
    return float(f"{value:.3g}")


def trial_overrides(
    recipe: Recipe, timeline: Timeline, settings: Mapping[str, float], share: float = 1.0
) -> list[str]:
    """Return the overrides that give a recipe the values of a trial and a share of its length.

    Args:
        recipe: The recipe.
        timeline: The timeline of its run at full length.
        settings: The trial's values.
        share: Length of the trial over that of the recipe.
    """
    schedule = recipe.schedule
    found = [f"{_KEYS[name]}={value!r}" for name, value in settings.items() if name in _KEYS]
    found.append(f"schedule.warmup={_of_run(settings['warmup'])}")
    if schedule.decay is not None and schedule.decay_from == "warmup":
        # The decay ends at the same place of the run, whatever the warm-up.
        rise = timeline.steps(schedule.warmup)
        end = timeline.epoch(rise + timeline.steps(schedule.decay, after=rise)) / recipe.epochs
        found.append(f"schedule.decay={_of_run(max(end - settings['warmup'], 1e-3))}")
    if share == 1:
        return found

    def scaled(span: Span) -> str:
        return _of_run(_share(span, recipe, timeline))

    found.append(f"epochs={recipe.epochs * share!r}")
    if schedule.decay is not None and schedule.decay_from == "start":
        found.append(f"schedule.decay={scaled(schedule.decay)}")
    if schedule.milestones:
        found.append(f"schedule.milestones={json.dumps([scaled(m) for m in schedule.milestones])}")
    if recipe.stages:
        stages = [
            {**stage.model_dump(mode="json", exclude={"from_"}, exclude_none=True),
             "from": scaled(stage.from_)}
            for stage in recipe.stages
        ]  # fmt: skip
        found.append(f"stages={json.dumps(stages)}")
    if recipe.stop_after is not None:
        found.append(f"stop_after={scaled(recipe.stop_after)}")
    return found


def _own_warmup(recipe: Recipe, timeline: Timeline) -> float:
    """The recipe's warm-up as a share of the run; one that is longer than the run is cut."""
    share = _share(recipe.schedule.warmup, recipe, timeline)
    return round(share, 3) if share < 1 else LONGEST_WARMUP


def _share(span: Span, recipe: Recipe, timeline: Timeline) -> float:
    """A length from the start of the run as a share of the run."""
    return timeline.epoch(timeline.steps(span)) / recipe.epochs


def _of_run(share: float) -> str:
    return str(Span(min(round(share, 6), 1.0), "dur"))
