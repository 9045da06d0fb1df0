"""What the closed division of MLPerf Training leaves free in a ResNet-50 recipe, and what not.

The rules are those of round 4.0, the last one with ResNet-50. Their sources, by the letter that
each rule below bears:

- C: the compliance checker, mlperf_logging/compliance_checker/training_4.0.0/closed_resnet.yaml
  and closed_resnet_lars.yaml, which reads them from the log.
- T: mlcommons/training_policies, training_rules.adoc, the table of hyper-parameters.
- R: the reference, mlcommons/training image_classification/tensorflow2 (lars_optimizer.py,
  lars_util.py) and the quality section of its README. What the table does not list is fixed to it.

Base learning rate, length of warm-up and decay, and batch size are free. The reference convergence
points (mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json) say how many epochs a batch
size takes at least; that is checked after the runs, over five of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import RecipeError
from ..schema.recipe import Recipe

#: Top-1 in percent at which the benchmark ends: R, C.
TARGET_ACCURACY = 75.9

#: Images of ImageNet that the benchmark trains on and evaluates.
TRAIN_IMAGES, VAL_IMAGES = 1_281_167, 50_000

_FREE_MOMENTUM_FROM = 32_768


@dataclass(frozen=True)
class Rule:
    """A key of a recipe, what the division allows there, and the source's letter."""

    key: str
    allows: Callable[[Any], bool]
    valid: str
    source: str


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _is_power_of_two(value: float) -> bool:
    """Whether it is 1e-4 x 2^N, with the tolerance of the compliance checker."""
    if value <= 0:
        return False
    exponent = math.log2(value / 1e-4)
    return abs(round(exponent) - exponent) < 1e-5


RULES = (
    Rule("optimizer.name", _one_of("lars"), "lars", "C"),
    Rule("optimizer.eps", _one_of(0), "0", "C"),
    Rule("optimizer.weight_decay", _is_power_of_two, "1e-4 x 2^N, such as 5e-5 or 2e-4", "C"),
    Rule("optimizer.trust_coefficient", _one_of(1e-3), "0.001", "R"),
    Rule(
        "optimizer.dialect",
        _one_of("mlperf", "mlperf-corrected"),
        "mlperf or mlperf-corrected",
        "R",
    ),
    Rule("optimizer.nesterov", _one_of(False), "false", "R"),
    Rule("optimizer.decay_bias_and_norm", _one_of(False), "false", "R"),
    Rule("optimizer.adapt_bias_and_norm", _one_of(False), "false", "R"),
    Rule("schedule.name", _one_of("polynomial"), "polynomial", "C"),
    Rule("schedule.power", _one_of(2), "2", "C"),
    Rule("schedule.end", _one_of(1e-4), "1e-4", "C"),
    Rule("schedule.warmup_shape", _one_of("linear"), "linear", "R"),
    Rule("schedule.start", _one_of(0), "0", "R"),
    Rule("label_smoothing", _one_of(0, 0.1), "0 or 0.1", "T"),
    Rule("init.from", _one_of(None), "null", "R"),
    Rule("ema.decay", _one_of(None), "null", "R"),
    Rule("stages", _one_of(()), "[]", "R"),
    Rule("target_accuracy", _one_of(TARGET_ACCURACY), f"{TARGET_ACCURACY}", "R"),
    Rule("evaluate_every", lambda span: str(span) == "4ep", "4ep", "R"),
)


def check_rules(recipe: Recipe) -> None:
    """See that a recipe keeps the rules of the closed division.

    Raises:
        RecipeError: names the first key that breaks one, and what is valid there.
    """
    for rule in RULES:
        value: Any = recipe
        for part in rule.key.split("."):
            value = getattr(value, "from_" if part == "from" else part)
        if not rule.allows(value):
            raise _broken(rule.key, value, rule.valid)
    momentum, batch = recipe.optimizer.momentum, recipe.batch_size
    if batch < _FREE_MOMENTUM_FROM and momentum != 0.9:  # T
        raise _broken("optimizer.momentum", momentum, f"0.9 below batch {_FREE_MOMENTUM_FROM:,}")


def departures(recipe: Recipe, train_images: int, val_images: int) -> list[str]:
    """What makes a run no run of the benchmark, although it keeps the rules: a smaller model or
    other data, as in a trial. One phrase for each."""
    found = (
        ("model", recipe.model.name, "resnet50"),
        ("image size", recipe.data.image_size, 224),
        ("training images", train_images, TRAIN_IMAGES),
        ("validation images", val_images, VAL_IMAGES),
    )
    return [
        f"{what} {_told(is_)}, not {_told(wants)}" for what, is_, wants in found if is_ != wants
    ]


def _broken(key: str, value: Any, valid: str) -> RecipeError:
    return RecipeError(
        f"{key}: {_told(value)} breaks a rule of MLPerf's closed division, whose log mlperf.log "
        f"asks for; valid: {valid}, or mlperf.log=null"
    )


def _told(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return f"{len(value)} of them"
    return f"{value:,}" if isinstance(value, int) else str(value)
