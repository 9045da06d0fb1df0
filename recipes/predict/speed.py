"""The time of a step on one GPU: of a preset, or as it was measured on one GPU or on a node."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...comm import StepTime, straggler_slowdown
from ..errors import RecipeError, but_valid
from ..schema.recipe import Recipe
from .presets import GPUS, IMAGE_SIZE, MODEL, STRAGGLER_SIGMA, Between, Fixed, Gpu


@dataclass(frozen=True)
class Measured:
    """A throughput: of ``gpus`` with ``images`` each per step, in images per second per GPU."""

    gpus: int
    images: int
    per_gpu: float

    def __str__(self) -> str:
        where = "one GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return f"{where} with {self.images} images each, {self.per_gpu:,.0f} images/s per GPU"


@dataclass(frozen=True)
class Speed:
    """The time of a step on one GPU."""

    step: StepTime  # by the number of images, without waiting for other GPUs
    best: Measured  # at the best measured batch; efficiencies are relative to it
    between: Between  # throughputs that may be expected in place of the best's
    holds: tuple[int, int]  # smallest and largest number of images for which the time is known
    sources: tuple[str, ...]  # one line for each number


def gpu_named(name: str | None) -> Gpu | None:
    """Return a preset; None without a name."""
    if name is not None and name not in GPUS:
        raise RecipeError(
            f"--gpu: unknown GPU {name!r}{but_valid(name, list(GPUS))}: {', '.join(GPUS)}"
        )
    return None if name is None else GPUS[name]


def find_speed(recipe: Recipe, gpu: str | None, measured: str | None) -> Speed:
    """The time of a step from a preset, or ``measured`` as ``[GPUSx]IMAGES:RATE``, one or two."""
    preset, model, size = gpu_named(gpu), recipe.model.name, recipe.data.image_size
    if measured is not None:
        fits = (model, size) == (MODEL, IMAGE_SIZE)
        return _from_measured(measured, preset if fits else None)
    valid = "such as 256:2470 for 2,470 images/s of one GPU with 256 images"
    if preset is None:
        raise RecipeError(f"--measured: missing; valid: {valid}, or a preset by --gpu")
    if model != MODEL:
        raise RecipeError(
            f"--measured: missing; the preset of {gpu} is for {MODEL} only; valid: the throughput "
            f"of {model} at {size} pixels, {valid}"
        )
    rate, fixed, between = preset.rate, preset.fixed, preset.between
    best = Measured(rate.gpus, rate.images, rate.images_per_second)
    sources, holds = [f"speed: {best}: {rate.source}", _stated(fixed)], fixed.images
    if size != IMAGE_SIZE:  # images of as many pixels take as long
        more = (IMAGE_SIZE / size) ** 2
        best = Measured(rate.gpus, round(rate.images * more), rate.images_per_second * more)
        between = Between(between.low * more, between.high * more, between.source)
        holds = (round(holds[0] * more), round(holds[1] * more))
        sources.append(f"at {size} pixels: {best}: scaled by pixels from {IMAGE_SIZE} (assumed)")
    return Speed(_line(best, fixed.seconds), best, between, holds, (*sources,))


def _line(measured: Measured, fixed_seconds: float) -> StepTime:
    alone = measured.per_gpu * straggler_slowdown(measured.gpus, STRAGGLER_SIGMA)
    return StepTime.at(measured.images, alone, fixed_seconds)


def _stated(fixed: Fixed) -> str:
    return f"{1e3 * fixed.seconds:g} ms per step that do not shrink with the images: {fixed.source}"


def _from_measured(text: str, preset: Gpu | None) -> Speed:
    try:
        found = sorted((_parse(part) for part in text.split(",")), key=lambda one: one.images)
        *fewer, best = found
        if len(fewer) > 1 or any(one.gpus != best.gpus for one in fewer):
            raise ValueError("not one or two throughputs of the same GPUs")
        if fewer:
            late = straggler_slowdown(best.gpus, STRAGGLER_SIGMA)
            pairs = ((one.images, one.images / one.per_gpu / late) for one in found)
            step = StepTime.through(*pairs)
        else:
            step = _line(best, preset.fixed.seconds if preset else 0.0)
    except ValueError as error:
        raise RecipeError(
            f"--measured: {text!r}: {str(error).partition(';')[0]}; valid: [GPUSx]IMAGES:RATE, one "
            "or two with a comma: images per GPU, and images per second of these GPUs together or "
            "milliseconds of a step, such as 8x256:16621 or 64:31.5ms,256:98ms"
        ) from None
    low, high = found[0].images, best.images
    sources = [*(f"speed: {one}: given" for one in found)]
    if fewer:
        sources.append(f"{1e3 * step.fixed_seconds:.2g} ms per step that do not shrink: given")
    elif preset:
        low, high = min(low, preset.fixed.images[0]), max(high, preset.fixed.images[1])
        sources.append(_stated(preset.fixed))
    between = Between(0.95 * best.per_gpu, 1.05 * best.per_gpu, "assumed of a measured rate")
    return Speed(step, best, between, (low, high), (*sources,))


def _parse(text: str) -> Measured:
    found = re.fullmatch(r"(?:(\d+)x)?(\d+):(\d+\.?\d*)(ms)?", text.replace(" ", ""))
    if found is None:
        raise ValueError("no throughput")
    gpus, images, rate = int(found[1] or 1), int(found[2]), float(found[3])
    if not gpus * images * rate:
        raise ValueError("a 0")
    return Measured(gpus, images, 1e3 * images / rate if found[4] else rate / gpus)
