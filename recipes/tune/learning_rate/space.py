"""What a search varies, and the overrides that give a recipe the values of a trial.

All lengths are shares of the run, so that they fit a trial of any number of epochs.
"""

from __future__ import annotations

import json
import math
from typing import NamedTuple

from optuna.distributions import FloatDistribution

from ...errors import RecipeError
from ...schema.recipe import Recipe
from ...training.timeline import Timeline
from ..trial import LENGTHS, of_run, relative_lengths, share_of


class Settings(NamedTuple):
    """The values of a trial: the peak learning rate, and the warm-up as a share of the run."""

    lr: float
    warmup: float


#: The ranges of both, by name.
Space = dict[str, FloatDistribution]

#: The range of the learning rate reaches from the recipe's over this to the recipe's times this.
REACH = 30.0
#: Longest warm-up that is tried, as a share of the run, unless the recipe's is longer.
LONGEST_WARMUP = 0.4
#: Warm-up of the first trials where the recipe has none, as a share of the run.
USUAL_WARMUP = 0.15
#: Places in the range of the rate, on a logarithmic scale, of the first trials after the recipe's.
FIRST_PLACES = (0.3, 0.7, 0.1, 0.9)


def space_of(recipe: Recipe, timeline: Timeline, lr: tuple[float, float] | None) -> Space:
    """The ranges of a search; by default a factor of :data:`REACH` around the recipe's rate."""
    least, own = lowest_peak(recipe), recipe.optimizer.lr
    if lr is None:
        if own == 0:
            raise RecipeError("optimizer.lr: 0 gives no range of rates; valid: --lr LOW..HIGH")
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
    longest = min([longest, *(0.9 * share_of(span, recipe, timeline) for span in ends)])
    return {
        "lr": FloatDistribution(*lr, log=True),
        "warmup": FloatDistribution(0.0, math.floor(1000 * longest) / 1000),
    }


def lowest_peak(recipe: Recipe) -> float:
    """The lowest peak that the recipe's schedule can have."""
    return max(recipe.schedule.start, recipe.schedule.end)


def first_settings(recipe: Recipe, timeline: Timeline, space: Space) -> list[Settings]:
    """The first settings: the recipe's own, moved into the ranges, then rates over all of them."""
    rate, longest = space["lr"], space["warmup"].high
    warmup = min(_own_warmup(recipe, timeline), longest)
    own = Settings(min(max(recipe.optimizer.lr, rate.low), rate.high), warmup)
    rates = (rate.low * (rate.high / rate.low) ** place for place in FIRST_PLACES)
    others = (Settings(rounded(lr), warmup or min(USUAL_WARMUP, longest)) for lr in rates)
    return list(dict.fromkeys((own, *others)))


def rounded(value: float) -> float:
    """``value`` in three significant digits."""
    return float(f"{value:.3g}")


def trial_overrides(
    recipe: Recipe, timeline: Timeline, settings: Settings, share: float = 1.0
) -> list[str]:
    """Return the overrides that give a recipe the values of a trial and a share of its length."""
    schedule, found = recipe.schedule, []
    if share != 1:
        whole = recipe.model_copy(update=relative_lengths(recipe, timeline))
        lengths = whole.model_dump(mode="json", by_alias=True, include={*LENGTHS})
        found = [f"{key}={json.dumps(value)}" for key, value in lengths.items()]
        found.append(f"epochs={recipe.epochs * share!r}")
    found += [f"optimizer.lr={settings.lr!r}", f"schedule.warmup={of_run(settings.warmup)}"]
    if schedule.decay is not None and schedule.decay_from == "warmup":
        # The decay ends at the same place of the run, whatever the warm-up.
        end = sum(share_of(s, recipe, timeline) for s in (schedule.warmup, schedule.decay))
        found.append(f"schedule.decay={of_run(max(end - settings.warmup, 1e-3))}")
    return found


def _own_warmup(recipe: Recipe, timeline: Timeline) -> float:
    """The recipe's warm-up as a share of the run; one that is longer than the run is cut."""
    share = share_of(recipe.schedule.warmup, recipe, timeline)
    return round(share, 3) if share < 1 else LONGEST_WARMUP
