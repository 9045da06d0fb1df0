"""The learning rate of another batch size, from that of a base recipe.

``linear`` multiplies it by N / B, the new batch by that of the base (Krizhevsky 2014, arXiv
1404.5997; Goyal et al. 2017, arXiv 1706.02677: the steps of N / B small batches add up to one).
``sqrt`` multiplies it by the root of that, which keeps the variance of a step (Krizhevsky 2014;
Hoffer et al. 2017, arXiv 1705.08741; with layer-wise rates, You et al. 2019, arXiv
1904.00962).

Only ``optimizer.lr``, the peak, is scaled. ``schedule.start`` is not: Goyal's warm-up begins at
the rate of the base, which every batch bears. Nor is ``schedule.end``: it stands for "about
nothing", and MLPerf's rules fix it to 1e-4 at every batch size. Milestones divide the peak, and so
follow it by themselves.

A recipe is made of levels: what it extends, its own file, the overrides. ``scale`` holds from the
level that it is written at: each level with another ``batch_size`` and no ``optimizer.lr`` of its
own has its rate worked out from the levels below it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from ..errors import RecipeError

RULES = ("linear", "sqrt")

Content = dict[str, Any]


def scaled(
    base: Content, level: Content, content: Content, notices: tuple[str, ...]
) -> tuple[Content, tuple[str, ...]]:
    """A level of a recipe with the learning rate that goes with its batch size.

    Values that are not valid are left as they are, for the schema to tell.

    Args:
        base: the levels below it, merged; empty if there are none.
        level: its own keys.
        content: both merged.
        notices: lines about the levels below.

    Returns:
        The content, and the lines with that of this level.

    Raises:
        RecipeError: the level also has its own learning rate, or what is not scaled does not fit.
    """
    rule = content.get("scale")
    options, own = content.get("optimizer"), level.get("optimizer")
    given = isinstance(own, dict) and "lr" in own
    if rule not in RULES or not base or not isinstance(options, dict):
        return content, () if given else notices
    if given:
        if level.get("scale") is None:
            return content, ()
        raise RecipeError(
            f"scale: {rule} works optimizer.lr out from the base, and optimizer.lr is given "
            "beside it; valid: one of the two"
        )
    old, new = _number(base.get("batch_size")), _number(content.get("batch_size"))
    lr = _number(_get(base, "optimizer", "lr"))
    if not (old and new and lr is not None) or (old == new and "scale" not in level):
        return content, notices
    ratio = new / old
    rate = float(lr * ratio) if rule == "linear" else float(lr) * math.sqrt(ratio)
    if old != new:
        _check(content, rate)
    how = f"{new}/{old} (linear)" if rule == "linear" else f"sqrt({new}/{old})"
    line = f"learning rate {rate:g} = {float(lr):g} x {how}"
    return {**content, "optimizer": {**options, "lr": rate}}, (*notices, line)


def settled(content: Content) -> Content:
    """A whole recipe whose rate has been worked out: loaded again, it is not scaled again."""
    return {**content, "scale": None} if content.get("scale") in RULES else content


def _check(content: Content, rate: float) -> None:
    for key in ("start", "end"):
        bound = _number(_get(content, "schedule", key))
        if bound is not None and bound > rate:
            raise RecipeError(
                f"scale: learning rate {rate:g} is less than schedule.{key}, {float(bound):g}, "
                f"which is not scaled; valid: give schedule.{key} too"
            )
    stages = content.get("stages")
    if isinstance(stages, list) and any(_get({"": stage}, "", "batch_size") for stage in stages):
        raise RecipeError(
            "scale: stages have batch sizes of their own, which are not scaled; valid: stages=[], "
            "or scale=null and optimizer.lr"
        )


def _get(content: Content, section: str, key: str) -> Any:
    """A key of a section; None where either is not there."""
    found = content.get(section)
    return found.get(key) if isinstance(found, dict) else None


def _number(value: Any) -> Fraction | None:
    """A number >= 0 as it is written, so that 0.1 x 3264/256 is 1.275; None for what is none."""
    try:
        number = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        return None
    return number if 0 <= number < 10**30 else None
