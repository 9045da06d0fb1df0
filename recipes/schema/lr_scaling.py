"""Scale the learning rate of a recipe with its batch size.

``linear`` multiplies the rate by N / B, the new batch size over that of the base (Krizhevsky 2014,
arXiv 1404.5997; Goyal et al. 2017, arXiv 1706.02677: one step replaces N / B steps of small
batches). ``sqrt`` multiplies it by the square root of that, which keeps the variance of a step
(Krizhevsky 2014; Hoffer et al. 2017, arXiv 1705.08741; with layer-wise rates, You et al. 2019,
arXiv 1904.00962).

Only ``optimizer.lr``, the peak, is scaled. ``schedule.start`` is not: Goyal's warm-up starts at the
rate of the base, which is stable at every batch size. Neither is ``schedule.end``, which means
"close to zero"; MLPerf's rules fix it to 1e-4 at every batch size. Milestones multiply the peak,
and therefore follow it.

A recipe consists of levels: the recipe that it extends, its own file, and the overrides. ``scale``
applies from the level that sets it: each level that sets another ``batch_size`` and no
``optimizer.lr`` has its rate derived from the levels below.
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
    """Scale the learning rate of a level, and add a line about it to those of the levels below.

    ``content`` is ``base``, the levels below, with ``level`` merged. Invalid values are left for
    the schema to report.
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
            f"scale: {rule} derives optimizer.lr, which cannot be set too; valid: scale=null, or "
            "no lr"
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


def _check(content: Content, rate: float) -> None:
    for key in ("start", "end"):
        bound = _number(_get(content, "schedule", key))
        if bound is not None and bound > rate:
            raise RecipeError(
                f"scale: the scaled learning rate {rate:g} is below schedule.{key}, "
                f"{float(bound):g}, which is not scaled; valid: set schedule.{key} too"
            )
    stages = content.get("stages")
    if isinstance(stages, list) and any(_get({"": stage}, "", "batch_size") for stage in stages):
        raise RecipeError(
            "scale: cannot be combined with stages that set batch_size; valid: stages=[], or "
            "scale=null and optimizer.lr"
        )


def _get(content: Content, section: str, key: str) -> Any:
    """The value of a key in a section, None if either is missing."""
    found = content.get(section)
    return found.get(key) if isinstance(found, dict) else None


def _number(value: Any) -> Fraction | None:
    """A number >= 0 exactly as written, so that 0.1 x 3264/256 is 1.275; None if it is invalid."""
    try:
        number = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        return None
    return number if 0 <= number < 10**30 else None
