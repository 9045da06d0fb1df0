"""How the images of a step divide among GPUs, and what would divide where a recipe does not."""

from __future__ import annotations

import math
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
    """A recipe with the largest micro-batch that divides on some GPUs; a line if it changed."""
    micro, unit = recipe.micro_batch_size, recipe.micro_batch_unit
    stages = {f"stages.{i}.batch_size": stage.batch_size for i, stage in enumerate(recipe.stages)}
    batches = {key: n for key, n in {"batch_size": recipe.batch_size, **stages}.items() if n}
    for key, images in batches.items():
        if images % gpus:
            raise RecipeError(_undivided(key, images, gpus))
    batch = next((n for n in batches.values() if micro and n // gpus % micro), None)
    if not micro or not batch:
        return recipe, ()
    common, share = math.gcd(*batches.values()) // gpus, batch // gpus
    fits = max((n for n in _divisors(common) if n <= micro and n % unit == 0), default=None)
    if fits is None:
        raise RecipeError(
            f"--gpus: {share} images of each of {gpus} GPUs do not divide into multiples of {unit} "
            "(batch_norm.images, mixing.group); valid: fewer GPUs"
        )
    line = (
        f"{gpus:,} GPUs need micro_batch_size={fits}, {recipe.batch_size // gpus // fits} "
        f"accumulated: {batch:,} / {gpus:,} = {share:,} images per GPU are no multiple of {micro}"
    )
    return recipe.model_copy(update={"micro_batch_size": fits}), (line,)


def _undivided(key: str, batch: int, gpus: int) -> str:
    below = max((n for n in _divisors(batch) if n < gpus), default=1)
    above = min((n for n in _divisors(batch) if n > gpus), default=batch)
    valid = " or ".join(str(n) for n in sorted({below, above}))
    return f"--gpus: {gpus} does not divide {key} {batch}; valid: {valid} GPUs"


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
