"""Warn about overrides that have no effect because another key switches them off.

They are not errors: a sweep over ``optimizer.name`` may well give LARS's keys to every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .optimizers import OPTIMIZERS, entry_of, users
from .recipe import Recipe


@dataclass(frozen=True)
class _Rule:
    """Keys that have no effect where ``holds`` is true, and the reason to show."""

    keys: tuple[str, ...]
    holds: Callable[[Recipe], bool]
    reason: str


def _unused(key: str) -> _Rule:
    """The rule of a key that only some optimizers take."""
    return _Rule(
        (f"optimizer.{key}",),
        lambda recipe: key not in entry_of(recipe.optimizer.name).own_keys,
        f"optimizer.name is {{recipe.optimizer.name}}, and it is for {users(key)} only",
    )


def _has_no_ratios(recipe: Recipe) -> bool:
    ratios = entry_of(recipe.optimizer.name).trust_ratios
    return ratios is not None and not ratios(recipe.optimizer.args)


_OF_SOME = dict.fromkeys(key for entry in OPTIMIZERS.values() for key in entry.own_keys)
_READING = (
    *("path", "backend", "threads", "prefetch", "hw_decoder_load", "on_error", "verify"),
    *("eval_resize", "eval_interpolation", "mean", "std"),
)
_CROPPING = ("crop_area", "crop_aspect", "flip", "translate")

_RULES = (
    *map(_unused, _OF_SOME),
    _Rule(
        ("optimizer.trust_coefficient",),
        _has_no_ratios,
        "{recipe.optimizer.name} has no trust ratios with its optimizer.args",
    ),
    _Rule(
        tuple(f"data.{key}" for key in (*_READING, *_CROPPING)),
        lambda recipe: recipe.data.source == "synthetic",
        "data.source is synthetic",
    ),
    _Rule(
        ("data.hw_decoder_load",),
        lambda recipe: recipe.data.backend not in ("auto", "dali-gpu") or recipe.device == "cpu",
        "DALI does not decode on the GPU",
    ),
    _Rule(
        ("data.classes", "data.val_images"),
        lambda recipe: recipe.data.source != "synthetic",
        "it applies only to data.source=synthetic; otherwise the data set determines it",
    ),
    _Rule(("ema.every", "ema.warmup"), lambda r: r.ema.decay is None, "ema.decay is null"),
    _Rule(
        tuple(f"profile.{key}" for key in ("ranks", "shapes", "memory", "stacks")),
        lambda recipe: recipe.profile.steps is None,
        "profile.steps is null",
    ),
    _Rule(("cudnn_benchmark", "tf32"), lambda r: r.device == "cpu", "device is cpu"),
    _Rule(
        ("mlperf.org", "mlperf.platform", "mlperf.status", "mlperf.cache_cleared"),
        lambda recipe: recipe.mlperf.log is None,
        "mlperf.log is null",
    ),
    _Rule(
        (
            *("data.eval_size", "data.eval_resize", "data.eval_interpolation"),
            *("data.val_shards", "data.val_images", "checkpoint.keep_best"),
        ),
        lambda recipe: recipe.evaluate_every is None,
        "evaluate_every is null",
    ),
)


def no_effect(recipe: Recipe, keys: Iterable[str]) -> tuple[str, ...]:
    """A line for each of ``keys``, named as in overrides, that has no effect on ``recipe``."""
    return tuple(
        f"{key} has no effect: {rule.reason.format(recipe=recipe)}"
        for key in dict.fromkeys(keys)
        for rule in [r for r in _RULES if key in r.keys and r.holds(recipe)][:1]
    )
