"""Evaluate trained weights, as a run evaluates itself, and say how certain the accuracy is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...amp import auto_precision
from ...lars import Span
from ...pipeline import LeftOut, OnFault, Source, printable, without_query
from ..errors import RecipeError
from ..ranks import Job
from ..schema.recipe import Recipe
from ..training.build import build_precision
from ..training.data import build_loader, build_sources, is_url, open_split
from ..training.device import device_settings
from ..training.evaluate import evaluate
from .source import Trained, one_line, random_images

_MOST_IMAGES = 256  # per forward pass, where nothing says how many fit


@dataclass(frozen=True)
class Score:
    """The result of an evaluation, in the order of its JSON."""

    top1: float  # accuracy in percent
    top1_interval: tuple[float, float]  # its 95 % interval, by :func:`wilson`
    top5: float  # share of the images whose class is among the five likeliest, in percent
    loss: float  # mean cross-entropy, without label smoothing
    images: int  # that were evaluated
    skipped_images: int  # that could not be used
    precision: str
    device: str
    backend: str  # decoder of images
    left_out: str = ""  # a line about images that are there and not in the data

    def as_json(self, trained: Trained) -> dict[str, Any]:
        """The score with its weights and images, as JSON can hold it; sizes are in pixels."""
        recipe = trained.loaded.recipe
        return {
            "weights": str(trained.source),
            "ema": trained.ema,
            "recipe": trained.name,
            "model": recipe.model.name,
            "step": trained.step,
            "data": data_in_words(recipe),
            "image_size": recipe.eval_size,
            "eval_resize": recipe.data.eval_resize,
            "eval_interpolation": recipe.data.eval_interpolation,
            **vars(self),
            "loss": self.loss if math.isfinite(self.loss) else None,
        }


def wilson(percent: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of ``count`` images, in percent, by Wilson 1927."""
    from scipy.stats import binomtest  # takes a second to import

    found = binomtest(round(percent / 100 * count), count).proportion_ci(0.95, "wilson")
    return float(100 * found.low), float(100 * found.high)


def for_evaluation(overrides: Sequence[str]) -> list[str]:
    """Overrides without ``batch_size``, so that micro-batches of any size are valid."""
    pairs = [override.partition("=") for override in overrides]
    micro = [value for key, _, value in pairs if key.strip() == "micro_batch_size"]
    kept = ["".join(pair) for pair in pairs if pair[0].strip() != "batch_size"]
    return [*kept, *(f"batch_size={value}" for value in micro[-1:] if value.strip().isdigit())]


def score(trained: Trained, job: Job) -> Score:
    """Evaluate weights on their recipe's validation images, as their run did; a collective."""
    recipe = _as_trained(trained, job)
    with job.raise_on_all_ranks():
        left_out = LeftOut()
        source = validation_source(recipe, left_out)
        model = trained.build()
        settings = device_settings(recipe, job.device)
        loader = build_loader(recipe, job, source)
        check_fit(trained, model, recipe, source)
    model = model.to(job.device).to(memory_format=settings.memory_format)
    settings.apply()
    precision = build_precision(recipe, job)
    values = evaluate(precision.convert(model), loader, precision, job)
    skipped = sum(job.gather(loader.left_out))
    images = len(source) - skipped
    return Score(
        top1=values["top1"],
        top1_interval=wilson(values["top1"], images),
        top5=values["top5"],
        loss=values["loss"],
        images=images,
        skipped_images=skipped,
        precision=precision.name,
        device=job.device.type,
        backend=loader.backend,
        left_out=left_out.line(),
    )


def _as_trained(trained: Trained, job: Job) -> Recipe:
    """The recipe with the precision of the run, and its images per forward pass if they fit."""
    recipe = trained.loaded.recipe
    same_device = trained.about.get("device") == job.device.type  # else they may not fit
    recorded = trained.about.get("micro_batch_size") if same_device else None
    micro = recipe.micro_batch_size or recorded or min(recipe.batch_size, _MOST_IMAGES)
    same = {"batch_size": micro * job.world_size, "micro_batch_size": micro}
    if recipe.precision == "auto":
        same["precision"] = trained.precision or auto_precision(job.device.type)
    return recipe.model_copy(update={**same, "evaluate_every": Span(1, "ep")})


def validation_source(recipe: Recipe, on_fault: OnFault | None = None) -> Source:
    """The images that a recipe evaluates; a folder with ``val`` alone is enough."""
    data, folder = recipe.data, Path(recipe.data.path or "")
    if data.source != "synthetic" and not is_url(data.path or "") and not folder.is_dir():
        raise RecipeError(f"data.path: no folder {data.path}; valid: one with val/, or a URL")
    if data.source == "folder" and not data.holdout and not (folder / "train").is_dir():
        return open_split(data, "val", on_fault=on_fault)
    val = build_sources(recipe, on_fault)[1]
    if val is None:
        raise RecipeError("data.val_images: 0 images to evaluate; valid: at least 1")
    return val


def data_in_words(recipe: Recipe) -> str:
    """Name the images that a recipe evaluates."""
    data = recipe.data
    if data.source == "synthetic":
        return "random images"
    path = without_query(data.path or "")
    if data.holdout:
        return f"{path}, held out of train"
    return printable(f"{path.rstrip('/')}/{data.val_shards or 'val'}")


def check_fit(trained: Trained, model: nn.Module, recipe: Recipe, source: Source) -> None:
    """Check that a model takes images of this size, and learnt their classes in their order."""
    size, data = recipe.eval_size, recipe.data
    try:
        with torch.no_grad():
            outputs = model(random_images(1, size)).shape[-1]
    except RecipeError:
        raise
    except Exception as error:  # whatever the model's code raises
        raise RecipeError(
            f"data.eval_size: {recipe.model.name} does not take images of {size} px: "
            f"{one_line(error)}; valid: the size it was trained at, or model.args that allow others"
        ) from None
    theirs = source.classes
    unnamed = theirs == tuple(map(str, range(len(theirs))))
    named = data.source == "folder" or (data.source != "synthetic" and not unnamed)
    pairs = enumerate(zip(trained.classes, theirs, strict=False)) if named else ()
    other = next(((n, *pair) for n, pair in pairs if pair[0] != pair[1]), None)
    if outputs != len(theirs):
        problem = f"has {len(theirs)} classes, and the model of {trained.source} has {outputs}"
    elif other is not None:
        number, our, their = other
        problem = f"has class {number} {their!r}, which is {our!r} in the model of {trained.source}"
    else:
        return
    raise RecipeError(
        f"data.path: {without_query(data.path or 'the data')} {problem}; valid: images of the "
        "classes of its training, with their names"
    )
