"""How the images of a step divide among GPUs, and what would divide where a recipe does not."""

from __future__ import annotations

import re

from ..errors import RecipeError
from ..schema.recipe import Recipe


def gpu_counts(text: str) -> list[int]:
    """Parse a list of numbers of GPUs, such as ``8,64,512``."""
    if not re.fullmatch(r"\d+(\s*,\s*\d+)*", text.strip()):
        raise RecipeError(f"--gpus: {text!r} is no list of numbers; valid: such as 64 or 8,64,512")
    found = sorted({int(number) for number in text.split(",")})
    if found[0] < 1:
        raise RecipeError("--gpus: 0 GPUs cannot train; valid: 1 or more")
    return found


def fit(recipe: Recipe, gpus: int) -> tuple[Recipe, tuple[str, ...]]:
    """A recipe with the largest micro-batches that divide on some GPUs; a line for each change."""
    changes: dict[str, int] = {}
    lines = []
    batch, micro, unit = recipe.batch_size, recipe.micro_batch_size, recipe.micro_batch_unit
    stages = []
    for index, stage in enumerate((None, *recipe.stages)):
        where = ""
        if stage is not None:
            where = f"stages.{index - 1}."
            batch, micro = stage.batch_size or batch, stage.micro_batch_size or micro
        if batch % gpus:
            raise RecipeError(_undivided(f"{where}batch_size", batch, gpus))
        share, fits = batch // gpus, micro
        if micro and share % micro:
            fits = max((n for n in _divisors(share) if n <= micro and n % unit == 0), default=None)
            if fits is None:
                raise RecipeError(
                    f"--gpus: {share} images of each of {gpus} GPUs do not divide into "
                    f"multiples of {unit} (batch_norm.images, mixing.group); valid: fewer GPUs"
                )
            lines.append(
                f"{gpus:,} GPUs need {where}micro_batch_size={fits}, {share // fits} accumulated: "
                f"{batch:,} / {gpus:,} = {share:,} images per GPU are no multiple of {micro}"
            )
        if stage is None and fits:
            changes["micro_batch_size"] = fits
        elif stage is not None:
            stages.append(stage.model_copy(update={"micro_batch_size": fits}))
    return recipe.model_copy(update={**changes, "stages": tuple(stages)}), tuple(lines)


def _undivided(key: str, batch: int, gpus: int) -> str:
    below = max((n for n in _divisors(batch) if n < gpus), default=1)
    above = min((n for n in _divisors(batch) if n > gpus), default=batch)
    valid = " or ".join(str(n) for n in sorted({below, above}))
    return f"--gpus: {gpus} does not divide {key} {batch}; valid: {valid} GPUs"


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
