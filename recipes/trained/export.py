"""Export trained weights into a folder of their own: for timm, as safetensors or as ONNX.

Each folder has the weights, a model card and the recipe. That for timm has the form of a repository
on the Hugging Face Hub, from which ``timm.create_model`` also makes the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RecipeError
from ..models.build import is_of_timm
from ..schema.load import RECIPE, dump
from ..schema.recipe import Recipe
from ..training.folder.names import CLASSES
from .card import Target, accuracy_of, published, write_card
from .onnx_file import check_packages, write_onnx
from .outputs import outputs_of, random_images
from .source import Trained

TARGETS: dict[str, Target] = {"timm": "timm", "safetensors": "safetensors", "onnx": "onnx"}
SAFETENSORS, CONFIG, ONNX = "model.safetensors", "config.json", "model.onnx"


def check(target: str, model: str, out: Path) -> Target:
    """Check what can be checked before the weights are read.

    Args:
        target: Form of the export.
        model: ``model.name`` of the recipe.
        out: The folder to write.

    Raises:
        RecipeError: There is no such target, or not for this model; a package for it is missing; or
            the folder exists and is not empty.
    """
    valid = ", ".join(targets_of(model))
    if target not in TARGETS:
        raise RecipeError(f"--to: unknown target {target!r}; valid for {model}: {valid}")
    if target not in targets_of(model):
        raise RecipeError(f"--to: {model} is not a model of timm; valid for it: {valid}")
    if target == "onnx":
        check_packages()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise _exists(out)
    return TARGETS[target]


def targets_of(model: str) -> list[str]:
    """The targets that are possible for a model."""
    return [name for name in TARGETS if name != "timm" or is_of_timm(model)]


def export(trained: Trained, target: Target, out: Path) -> list[str]:
    """Export weights, and check that what was written gives the outputs of the model.

    Args:
        trained: The weights and their recipe.
        target: Form of the export.
        out: Folder to write. It appears when it is complete.

    Returns:
        What was checked, and how well it agrees: lines to show.

    Raises:
        RecipeError: The weights are not those of the recipe's model, the folder cannot be written,
            or the target cannot hold the model.
    """
    model = trained.build()
    recipe = trained.loaded.recipe
    with _written(out) as folder:
        if target == "onnx":
            checked = write_onnx(model, recipe.eval_size, folder / ONNX)
        else:
            checked = _write_tensors(model, recipe, trained, target, folder)
        (folder / RECIPE).write_text(_head(trained) + dump(published(recipe)), encoding="utf-8")
        if trained.classes:
            names = "".join(f"{name}\n" for name in trained.classes)
            (folder / CLASSES).write_text(names, encoding="utf-8")
        write_card(folder, trained, model, target, accuracy_of(trained))
    return [checked]


def _head(trained: Trained) -> str:
    """The head comment of the recipe, by which its name is found again."""
    return f"# The recipe {trained.name} as it ran.\n"


def _write_tensors(
    model: nn.Module, recipe: Recipe, trained: Trained, target: Target, folder: Path
) -> str:
    """Write ``model.safetensors``, for timm with its ``config.json``, and load it back."""
    from safetensors.torch import load_file, save_file

    path = folder / SAFETENSORS
    # Cloned, as safetensors refuses tensors that share memory (tied weights).
    content = {name: value.detach().clone() for name, value in model.state_dict().items()}
    about = {"format": "pt", "recipe": trained.name, "model": recipe.model.name}
    save_file(content, path, metadata=about)
    if target == "safetensors":
        back: dict[str, Tensor] = load_file(path)
        same = all(torch.equal(value, back[name]) for name, value in content.items())
        return _require(same, f"{len(back)} tensors, read back as they were written")
    import timm

    (folder / CONFIG).write_text(json.dumps(_timm_config(model, recipe, trained), indent=2) + "\n")
    try:
        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except OSError:
        raise
    except Exception as error:  # timm and torch raise errors of their own
        reason = " ".join(str(error).split())
        raise RecipeError(
            f"--to: timm does not make the model from what was written: {type(error).__name__}: "
            f"{reason}; valid: safetensors"
        ) from error
    images = random_images(2, recipe.eval_size)
    with torch.no_grad():
        same = torch.equal(loaded(images), model(images))
    return _require(same, "timm.create_model gives the same outputs for 2 random images")


def _require(same: bool, what: str) -> str:
    if not same:
        raise RecipeError(f"--to: what was written differs from the model: not {what}")
    return f"checked: {what}"


def _timm_config(model: nn.Module, recipe: Recipe, trained: Trained) -> dict[str, Any]:
    """The ``config.json`` from which timm makes the model and its transform of images."""
    about: Any = model
    size, data = recipe.eval_size, recipe.data
    crop = crop_share(size, data.eval_resize)
    source: dict[str, Any] = dict(about.pretrained_cfg)
    layers = {key: source[key] for key in ("first_conv", "classifier") if source.get(key)}
    classes = outputs_of(model, size)
    named = len(trained.classes) == classes
    return {
        "architecture": recipe.model.name.partition(".")[0],
        "num_classes": classes,
        "num_features": about.num_features,
        **({"label_names": list(trained.classes)} if named else {}),
        **({"model_args": recipe.model.args} if recipe.model.args else {}),
        "pretrained_cfg": {
            "num_classes": classes,
            "input_size": [3, size, size],
            "test_input_size": [3, size, size],
            "fixed_input_size": bool(source.get("fixed_input_size", False)),
            "interpolation": data.eval_interpolation,
            "crop_pct": crop,
            "test_crop_pct": crop,
            "crop_mode": "center",
            "mean": list(data.mean),
            "std": list(data.std),
            **layers,
        },
    }


def crop_share(size: int, resize: int) -> float:
    """The share ``crop_pct`` for which timm resizes to ``floor(size / crop_pct) = resize``."""
    share = size / resize
    return share if int(size / share) == resize else size / (resize + 0.01)


@contextmanager
def _written(out: Path) -> Iterator[Path]:
    """Context manager that gives a folder beside ``out``, whose files then go there.

    Raises:
        RecipeError: It cannot be written.
    """
    out = out.resolve()  # such as ``.``, which has no name
    try:
        if not out.parent.exists():
            out.parent.mkdir(parents=True)
        # A folder of its own for each export, as several may be written at once.
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
            partial = Path(beside, out.name)
            partial.mkdir()
            yield partial
            if not out.exists():
                partial.rename(out)
                return
            if any(out.iterdir()):
                raise _exists(out)
            for path in sorted(partial.iterdir()):  # not as a new folder: a shell may be in it
                path.rename(out / path.name)
    except OSError as error:
        raise RecipeError(
            f"--out: {error.filename or out} cannot be written: {error.strerror}; valid: a new "
            "folder in one that can be written and has room"
        ) from error


def _exists(out: Path) -> RecipeError:
    return RecipeError(f"--out: {out} exists and is not empty; valid: a new folder")
