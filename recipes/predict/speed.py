"""The time of a step on one GPU: a preset's, given as a throughput, or two measured steps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...comm import StepTime
from ..errors import RecipeError, did_you_mean
from ..schema.recipe import Recipe
from .presets import GPUS, IMAGE_SIZE, MODEL, Gpu


@dataclass(frozen=True)
class Speed:
    """The time of a step on one GPU.

    Attributes:
        step: the time by the number of images.
        holds: smallest and largest number of images for which it holds; None if any.
        sources: one line for each number, with its source.
    """

    step: StepTime
    holds: tuple[int, int] | None
    sources: tuple[str, ...]


def gpu_named(name: str | None) -> Gpu | None:
    """Return a preset; None without a name.

    Raises:
        RecipeError: there is none of this name.
    """
    if name is None:
        return None
    if name not in GPUS:
        raise RecipeError(
            f"--gpu: unknown GPU {name!r}{did_you_mean(name, list(GPUS))}; valid: {', '.join(GPUS)}"
        )
    return GPUS[name]


def find_speed(
    recipe: Recipe,
    gpu: str | None,
    images: int,
    images_per_second: float | None,
    measured: str | None,
) -> Speed:
    """Return the time of a step from a preset or from the options of the command line.

    Args:
        recipe: the recipe.
        gpu: name of a preset.
        images: images per GPU and step at which ``images_per_second`` holds.
        images_per_second: throughput of one GPU, in place of the preset's.
        measured: two steps of one GPU as ``IMAGES:MS,IMAGES:MS``, in place of both.

    Raises:
        RecipeError: options are unknown, exclude each other, or are missing.
    """
    if measured is not None:
        if images_per_second is not None:
            raise RecipeError(
                "--measured: given together with --images-per-second; valid: one of the two"
            )
        step, held = _measured(measured)
        rate = f"{1 / step.seconds_per_image:g} images/s per GPU"
        return Speed(step, held, (f"{rate} and {1e3 * step.fixed_seconds:.2g} ms per step: given",))
    if images_per_second is not None:
        step = StepTime.at(images, images_per_second)
        return Speed(step, None, (f"{images_per_second:g} images/s per GPU: given",))
    preset = gpu_named(gpu)
    model, size = recipe.model.name, recipe.data.image_size
    if preset is None:
        raise RecipeError(
            "--images-per-second: missing; valid: the throughput of one GPU, or a preset by --gpu"
        )
    if (model, size) != (MODEL, IMAGE_SIZE):
        raise RecipeError(
            f"--images-per-second: missing; the preset of {gpu} is for {MODEL} at {IMAGE_SIZE} "
            f"pixels only; valid: the throughput of {model} at {size} pixels"
        )
    step = preset.step_time
    return Speed(
        step,
        preset.fitted,
        (
            f"{preset.images_per_second:g} images/s per GPU at {preset.images} images on "
            f"{preset.gpus}: {preset.source}",
            f"{1e3 * step.fixed_seconds:g} ms per step that do not shrink with the images: "
            f"{preset.fixed_source}",
        ),
    )


def _measured(text: str) -> tuple[StepTime, tuple[int, int]]:
    found = re.fullmatch(r"(\d+):([\d.]+),(\d+):([\d.]+)", text.replace(" ", ""))
    try:
        if found is None:
            raise ValueError("no two steps")
        first, first_ms, second, second_ms = found.groups()
        pairs = sorted(((int(first), float(first_ms)), (int(second), float(second_ms))))
        (few, short), (many, long) = pairs
        return StepTime.through((few, short / 1e3), (many, long / 1e3)), (few, many)
    except ValueError as error:
        problem = str(error).partition(";")[0]
        raise RecipeError(
            f"--measured: {text!r}: {problem}; valid: images and milliseconds of two steps of one "
            "GPU, such as 64:31.5,256:98"
        ) from None
