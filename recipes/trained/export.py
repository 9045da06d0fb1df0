"""Export trained weights into a folder of their own: for timm, as safetensors or as ONNX.

Each folder has the weights, a model card and the recipe. That for timm has the form of a repository
on the Hugging Face Hub, from which ``timm.create_model`` also makes the model.
"""

from __future__ import annotations

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
from ..training.folder.names import CLASSES
from .card import Target, published, write_card
from .onnx_file import check_packages, write_onnx
from .source import Trained, one_line, random_images

TARGETS: dict[str, Target] = {"timm": "timm", "safetensors": "safetensors", "onnx": "onnx"}


def check(target: str, model: str, out: Path) -> Target:
    """Check the target for a recipe's ``model.name``, and the folder, before weights are read."""
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
    """Export and check weights, all files at once; returns what was checked: a line to show."""
    model = trained.build()
    recipe = trained.loaded.recipe
    with _written(out) as folder:
        if target == "onnx":
            checked = write_onnx(model, recipe.eval_size, folder / "model.onnx")
        else:
            checked = _write_tensors(model, trained, target, folder)
        head = f"# The recipe {trained.name} as it ran.\n"  # by which its name is found again
        (folder / RECIPE).write_text(head + dump(published(recipe)), encoding="utf-8")
        if trained.classes:
            names = "".join(f"{name}\n" for name in trained.classes)
            (folder / CLASSES).write_text(names, encoding="utf-8")
        write_card(folder / "README.md", trained, model, target)
    return f"checked: {checked}"


def _write_tensors(model: nn.Module, trained: Trained, target: Target, folder: Path) -> str:
    """Write ``model.safetensors``, for timm with its ``config.json``, and load it back."""
    from safetensors.torch import load_file, save_file

    path, size = folder / "model.safetensors", trained.loaded.recipe.eval_size
    # Cloned, as safetensors refuses tensors that share memory (tied weights).
    content = {name: value.detach().clone() for name, value in model.state_dict().items()}
    save_file(content, path, metadata={"format": "pt", "recipe": trained.name})
    if target == "safetensors":
        back: dict[str, Tensor] = load_file(path)
        same = all(torch.equal(value, back[name]) for name, value in content.items())
        checked = f"{len(back)} tensors, read back as they were written"
    else:
        images = random_images(2, size)
        with torch.no_grad():
            outputs = model(images)
            same = torch.equal(_by_timm(model, trained, outputs.shape[-1], folder)(images), outputs)
        checked = "timm.create_model gives the same outputs for 2 random images"
    if not same:
        raise RecipeError(f"--to: what was written differs from the model: not {checked}")
    return checked


def _by_timm(model: Any, trained: Trained, classes: int, folder: Path) -> nn.Module:
    """Write ``config.json``, and make the model from what is in the folder."""
    import timm
    from timm.models._hub import save_config_for_hf

    recipe, size = trained.loaded.recipe, trained.loaded.recipe.eval_size
    model.pretrained_cfg |= {
        "num_classes": classes,
        "interpolation": recipe.data.eval_interpolation,
        "crop_mode": "center",
        "mean": recipe.data.mean,
        "std": recipe.data.std,
        **dict.fromkeys(("input_size", "test_input_size"), (3, size, size)),
        **dict.fromkeys(("crop_pct", "test_crop_pct"), crop_share(size, recipe.data.eval_resize)),
    }
    names = list(trained.classes) if len(trained.classes) == classes else None
    about = {"num_classes": classes, "label_names": names}
    save_config_for_hf(model, folder / "config.json", about, model_args=recipe.model.args)
    try:
        loaded: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except OSError:
        raise
    except Exception as error:  # timm and torch raise errors of their own
        raise RecipeError(
            "--to: timm does not make the model from what was written: "
            f"{one_line(error)}; valid: safetensors"
        ) from error
    return loaded.eval()


def crop_share(size: int, resize: int) -> float:
    """The share ``crop_pct`` for which timm resizes to ``floor(size / crop_pct) = resize``."""
    share = size / resize
    return share if int(size / share) == resize else size / (resize + 0.01)


@contextmanager
def _written(out: Path) -> Iterator[Path]:
    """Context manager that gives a folder beside ``out``, whose files then go there."""
    out = out.resolve()  # such as ``.``, which has no name
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
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
