"""Overrides of the recipe of an evaluation: those that have no part in it are named."""

from __future__ import annotations

from collections.abc import Iterable

from ..schema.no_effect import no_effect
from ..schema.recipe import Recipe

#: Sections and keys of a recipe that an evaluation does not read; ``seed`` only where the images
#: are not drawn by it.
TRAINING_ONLY = (
    *("optimizer", "schedule", "ema", "init", "batch_norm", "checkpoint", "mlperf", "resume"),
    *("profile", "batch_size", "scale", "epochs", "seed", "label_smoothing", "loss_scale"),
    *("max_skipped_steps", "compile", "evaluate_every", "log_every"),
    *("trust_ratios_every", "gradient_noise_every", "track", "callbacks", "run_dir"),
    *("target_accuracy", "stop_after", "model.zero_init_last_norm", "data.train_images"),
    *("data.crop_area", "data.crop_aspect", "data.flip", "data.translate"),
    *("comm.algorithm", "comm.plan", "comm.ranks_per_node"),
)


def for_evaluation(overrides: Iterable[str]) -> list[str]:
    """The overrides with which to load a recipe for an evaluation.

    ``batch_size`` is left out, so that micro-batches of any size are valid.
    """
    kept = [each for each in overrides if _key(each) != "batch_size"]
    micro = [each.partition("=")[2] for each in kept if _key(each) == "micro_batch_size"]
    whole = micro and micro[-1].strip().isdigit()
    return [*kept, f"batch_size={micro[-1]}"] if whole else kept


def without_effect(recipe: Recipe, overrides: Iterable[str]) -> list[str]:
    """A line for the overrides that an evaluation does not read, and those that others undo."""
    keys = list(dict.fromkeys(map(_key, overrides)))
    idle = [key for key in keys if _is_idle(recipe, key)]
    lines = [f"has no effect on an evaluation: {', '.join(idle)}"] if idle else []
    return [*lines, *no_effect(recipe, (key for key in keys if key not in idle))]


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _is_idle(recipe: Recipe, key: str) -> bool:
    if key == "seed" and recipe.data.source == "synthetic":  # which draws the images
        return False
    return any(key == name or key.startswith(f"{name}.") for name in TRAINING_ONLY)
