"""The data of a run: the sources of its images, and the loader of each rank."""

from __future__ import annotations

from pathlib import Path

import torch

from ...pipeline import (
    ImageFolder,
    ImageSource,
    LeftOut,
    Loader,
    OnFault,
    Shards,
    Source,
    Synthetic,
    Transform,
    hold_out,
)
from ..errors import RecipeError
from ..ranks import Job
from ..schema.data import Data
from ..schema.recipe import Recipe
from .device import device_settings
from .timeline import Timeline


def build_sources(recipe: Recipe, on_fault: OnFault | None = None) -> tuple[Source, Source | None]:
    """Return the sources of training and validation images; the latter None without evaluation."""
    data = recipe.data
    if data.source == "synthetic":
        val = Synthetic(data.val_images, data.classes) if data.val_images else None
        return Synthetic(data.train_images, data.classes), val if recipe.evaluate_every else None
    assert data.path is not None  # checked by the schema
    if not is_url(data.path) and not Path(data.path).is_dir():
        hint = "largebatch data prepare digits --out " + data.path
        raise RecipeError(
            f"data.path: no folder {data.path}; it must hold "
            + ("train/<class>/ and val/<class>/" if data.source == "folder" else "train/ and val/")
            + (f"; {hint} makes it" if Path(data.path).name == "digits" else "")
        )
    train = open_split(data, "train", on_fault=on_fault)
    if data.holdout:
        if data.holdout >= len(train):
            raise RecipeError(
                f"data.holdout: {data.holdout} of {len(train)} training images leaves none to "
                f"train on; valid: 1 to {len(train) - 1}"
            )
        kept, held = hold_out(train, data.holdout)
        return kept, held if recipe.evaluate_every else None
    if recipe.evaluate_every is None:
        return train, None
    if data.source == "folder" and not Path(data.path, "val").is_dir():
        prepare = f"largebatch data prepare folder {data.path} --split 0.1 --out NEW"
        raise RecipeError(
            f"data.path: {data.path} has no val/ to evaluate on; valid: data.path=NEW after "
            f"`{prepare}`, or data.holdout={max(1, len(train) // 10)}, a tenth of its images"
        )
    return train, open_split(data, "val", train.classes, on_fault)


def open_split(
    data: Data, name: str, classes: tuple[str, ...] | None = None, on_fault: OnFault | None = None
) -> ImageSource:
    """Open the images of one split, ``train`` or ``val``."""
    assert data.path is not None  # checked by the schema
    if data.source == "folder":
        divided = any(Path(data.path, split).is_dir() for split in ("train", "val"))
        within = name if divided or name != "train" else ""
        return ImageFolder(data.path, within, classes, on_fault or LeftOut())
    return Shards(
        data.path,
        name,
        format=data.source,
        pattern=data.train_shards if name == "train" else data.val_shards,
        classes=classes,
        label_offset=data.label_offset,
        on_fault=on_fault or LeftOut(),
    )


def is_url(path: str) -> bool:
    """Whether a data path is the URL of a server."""
    return "://" in path


def build_loader(
    recipe: Recipe, job: Job, source: Source, timeline: Timeline | None = None
) -> Loader:
    """Build this rank's loader: of training images along ``timeline``, else for evaluation."""
    data = recipe.data
    training = timeline is not None
    transform = transform_of(recipe, training=training)
    # For models that run in FP16, the loader delivers FP16 images directly.
    half = recipe.precision.startswith("fp16")
    return Loader(
        source,
        transform,
        batch_size=recipe.batch_size,
        micro_batch_size=None if training else recipe.micro_batch_size,
        training=training,
        seed=recipe.seed,
        repeats=data.repeats if training else 1,
        rank=job.rank,
        world_size=job.world_size,
        device=job.device,
        backend=data.backend,
        threads=data.threads,
        prefetch=data.prefetch,
        dtype=torch.float16 if half else torch.float32,
        memory_format=device_settings(recipe, job.device).memory_format,
        on_error=data.on_error,
        verify=data.verify,
        timeline=timeline,
    )


def transform_of(recipe: Recipe, *, training: bool) -> Transform:
    """Return what becomes of an image, in training or in evaluation."""
    data = recipe.data
    return Transform(
        image_size=data.image_size if training else recipe.eval_size,
        crop_area=data.crop_area,
        crop_aspect=data.crop_aspect,
        flip=data.flip,
        translate=data.translate if training else 0,
        eval_resize=data.eval_resize,
        interpolation=data.train_interpolation if training else data.eval_interpolation,
        auto_augment=data.auto_augment if training else None,
        erasing=data.erasing if training else 0.0,
        mean=data.mean,
        std=data.std,
    )
