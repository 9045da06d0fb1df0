"""A recipe in a form whose batch size and length can be changed, otherwise as it is.

The lengths of warm-up, decay and stages keep their part of the run, and the learning rate follows
the batch by a rule. Images per forward pass are the same at all batch sizes, so that batch norm
sees the same number of images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy.stats import entropy

from ....lars import Span
from ....pipeline import without_secrets
from ...errors import RecipeError
from ...output import writing
from ...schema.load import RECIPE, Loaded, dump, override
from ...schema.lr_scaling import RULES
from ...schema.recipe import Recipe
from ...schema.sections import Resume
from ...training.data import build_sources
from ...training.timeline import timeline_of
from ..trial import held_out, relative_lengths

#: Updates of the largest batch in a run, at least: with fewer, its loss does not follow the law.
FEWEST_UPDATES = 20


@dataclass(frozen=True)
class Base:
    """A recipe in a form whose batch size and length can be changed."""

    loaded: Loaded  # as the user gave it
    recipe: Recipe  # the same with lengths as fractions of the run, and with held-out images
    out: Path  # holds the recipe and the folders of its runs
    images: int  # for training, without those held out
    floor: float  # lowest training loss of any prediction: above 0 with label smoothing
    world_size: int
    rule: str  # how the learning rate follows the batch: ``linear`` or ``sqrt``

    @classmethod
    def of(cls, loaded: Loaded, out: Path, world_size: int, rule: str | None = None) -> Base:
        """Prepare a recipe for an estimate in the folder ``out``, where nothing is written yet."""
        if rule is not None and rule not in RULES:
            raise RecipeError(f"--rule: unknown: {rule!r}; valid: {', '.join(RULES)}")
        recipe = loaded.recipe
        training = recipe.model_copy(update={"evaluate_every": None})  # opens no other images
        number = held_out(training)
        source = build_sources(training)[0]
        images = len(source) - (0 if recipe.data.holdout else number)
        _check(recipe)
        of_any_pass = recipe.model_copy(update={"micro_batch_size": None})
        timeline = timeline_of(of_any_pass, images, world_size)
        own = recipe.model_copy(
            update={
                **relative_lengths(recipe, timeline),
                "data": recipe.data.model_copy(update={"holdout": number}),
                "log_every": Span(0.02, "dur"),
                "evaluate_every": Span(1.0, "dur"),
                "resume": Resume(),
                "run_dir": None,
            }
        )
        rule = rule or ("linear" if recipe.optimizer.name == "sgd" else "sqrt")
        floor = 0.0
        if recipe.loss.name == "cross-entropy":
            floor = label_entropy(recipe.label_smoothing, len(source.classes))
        return cls(loaded, own, out, images, floor, world_size, rule)

    def checked(self, batches: Sequence[int]) -> tuple[int, ...]:
        """Return the batch sizes in order."""
        for batch in batches:
            if not 1 <= batch <= self.images:
                raise RecipeError(
                    f"--batches: {batch} is not possible with {self.images} training images; "
                    f"valid: 1 to {self.images}"
                )
            if batch % self.world_size:
                raise RecipeError(
                    f"--batches: {batch} does not divide into equal shares on {self.world_size} "
                    f"ranks; valid: a multiple of {self.world_size}"
                )
        found = tuple(sorted({*batches}))
        if len(found) < 2:
            raise RecipeError(
                f"--batches: {found[0]} is the only one; valid: such as {found[0]},{2 * found[0]}"
            )
        self._one_pass(found)
        return found

    def default_batches(self) -> tuple[int, ...]:
        """The recipe's batch size, its half if that is a whole number, and twice as many."""
        own = self.recipe.batch_size
        return (own, 2 * own) if own % 2 else (own // 2, own, 2 * own)

    def of_runs(self, batches: Sequence[int], epochs: float) -> Base:
        """The base of the runs of these batches, with the target run's length in its recipe."""
        return self.changed(epochs=epochs, micro_batch_size=self._one_pass(batches))

    def changed(self, **keys: Any) -> Base:
        """The base with other values of keys of its recipe."""
        return replace(self, recipe=self.recipe.model_copy(update=keys))

    def write(self) -> None:
        """Write the recipe of the runs."""
        head = f"# {self.loaded.name}, with lengths as fractions of the run: that of the runs here."
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / RECIPE).write_text(f"{head}\n{dump(self.recipe)}")

    def overrides(self, batch_size: int, epochs: float, seed: int) -> list[str]:
        """Overrides of the written recipe that make it a run."""
        data = self.recipe.data.path or ""
        return [
            # The file of the recipe is without the query of a signed URL.
            *([override("data.path", data)] if data != without_secrets(data) else []),
            f"batch_size={batch_size}",
            f"scale={self.rule}",
            f"micro_batch_size={self.recipe.micro_batch_size}",
            f"epochs={epochs!r}",
            f"seed={seed}",
        ]

    def _one_pass(self, batches: Sequence[int]) -> int:
        """Images per rank and forward pass: the most up to the recipe's that divide all batches."""
        own = self.recipe.micro_batch_size or self.recipe.batch_size // self.world_size
        part = self.recipe.batch_norm.images or 1  # ghost batch norm averages over parts of a pass
        shares = math.gcd(*(batch // self.world_size for batch in batches))
        fitting = (n for n in range(min(own, shares), 0, -1) if shares % n == n % part == 0)
        found = next(fitting, 0)
        if found < min(2, own):
            raise RecipeError(
                f"--batches: {', '.join(map(str, batches))} have no images per forward pass in "
                "common, over which batch norm has statistics; valid: multiples of "
                f"{self.world_size * max(2, part)}"
            )
        return found


def _check(recipe: Recipe) -> None:
    """Raise RecipeError if the batch size or the length of a recipe cannot be changed."""
    if any(stage.batch_size for stage in recipe.stages):
        raise RecipeError(
            "stages: batch_size changes during the run; valid here: stages without it, such as "
            "stages=[]"
        )
    if recipe.stop_after:
        raise RecipeError(
            "stop_after: the run ends before its schedule does, so that its loss is not that of "
            "its length; valid here: null"
        )


def label_entropy(smoothing: float, classes: int) -> float:
    """Entropy of a label after smoothing: the lowest cross-entropy that a prediction can have."""
    rest = smoothing / classes
    return float(entropy([1 - smoothing + rest, *[rest] * (classes - 1)]))
