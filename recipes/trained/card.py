"""The model card of an export: README.md in the form of the Hugging Face Hub.

Its text is ``card.md``, in which every value is escaped: what comes from a run's files is shown,
and makes no table, link or element of HTML.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from ...pipeline import without_query
from ..files import number, whole
from ..models.build import OWN_MODELS
from ..output import template
from ..schema.dotted_path import is_dotted_path
from ..schema.load import dump
from ..schema.recipe import Recipe
from ..schema.sections import Resume
from ..training.folder.ending import versions
from ..training.folder.outcome import metrics_of
from .score import data_in_words, wilson
from .source import Trained

Target = Literal["timm", "safetensors", "onnx"]


class Accuracy(NamedTuple):
    """The accuracy of weights, as their run evaluated them."""

    top1: float  # percent
    top5: float  # percent
    loss: float | None  # mean cross-entropy; None if not known
    images: int | None  # None if not known


class _Code(str):
    """Text of the card that is not escaped."""


def accuracy_of(trained: Trained) -> Accuracy | None:
    """The run's own evaluation of these weights; None if it made none at their step."""
    about, step, prefix = trained.about, trained.step, "ema_" if trained.ema else ""
    if trained.run_dir is None or step is None:
        return None
    found: dict[str, Any] = {}
    if trained.source.is_dir():
        lines = [line for line in metrics_of(trained.run_dir).val if line["step"] == step]
        found = lines[-1] if lines else {}
    elif about.get("evaluated_step") == step:
        found = about | {f"{prefix}loss": about.get(f"{prefix}val_loss")}
    top1, top5, loss = (number(found.get(prefix + name)) for name in ("top1", "top5", "loss"))
    if top1 is None or top5 is None:
        return None
    # Images that were skipped were not evaluated, and how many of these is not recorded.
    images = whole(about.get("val_images")) if about.get("skipped_images") == 0 else None
    return Accuracy(top1, top5, loss, images)


def write_card(path: Path, trained: Trained, model: nn.Module, target: Target) -> None:
    """Write the card of an export: recipe, data, accuracy, versions, how to load the weights."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    recipe, accuracy = by_last_part(trained.loaded.recipe), accuracy_of(trained)
    images, library = data_in_words(recipe), "pytorch" if target == "safetensors" else target
    measured = {"Top-1": accuracy.top1, "Top-5": accuracy.top5} if accuracy else {}
    about: dict[str, Any] = {"dataset_type": recipe.data.path or "random", "dataset_name": images}
    about |= {"task_type": "image-classification", "metric_type": "accuracy"}
    results = [
        EvalResult(**about, metric_name=f"{name} accuracy", metric_value=round(value, 4))
        for name, value in measured.items()
    ]
    head = ModelCardData(
        library_name=library,
        pipeline_tag="image-classification",
        tags=["image-classification", library, "largebatch"],
        metrics=["accuracy"],
        model_name=trained.name if results else None,
        eval_results=results or None,
    )

    def finalize(value: Any) -> str:
        return value if isinstance(value, _Code) else escaped(str(value))

    body = template(__package__, "card.md", finalize=finalize).render(
        trained=trained,
        recipe=recipe,
        target=target,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        accuracy=accuracy,
        images=images,
        interval=wilson(accuracy.top1, accuracy.images) if accuracy and accuracy.images else None,
        make=_making(recipe),
        versions={"Trained": trained.about.get("versions"), "Exported": versions()},
        yaml=_fenced(dump(recipe)),
    )
    ModelCard(f"---\n{head.to_yaml()}\n---\n\n{body}").save(path)


def published(recipe: Recipe) -> Recipe:
    """A recipe without the places of its run: ``run_dir``, ``resume`` and ``init.from``."""
    init = recipe.init.model_copy(update={"from_": None})
    return recipe.model_copy(update={"run_dir": None, "resume": Resume(), "init": init})


def by_last_part(recipe: Recipe) -> Recipe:
    """The recipe to publish, with the names of its data and initial weights for their paths."""
    places = {"from_": recipe.init.from_, "path": recipe.data.path}
    last = {k: Path(without_query(of)).absolute().name for k, of in places.items() if of}
    init = recipe.init.model_copy(update={"from_": last.get("from_")})
    data = recipe.data.model_copy(update={"path": last.get("path")})
    return published(recipe).model_copy(update={"init": init, "data": data})


def escaped(text: str) -> str:
    """A text as Markdown that shows it as it is, in one line."""
    shown = html.escape(re.sub(r"\s+", " ", text), quote=False)
    return re.sub(r"([\\`*_\[\]!|~])", r"\\\1", shown)


def _fenced(text: str) -> _Code:
    """A block of YAML, whose fence is longer than each row of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return _Code(f"{fence}yaml\n{text}{fence}")


def _making(recipe: Recipe) -> _Code:
    """The code that makes the model and loads its weights, where the number of classes is given."""
    name, args = recipe.model.name, f", **{recipe.model.args!r}" if recipe.model.args else ""
    if name in OWN_MODELS:
        name = f"{OWN_MODELS[name].__module__}:{OWN_MODELS[name].__name__}"
    module, _, kind = name.partition(":")
    lines = ["import timm", "from safetensors.torch import load_file", ""]
    call = f"timm.create_model({name!r}, num_classes=classes{args})"
    if is_dotted_path(name):
        lines[0] = f"from {module} import {kind.partition('.')[0]}"  # of such as Class.make
        call = f"{kind}(num_classes=classes{args})"
    load = 'model.load_state_dict(load_file("model.safetensors"))'
    return _Code("\n".join([*lines, f"model = {call}", load]))
