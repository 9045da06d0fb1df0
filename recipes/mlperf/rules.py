"""The rules of MLPerf Training's closed division for a ResNet-50 recipe.

These are the rules of round 4.0, the last one with ResNet-50. Each rule below has the letter of
its source:

- C: the compliance checker, mlperf_logging/compliance_checker/training_4.0.0/closed_resnet.yaml
  and closed_resnet_lars.yaml, which reads them from the log.
- T: mlcommons/training_policies, training_rules.adoc, the table of hyper-parameters.
- R: the reference, mlcommons/training image_classification/tensorflow2 (lars_optimizer.py,
  lars_util.py) and the quality section of its README. Values that the table does not list must be
  those of the reference.

Base learning rate, length of warm-up and decay, and batch size are free. The reference convergence
points (mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json) give the minimum number of
epochs for each batch size; that is checked after the runs, over five of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import RecipeError
from ..schema.recipe import Recipe

#: Top-1 accuracy in percent at which the benchmark ends: R, C.
TARGET_ACCURACY = 75.9

#: Number of training and validation images of the benchmark, ImageNet.
TRAIN_IMAGES, VAL_IMAGES = 1_281_167, 50_000

_FREE_MOMENTUM_FROM = 32_768
_DIALECTS = ("mlperf", "mlperf-corrected")


@dataclass(frozen=True)
class Rule:
    """What the division allows for a key of a recipe, and the letter of its source."""

    key: str
    allows: Callable[[Any], bool]
    valid: str  # the allowed values, in words
    source: str


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _is_power_of_two(value: float) -> bool:
    """Whether a value is 1e-4 x 2^N, with the tolerance of the compliance checker."""
    if value <= 0:
        return False
    exponent = math.log2(value / 1e-4)
    return abs(round(exponent) - exponent) < 1e-5


RULES = (
    Rule("optimizer.name", _one_of("lars"), "lars", "C"),
    # No eps (C), and neither another denominator nor the clipped trust ratio (R).
    Rule("optimizer.args", lambda args: {*args} <= {"implementation"}, "implementation only", "C"),
    Rule("optimizer.weight_decay", _is_power_of_two, "1e-4 x 2^N, such as 5e-5 or 2e-4", "C"),
    Rule("optimizer.trust_coefficient", _one_of(1e-3), "0.001", "R"),
    Rule("optimizer.dialect", _one_of(*_DIALECTS), " or ".join(_DIALECTS), "R"),
    Rule("optimizer.bias_lr_scale", _one_of(1), "1", "R"),
    Rule("optimizer.body_lr_scale", _one_of(1), "1", "R"),
    Rule("optimizer.nesterov", _one_of(False), "false", "R"),
    Rule("optimizer.clip_grad_norm", _one_of(None), "null", "R"),
    Rule("optimizer.decay_bias_and_norm", _one_of(False), "false", "R"),
    Rule("optimizer.adapt_bias_and_norm", _one_of(False), "false", "R"),
    Rule("schedule.name", _one_of("polynomial"), "polynomial", "C"),
    Rule("schedule.power", _one_of(2), "2", "C"),
    Rule("schedule.end", _one_of(1e-4), "1e-4", "C"),
    Rule("schedule.warmup_shape", _one_of("linear"), "linear", "R"),
    Rule("schedule.start", _one_of(0), "0", "R"),
    Rule("label_smoothing", _one_of(0, 0.1), "0 or 0.1", "T"),
    Rule("mixing.mixup", _one_of(0), "0", "R"),
    Rule("mixing.cutmix", _one_of(0), "0", "R"),
    Rule("loss.name", _one_of("cross-entropy"), "cross-entropy", "R"),
    Rule("data.flip", lambda flip: flip != "alternating", "a probability", "R"),
    Rule("data.translate", _one_of(0), "0", "R"),
    Rule("init.from", _one_of(None), "null", "R"),
    Rule("init.images", _one_of(None), "null", "R"),
    Rule("ema.decay", _one_of(None), "null", "R"),
    Rule("stages", _one_of(()), "[]", "R"),
    Rule("target_accuracy", _one_of(TARGET_ACCURACY), f"{TARGET_ACCURACY}", "R"),
    Rule("evaluate_every", lambda span: str(span) == "4ep", "4ep", "R"),
)


def check_rules(recipe: Recipe) -> None:
    """Refuse a recipe that breaks a rule of the closed division, by its first such key."""
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
    """How a trial that keeps the rules differs from the benchmark, in one phrase each."""
    found = (
        ("model", recipe.model.name, "resnet50"),
        ("image size", recipe.data.image_size, 224),
        ("training images", train_images, TRAIN_IMAGES),
        ("validation images", val_images, VAL_IMAGES),
    )
    return [
        f"{what} {_plain(is_)}, not {_plain(wants)}" for what, is_, wants in found if is_ != wants
    ]


def _broken(key: str, value: Any, valid: str) -> RecipeError:
    return RecipeError(
        f"{key}: {_plain(value)} breaks a rule of MLPerf's closed division, which track=mlperf is "
        f"for; valid: {valid}, or track without mlperf"
    )


def _plain(value: Any) -> str:
    """A value as a message shows it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return f"{len(value)} items"
    return f"{value:,}" if isinstance(value, int) else str(value)
