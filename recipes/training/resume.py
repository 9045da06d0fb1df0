"""Resuming a run from a checkpoint: what must be the same as when it was written.

Settings may change on resume where the checkpoint's tensors and its position in the data keep
their meaning; such changes are reported. Everything else is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...amp import PRECISIONS
from ...pipeline import Loader
from ..errors import RecipeError
from ..schema.load import Loaded
from ..schema.optimizers import entry_of
from ..schema.recipe import Recipe
from .checkpoint import read_state
from .metrics import METRICS
from .timeline import Timeline

#: Precisions that hold parameters in another dtype than FP32.
_CASTING = [name for name, form in PRECISIONS.items() if form.casts_parameters]

_UNCHANGEABLE = (
    *("model.name", "model.args", "batch_size"),
    *("optimizer.name", "optimizer.args"),
    # which decide the optimizer's parameter groups
    *("optimizer.decay_bias_and_norm", "optimizer.adapt_bias_and_norm"),
)


def read_resumed(
    loaded: Loaded, folder: Path, path: Path, loader: Loader, timeline: Timeline
) -> tuple[dict[str, Any], list[str]]:
    """Read a checkpoint's state, check that the run can resume from it, and move the loader there.

    Args:
        loaded: The recipe of the resumed run.
        folder: The folder of the resumed run.
        path: The checkpoint.
        loader: Loader of the training images; its position is set.
        timeline: Timeline of the resumed run.

    Returns:
        The checkpoint's state, and one line for each change of backend, memory format or version
        since it was written.

    Raises:
        RecipeError, DataError: the checkpoint is that of another run, or is damaged, or nothing is
            left to train.
    """
    recipe, last_step = loaded.recipe, timeline.last_step(loaded.recipe)
    saved = read_state(path)
    _check_same_run(saved["recipe"], recipe)
    changes = loader.load_state_dict(saved["loader"], reshard=recipe.resume.reshard)
    if timeline.position(saved["step"]) != saved["loader"]["position"]:
        raise RecipeError(
            f"stages: the checkpoint {path} was written with other batch sizes before step "
            f"{saved['step']}; valid on resume: changes after that step"
        )
    reached = recipe.reached(saved.get("reached"))
    if (reached or saved["step"] >= last_step) and not (folder / METRICS).exists():
        end = "it reached target_accuracy" if reached else f"the run ends at step {last_step}"
        raise RecipeError(
            f"resume.from: nothing is left to train: {path} is at step {saved['step']}, and {end}; "
            "valid: an earlier checkpoint, or a longer run"
        )
    return saved, changes


def _check_same_run(saved: dict[str, Any], recipe: Recipe) -> None:
    """Raise RecipeError if a checkpoint's tensors or steps would have another meaning now."""
    now = recipe.model_dump(mode="json", by_alias=True)
    entry = entry_of(recipe.optimizer.name)
    own_keys = entry.own_keys
    for key in (*_UNCHANGEABLE, *(["optimizer.dialect"] if "dialect" in own_keys else [])):
        old, new = saved, now
        for part in key.split("."):
            old, new = old.get(part, {}), new[part]  # old checkpoints lack optimizer.args
        if key == "optimizer.args":
            old, new = _without(old, entry.trainers), _without(new, entry.trainers)
        if old != new:
            raise RecipeError(
                f"resume.from: the checkpoint was written with {key}={old}, not {new}; "
                f"valid on resume: {key}={old}"
            )
    options = recipe.optimizer
    if options.decay_bias_and_norm and options.adapt_bias_and_norm:  # else biases have a group
        scale = saved["optimizer"].get("bias_lr_scale", 1.0)
        if (scale == 1) != (options.bias_lr_scale == 1):
            raise RecipeError(
                f"resume.from: the checkpoint was written with optimizer.bias_lr_scale={scale}, "
                f"not {options.bias_lr_scale}, which makes other parameter groups; valid on "
                "resume: 1 in both, or another value in both"
            )
    changed = bool(saved["optimizer"]["momentum"]) != bool(recipe.optimizer.momentum)
    if changed and "momentum" in own_keys:
        raise RecipeError(
            "resume.from: the checkpoint was written with optimizer.momentum="
            f"{saved['optimizer']['momentum']}, not {recipe.optimizer.momentum}; valid on resume: "
            "momentum 0 in both, or above 0 in both"
        )
    # Autocast may change on resume; the dtypes of the checkpoint's tensors may not.
    old, new = saved["precision"], now["precision"]
    if old != new and any(name in _CASTING for name in (old, new)):
        raise RecipeError(
            f"resume.from: the checkpoint was written with precision={old}, not {new}, whose "
            f"tensors have other dtypes; valid on resume: precision={old}"
        )


def _without(args: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if name not in names}
