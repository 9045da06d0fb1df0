"""What the search varies: its dimensions, its first guesses, and points that fill a range evenly.

Settings are values by the name of a dimension: ``lr`` is the peak learning rate, ``warmup`` the
warm-up as a fraction of the run, and the others are the recipe's keys of that name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import RecipeError
from ...schema.optimizers import entry_of
from ...schema.recipe import Recipe

Settings = dict[str, float]

#: Warm-up of the guesses where the recipe has none, as a fraction of the run.
GUESSED_WARMUP = 0.15
#: The range of the learning rate reaches from the recipe's over this to the recipe's times this.
REACH = 30.0
#: What ``also`` may name.
FURTHER = ("power", "momentum", "weight_decay", "trust_coefficient")

_SCALES: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "linear": (lambda x: x, lambda y: y),
    "log": (math.log, math.exp),
    "log of 1 - x": (lambda x: -math.log1p(-x), lambda y: -math.expm1(-y)),
}


@dataclass(frozen=True)
class Dimension:
    """A value that is varied.

    Attributes:
        name: ``lr``, ``warmup`` or one of :data:`FURTHER`.
        low: Smallest value.
        high: Largest value, above ``low``.
        scale: What the value is spread evenly on: ``linear``, ``log`` or ``log of 1 - x``.
    """

    name: str
    low: float
    high: float
    scale: str = "log"

    def unit(self, value: float) -> float:
        """Place of a value in the range, from 0 to 1 inside of it."""
        to, _ = _SCALES[self.scale]
        return (to(value) - to(self.low)) / (to(self.high) - to(self.low))

    def value(self, unit: float) -> float:
        """The value at a place in the range, in three digits."""
        to, back = _SCALES[self.scale]
        found = back(to(self.low) + unit * (to(self.high) - to(self.low)))
        return self.clipped(self.rounded(found))

    def clipped(self, value: float) -> float:
        """The value of the range that is nearest to ``value``."""
        return min(max(value, self.low), self.high)

    def rounded(self, value: float) -> float:
        """``value`` in three significant digits; of a momentum, those of its distance from 1."""
        if self.scale == "log of 1 - x":
            return round(1 - float(f"{1 - value:.3g}"), 12)
        return round(value, 3) if self.scale == "linear" else float(f"{value:.3g}")

    def around(self, value: float, factor: float) -> Dimension:
        """The part of the range that is within a factor of a value; all of a linear one."""
        if self.scale == "linear":
            return self
        to, back = _SCALES[self.scale]
        low, high = (back(to(value) + sign * math.log(factor)) for sign in (-1, 1))
        return replace(self, low=max(low, self.low), high=min(high, self.high))


def space_of(
    recipe: Recipe,
    also: Iterable[str] = (),
    lr: tuple[float, float] | None = None,
    longest_warmup: float = 0.4,
) -> tuple[Dimension, ...]:
    """Return the dimensions of a search, ``lr`` and ``warmup`` first.

    Args:
        recipe: The recipe. Its values are inside the ranges, but for a rate outside of a given
            range, a warm-up that is longer than ``longest_warmup``, and a weight decay of 0.
        also: Further dimensions, of :data:`FURTHER`.
        lr: Range of the learning rate. Default: a factor of :data:`REACH` around the recipe's.
        longest_warmup: Longest warm-up, as a fraction of the run.

    Raises:
        RecipeError: A range is empty, or the recipe does not have a value that is asked for.
    """
    schedule, options = recipe.schedule, recipe.optimizer
    least = max(schedule.start, schedule.end)
    if lr is None:
        if options.lr == 0:
            raise RecipeError("optimizer.lr: 0 gives no range of rates; valid: a range by --lr")
        low, high = (float(f"{rate:.3g}") for rate in (options.lr / REACH, options.lr * REACH))
        lr = (max(low, least), max(high, 2 * least))
    elif not (0 < lr[0] < lr[1] < math.inf):
        raise RecipeError(
            f"--lr: {lr[0]:g}..{lr[1]:g} is an empty range; valid: LOW..HIGH with 0 < LOW < HIGH"
        )
    elif lr[0] < least:
        raise RecipeError(
            f"--lr: {lr[0]:g} is below schedule.start or schedule.end, {least:g}; valid: LOW of at "
            "least that, or other values of these keys"
        )
    found = [Dimension("lr", *lr), Dimension("warmup", 0.0, longest_warmup, "linear")]
    return (*found, *(_further(name, recipe) for name in dict.fromkeys(also)))


def _further(name: str, recipe: Recipe) -> Dimension:
    schedule, options = recipe.schedule, recipe.optimizer
    keys = entry_of(options.name).keys
    if name not in FURTHER:
        raise RecipeError(f"--also: cannot vary {name!r}; valid: {', '.join(FURTHER)}")
    if name == "power":
        if schedule.name != "polynomial":
            raise RecipeError(
                f"--also: power is of polynomial decay, and schedule.name is {schedule.name}; "
                "valid: leave it out"
            )
        return _including(schedule.power, Dimension(name, 0.5, 4.0))
    if name == "weight_decay":
        own = options.weight_decay
        return Dimension(name, own / 10, own * 10) if own else Dimension(name, 1e-6, 1e-3)
    if name not in keys:
        raise RecipeError(
            f"--also: {options.name} does not take {name}; valid: "
            f"{', '.join(key for key in FURTHER if key in ('power', 'weight_decay', *keys))}"
        )
    if name == "momentum":
        return _including(options.momentum, Dimension(name, 0.5, 0.98, "log of 1 - x"))
    return Dimension(name, options.trust_coefficient / 10, options.trust_coefficient * 10)


def _including(value: float, dimension: Dimension) -> Dimension:
    return replace(dimension, low=min(value, dimension.low), high=max(value, dimension.high))


def own_settings(recipe: Recipe, space: Sequence[Dimension], warmup: float) -> Settings:
    """The recipe's own values; ``warmup`` is its warm-up as a fraction of the run."""
    values = {
        "lr": recipe.optimizer.lr,
        "warmup": round(warmup, 3),
        "power": recipe.schedule.power,
        "momentum": recipe.optimizer.momentum,
        "weight_decay": recipe.optimizer.weight_decay,
        "trust_coefficient": recipe.optimizer.trust_coefficient,
    }
    return {d.name: d.clipped(values[d.name]) for d in space}


def guesses(
    own: Settings,
    space: Sequence[Dimension],
    recipe: Recipe,
    bases: Sequence[Mapping[str, Any]] = (),
) -> list[Settings]:
    """The settings that are tried first: the recipe's own, and rates scaled from other batches.

    Where a recipe that this one builds on has another batch size and the same optimizer, its rate
    is scaled linearly and by the square root (see :mod:`largebatch.recipes.schema.lr_scaling`).
    Without a warm-up of the recipe's own, all but the first have one of :data:`GUESSED_WARMUP`.

    Args:
        own: The recipe's own values.
        space: The dimensions. Rates outside of the range are left out.
        recipe: The recipe.
        bases: Contents of the recipe files that it builds on, as
            :func:`largebatch.recipes.schema.load.bases` returns them.
    """
    longest = next(d for d in space if d.name == "warmup").high
    usual = {**own, "warmup": own["warmup"] or min(GUESSED_WARMUP, longest)}
    rate = next(d for d in space if d.name == "lr")
    rates = [own["lr"]]
    for base in reversed(bases):
        batch, options = base.get("batch_size"), base.get("optimizer")
        lr = options.get("lr") if isinstance(options, dict) else None
        if not (isinstance(batch, int) and isinstance(lr, int | float)):
            continue
        if batch == recipe.batch_size or options.get("name", "lars") != recipe.optimizer.name:
            continue
        ratio = recipe.batch_size / batch
        rates += [rate.rounded(lr * ratio), rate.rounded(lr * math.sqrt(ratio))]
    inside = [r for r in rates if rate.low <= r <= rate.high]
    found = [own, *({**usual, "lr": r} for r in inside)]
    return [s for i, s in enumerate(found) if s not in found[:i]]


def evenly(space: Sequence[Dimension], number: int, seed: int = 0) -> list[Settings]:
    """The first points of a scrambled Sobol sequence (Sobol 1967; Owen 1998) over the ranges."""
    from torch.quasirandom import SobolEngine

    points = SobolEngine(len(space), scramble=True, seed=seed).draw(number).tolist()
    return [{d.name: d.value(u) for d, u in zip(space, point, strict=True)} for point in points]


def narrowed(space: Sequence[Dimension], best: Settings, factor: float) -> tuple[Dimension, ...]:
    """The dimensions within a factor of the best settings; linear ones stay whole."""
    return tuple(d.around(best[d.name], factor) for d in space)
