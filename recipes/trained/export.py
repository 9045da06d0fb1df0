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
from .card import Target, published, write_card
from .onnx_file import check_packages, write_onnx
from .source import Trained, random_images

TARGETS: dict[str, Target] = {"timm": "timm", "safetensors": "safetensors", "onnx": "onnx"}


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
    possible = [name for name in TARGETS if name != "timm" or is_of_timm(model)]
    if target not in possible:
        problem = f"{model} is not a model of timm" if target in TARGETS else f"unknown {target!r}"
        raise RecipeError(f"--to: {problem}; valid for {model}: {', '.join(possible)}")
    if target == "onnx":
        check_packages()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"--out: {out} exists and is not empty; valid: a new folder")
    return TARGETS[target]


def export(trained: Trained, target: Target, out: Path) -> str:
    """Export weights, and check that what was written gives the outputs of the model.

    Args:
        trained: The weights and their recipe.
        target: Form of the export.
        out: Folder to write. Its files appear when all are complete.

    Returns:
        What was checked, and how well it agrees: a line to show.

    Raises:
        RecipeError: The weights are not those of the recipe's model, the folder cannot be written,
            or the target cannot hold the model.
    """
    model = trained.build()
    recipe = trained.loaded.recipe
    with _written(out) as folder:
        if target == "onnx":
            checked = write_onnx(model, recipe.eval_size, folder / "model.onnx")
        else:
            checked = _write_tensors(model, recipe, trained, target, folder)
        head = f"# The recipe {trained.name} as it ran.\n"  # by which its name is found again
        (folder / RECIPE).write_text(head + dump(published(recipe)), encoding="utf-8")
        if trained.classes:
            names = "".join(f"{name}\n" for name in trained.classes)
            (folder / CLASSES).write_text(names, encoding="utf-8")
        write_card(folder / "README.md", trained, model, target)
    return f"checked: {checked}"


def _write_tensors(
    model: nn.Module, recipe: Recipe, trained: Trained, target: Target, folder: Path
) -> str:
    """Write ``model.safetensors``, for timm with its ``config.json``, and load it back."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    # Cloned, as safetensors refuses tensors that share memory (tied weights).
    content = {name: value.detach().clone() for name, value in model.state_dict().items()}
    save_file(content, path, metadata={"format": "pt", "recipe": trained.name})
    if target == "safetensors":
        back: dict[str, Tensor] = load_file(path)
        same = all(torch.equal(value, back[name]) for name, value in content.items())
        return _require(same, f"{len(back)} tensors, read back as they were written")
    import timm

    config = json.dumps(_timm_config(model, recipe, trained), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
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
    return what


def _timm_config(model: nn.Module, recipe: Recipe, trained: Trained) -> dict[str, Any]:
    """The ``config.json`` from which timm makes the model and its transform of images."""
    about: Any = model
    size, data = recipe.eval_size, recipe.data
    source: dict[str, Any] = dict(about.pretrained_cfg)
    with torch.no_grad():
        classes = int(model(random_images(1, size)).shape[-1])
    images = {
        "input_size": [3, size, size],
        "interpolation": data.eval_interpolation,
        "crop_pct": crop_share(size, data.eval_resize),
        "crop_mode": "center",
        "mean": list(data.mean),
        "std": list(data.std),
    }
    named = len(trained.classes) == classes
    return {
        "architecture": recipe.model.name.partition(".")[0],
        "num_classes": classes,
        "num_features": about.num_features,
        **({"label_names": list(trained.classes)} if named else {}),
        **({"model_args": recipe.model.args} if recipe.model.args else {}),
        "pretrained_cfg": {
            "num_classes": classes,
            "fixed_input_size": bool(source.get("fixed_input_size", False)),
            **images,
            **{f"test_{key}": images[key] for key in ("input_size", "crop_pct")},
            **{key: source[key] for key in ("first_conv", "classifier") if source.get(key)},
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
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as partial:
            yield Path(partial)
            out.mkdir(exist_ok=True)
            if any(out.iterdir()):
                raise RecipeError(f"--out: {out} exists and is not empty; valid: a new folder")
            for path in sorted(Path(partial).iterdir()):
                path.rename(out / path.name)
    except OSError as error:
        raise RecipeError(
            f"--out: {error.filename or out} cannot be written: {error.strerror}; valid: a new "
            "folder in one that can be written and has room"
        ) from error
