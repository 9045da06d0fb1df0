"""Resuming a run from a checkpoint: what must be the same as when it was written.

Settings may change on resume where the checkpoint's tensors and its position in the data keep
their meaning; such changes are reported. Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ....amp import PRECISIONS
from ....pipeline import Loader
from ...errors import RecipeError
from ...models.batch_norm import statistics_images
from ...schema.load import Loaded
from ...schema.optimizers import entry_of
from ...schema.recipe import Recipe
from ..timeline import Timeline
from .outcome import has_metrics

#: Precisions that hold parameters in another dtype than FP32.
_CASTING = [name for name, form in PRECISIONS.items() if form.casts_parameters]

_UNCHANGEABLE = (
    *("model.name", "model.args", "batch_size", "optimizer.name", "optimizer.args"),
    # which decide the optimizer's parameter groups
    *("optimizer.decay_bias_and_norm", "optimizer.adapt_bias_and_norm"),
)


def largest_micro_batch(saved: Mapping[str, Any]) -> int | None:
    """Most images per rank and forward pass so far: fewer ranks accumulate rather than pass it."""
    if not saved:
        return None
    now: int = saved["loader"]["fingerprint"]["micro_batch_size"]  # that of the first stage
    return max(saved.get("largest_micro_batch") or 0, now)


def move_to(
    saved: dict[str, Any],
    loaded: Loaded,
    folder: Path,
    path: Path,
    loader: Loader,
    timeline: Timeline,
    model: nn.Module,
) -> list[str]:
    """Check that a run can resume from a checkpoint, move its loader, and name what changed."""
    recipe, last_step = loaded.recipe, timeline.last_step(loaded.recipe)
    _check_same_run(saved["recipe"], recipe)
    before = saved["loader"]["fingerprint"]
    changes = loader.load_state_dict(saved["loader"], reshard=recipe.resume.reshard)
    changes = [*_resharded(before, loader, recipe, model), *changes]
    if timeline.position(saved["step"]) != saved["loader"]["position"]:
        raise RecipeError(
            f"stages: the checkpoint {path} was written with other batch sizes before step "
            f"{saved['step']}; valid on resume: changes after that step"
        )
    reached = recipe.reached(saved.get("reached"))
    if (reached or saved["step"] >= last_step) and not has_metrics(folder):
        end = "it reached target_accuracy" if reached else f"the run ends at step {last_step}"
        raise RecipeError(
            f"resume.from: nothing is left to train: {path} is at step {saved['step']}, and {end}; "
            "resume from an earlier checkpoint, or lengthen the run (epochs, stop_after)"
        )
    return changes


def _resharded(
    before: dict[str, Any], loader: Loader, recipe: Recipe, model: nn.Module
) -> list[str]:
    """Say how a step divides among another number of ranks, and what batch norm makes of that."""
    first = loader.timeline.phases[0]
    now = (first.micro_batch_size, loader.world_size)
    old = (before["micro_batch_size"], before["world_size"])
    if now == old:
        return []
    text = f"a global batch is now {_shape(first.batch_size, *now)}, "
    text += f"was {_shape(first.batch_size, *old)}"
    images = statistics_images(recipe, model, *now)
    images_before = statistics_images(recipe, model, *old)
    if images is None:
        return [text]
    if images == images_before:
        return [f"{text}; batch norm over {images} images as before"]
    change = f"now over {images} images, was over {images_before}"
    return [f"{text}; batch norm {change}: expect other losses"]


def _shape(batch: int, micro: int, ranks: int) -> str:
    return f"{micro} images x {batch // (micro * ranks)} accumulated x {ranks} ranks"


def _check_same_run(saved: dict[str, Any], recipe: Recipe) -> None:
    """Raise RecipeError if a checkpoint's tensors or steps would have another meaning now."""
    now, entry = recipe.model_dump(mode="json", by_alias=True), entry_of(recipe.optimizer.name)
    options = recipe.optimizer
    joined = options.decay_bias_and_norm and options.adapt_bias_and_norm  # else biases have a group

    def is_one(value: float) -> bool:
        return value == 1

    def cast(value: str) -> str:  # autocast may change; the dtypes of tensors may not
        return value if value in _CASTING else ""

    # By key, what of its value has to be the same, and what else is valid on resume.
    rules: dict[str, tuple[Callable[[Any], Any], str]] = {
        **dict.fromkeys(_UNCHANGEABLE, (lambda value: value, "")),
        "optimizer.dialect": (lambda value: value, ""),
        "optimizer.body_lr_scale": (is_one, "1 in both, or another value in both"),
        "optimizer.bias_lr_scale": (is_one, "1 in both, or another value in both"),
        "optimizer.momentum": (bool, "momentum 0 in both, or above 0 in both"),
        "precision": (cast, ""),
    }
    for key in ("dialect", "momentum"):
        if key not in entry.own_keys:
            del rules[f"optimizer.{key}"]
    if not joined:
        del rules["optimizer.bias_lr_scale"]
    for key, (part, valid) in rules.items():
        old, new = _value(saved, key), _value(now, key)
        if key == "optimizer.args":
            old, new = ({k: of[k] for k in of if k not in entry.trainers} for of in (old, new))
        if part(old) != part(new):
            raise RecipeError(
                f"resume.from: the checkpoint was written with {key}={old}, not {new}; "
                f"valid on resume: {valid or f'{key}={old}'}"
            )


def _value(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = recipe[part]
    return recipe
