"""The runs of an estimate: a recipe at several batch sizes and lengths, otherwise unchanged.

Each run is a whole training, as the length of a run and its learning rates go together: the lengths
of warm-up, decay and stages keep their part of the run, and the learning rate follows the batch by
a rule. Images per forward pass are the same in all runs, so that batch norm sees the same number of
images: those of the recipe, or the largest number below that divides all batches. A recipe whose
step is one backward pass is given two where batch norm allows, as the gradient noise is measured
from the difference of passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....lars import Span
from ....pipeline import without_secrets
from ...errors import RecipeError
from ...schema.load import RECIPE, Loaded, dump, override
from ...schema.recipe import Recipe
from ...schema.sections import Ema, Resume, Schedule
from ...training.data import build_sources
from ..trial import held_out

#: Lengths of further runs of the smallest batch, in that of the target run: the slope of its loss.
AROUND = (1 / 1.5, 1.5)

#: Updates of the shortest run, at least: with fewer, its loss does not follow the law.
FEWEST_UPDATES = 20

#: Interval between the steps that measure the gradient noise, in that of a run: the window of
#: GradientNoise, 100 steps, is then a quarter of it, or all steps of a short run are measured.
_NOISE_EVERY = "0.0025dur"


@dataclass(frozen=True)
class Run:
    """A run to make.

    Attributes:
        batch_size: Global batch size in images.
        epochs: Number of epochs that it trains.
        seed: Seed of its weights and of the order of its images.
        after: Epochs of the recipe's own run after which it branches off; 0 for a whole run.
    """

    batch_size: int
    epochs: float
    seed: int
    after: float = 0.0

    def __str__(self) -> str:
        branch = f"{self.after:.3g} epochs into a run, " if self.after else ""
        return f"{branch}batch {self.batch_size:,}, {self.epochs:.3g} epochs, seed {self.seed}"


@dataclass(frozen=True)
class Base:
    """A recipe in a form whose batch size and length can be changed.

    Attributes:
        loaded: The recipe as the user gave it.
        recipe: The same with lengths as fractions of the run, and with held-out images.
        path: File that holds ``recipe``.
        images: Number of training images, without those held out.
        floor: Lowest training loss that any prediction can have: above 0 with label smoothing.
        world_size: Number of ranks.
        rule: How the learning rate follows the batch: ``linear`` or ``sqrt``.
        one_pass: Images per rank and forward pass where they divide a batch; None: the recipe's.
    """

    loaded: Loaded
    recipe: Recipe
    path: Path
    images: int
    floor: float
    world_size: int
    rule: str
    one_pass: int | None = None

    @classmethod
    def of(cls, loaded: Loaded, out: Path, world_size: int, rule: str | None = None) -> Base:
        """Prepare a recipe for an estimate in the folder ``out``, where nothing is written yet.

        Raises:
            RecipeError, DataError: The recipe or its data do not allow an estimate.
        """
        recipe = loaded.recipe
        training = recipe.model_copy(update={"evaluate_every": None})  # opens no other images
        number = held_out(training)
        source = build_sources(training)[0]
        images = len(source) - (0 if recipe.data.holdout else number)
        if recipe.batch_size % world_size:
            raise RecipeError(
                f"batch_size: {recipe.batch_size} does not divide into equal shares on "
                f"{world_size} ranks; valid: a multiple of {world_size}"
            )
        if any(stage.batch_size for stage in recipe.stages):
            raise RecipeError(
                "stages: the batch size changes during the run; valid here: stages without "
                "batch_size, such as stages=[]"
            )
        if any(stage.micro_batch_size for stage in recipe.stages):
            raise RecipeError(
                "stages: micro_batch_size changes during the run, where images per forward pass "
                "should stay; valid here: stages without it"
            )
        if recipe.stop_after:
            raise RecipeError(
                "stop_after: the run ends before its schedule does, so that its loss is not that "
                "of its length; valid here: null"
            )
        own = recipe.model_copy(
            update={
                **_relative_lengths(recipe, images),
                "data": recipe.data.model_copy(update={"holdout": number}),
                "ema": Ema(),
                "evaluate_every": Span(1.0, "dur"),
                "log_every": Span(0.02, "dur"),
                "micro_batch_size": _two_passes(recipe, world_size),
                "resume": Resume(),
                "run_dir": None,
            }
        )
        rule = rule or ("linear" if recipe.optimizer.name == "sgd" else "sqrt")
        floor = label_entropy(recipe.label_smoothing, len(source.classes))
        return cls(loaded, own, out / RECIPE, images, floor, world_size, rule)

    def write(self) -> None:
        """Write the recipe of the runs.

        Raises:
            RecipeError: The file cannot be written.
        """
        name = self.loaded.name
        head = f"# {name}, with lengths as fractions of the run: the recipe of the runs here.\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(head + dump(self.recipe))
        except OSError as error:
            raise RecipeError(
                f"--out: cannot write into {self.path.parent}: {error.strerror}; valid: a folder"
            ) from None

    def overrides(self, run: Run) -> list[str]:
        """Overrides of :attr:`recipe` that make it a whole run."""
        data = self.recipe.data.path or ""
        return [
            # The file of the recipe is without the query of a signed URL.
            *([override("data.path", data)] if data != without_secrets(data) else []),
            f"batch_size={run.batch_size}",
            f"scale={self.rule}",
            f"micro_batch_size={self.micro_batch_size(run.batch_size)}",
            f"epochs={run.epochs!r}",
            f"seed={run.seed}",
            f"gradient_noise_every={_NOISE_EVERY if self.has_noise(run.batch_size) else 'null'}",
        ]

    def micro_batch_size(self, batch_size: int) -> int:
        """Images per rank and forward pass at a batch size."""
        share = batch_size // self.world_size
        if self.recipe.batch_norm.over == "rank":
            return share
        most = min(self._own_pass, share)
        fits = (n for n in range(most, 0, -1) if share % n == 0 and n % self._slice == 0)
        return next(fits, most)

    @property
    def _slice(self) -> int:
        """Number of images that divides those of a forward pass: that of ghost batch norm."""
        return self.recipe.batch_norm.images or 1

    @property
    def _own_pass(self) -> int:
        """Images per rank and forward pass where they divide the batch."""
        own = self.recipe.micro_batch_size or self.recipe.batch_size // self.world_size
        return self.one_pass or own

    def with_one_pass(self, batches: Sequence[int], before: int | None = None) -> Base:
        """Return this with images per rank and forward pass that divide these batches.

        Where the common divisors are small, those of the smallest batch stay, or the next number
        with which all have statistics: passes that differ bias an estimate less than many small
        ones cost.

        Args:
            batches: Global batch sizes.
            before: Images per forward pass of the runs that were made; None: there are none.

        Raises:
            RecipeError: Those do not divide a batch.
        """
        most, least = self.micro_batch_size(min(batches)), min(2, self._own_pass)
        shares = math.gcd(*(batch // self.world_size for batch in batches))
        sizes = [n for n in range(most, least - 1, -1) if n % self._slice == 0]
        chosen = next((n for n in sizes if shares % n == 0 and 2 * n >= most), None)
        if chosen is None:
            chosen = next((n for n in sizes if self._suits(n, batches)), self.one_pass)
        if before not in (None, chosen) and self.recipe.batch_norm.over != "rank":
            wrong = next((b for b in batches if b // self.world_size % before), None)
            if wrong is not None:
                raise RecipeError(
                    f"--batches: {wrong} does not divide into forward passes of {before} images "
                    f"like those of the runs in {self.path.parent}; valid: multiples of "
                    f"{before * self.world_size}, or another --out"
                )
            chosen = before
        return replace(self, one_pass=chosen)

    def _suits(self, one_pass: int, batches: Sequence[int]) -> bool:
        """Whether batch norm has statistics at all batches with these images per pass, or fewer."""
        changed = replace(self, one_pass=one_pass)
        return all(changed._has_statistics(batch) for batch in batches)

    def has_noise(self, batch_size: int) -> bool:
        """Whether runs of a batch size measure the gradient noise: a step has several passes."""
        return batch_size >= 2 * self.micro_batch_size(batch_size)

    def _has_statistics(self, batch_size: int) -> bool:
        """Whether each rank has two images, and each forward pass too if the recipe's have."""
        share, one_pass = batch_size // self.world_size, self.micro_batch_size(batch_size)
        return (
            share >= 2
            and one_pass >= min(2, self._own_pass)
            and share % one_pass == one_pass % self._slice == 0
        )

    def check_batches(self, batches: Sequence[int]) -> tuple[int, ...]:
        """Return the batch sizes in order.

        Raises:
            RecipeError: One is not positive, larger than the data set, does not divide among the
                ranks, or leaves one image per forward pass; or there is only one.
        """
        for batch in batches:
            if batch < 1:
                raise RecipeError(f"--batches: {batch} is no batch size; valid: above 0")
            if batch > self.images:
                raise RecipeError(
                    f"--batches: {batch} is larger than the data set, {self.images} training "
                    f"images; valid: at most {self.images}"
                )
            if batch % self.world_size:
                raise RecipeError(
                    f"--batches: {batch} does not divide into equal shares on {self.world_size} "
                    f"ranks; valid: a multiple of {self.world_size}"
                )
            if not self._has_statistics(batch):
                more = range(batch, self.images + 1, self.world_size)
                valid = next((n for n in more if self._has_statistics(n)), self.images)
                why = "leaves 1 image per forward pass, over which batch norm has no statistics"
                if self._slice > 1:
                    why = (
                        f"gives a rank {batch // self.world_size} images, which do not divide into "
                        f"slices of batch_norm.images, {self._slice}"
                    )
                raise RecipeError(f"--batches: {batch} {why}; valid: such as {valid}")
        found = tuple(sorted({*batches}))
        if len(found) < 2:
            raise RecipeError(
                f"--batches: {found[0]} is the only one; valid: one more, such as "
                f"{found[0]},{2 * found[0]}"
            )
        return found

    def default_batches(self, epochs: float) -> tuple[int, ...]:
        """Three batch sizes, a factor of two apart, up to twice the recipe's if there is room.

        Those that ranks cannot share, or that leave one image per forward pass, are left out.

        Raises:
            RecipeError: There is no room for another batch size than the recipe's.
        """
        own = self.recipe.batch_size
        twice = (own // 2, own, 2 * own)
        fits = 2 * own <= self.images and self.updates(twice, epochs) >= FEWEST_UPDATES
        sizes = twice if fits else (own // 4, own // 2, own)
        shared = [b for b in sizes if b % self.world_size == 0 and self._has_statistics(b)]
        return self.check_batches(shared or [own])

    def updates(self, batches: Sequence[int], epochs: float) -> float:
        """Updates of the largest batch in a run of this length."""
        return epochs * self.images / max(batches)


def first_runs(base: Base, batches: Sequence[int], epochs: float) -> list[Run]:
    """All batches at the length of the target run, and the smallest one at two lengths around it.

    Shortest first, so that the speed is known early.
    """
    seed, smallest = base.recipe.seed, min(batches)
    around = [Run(smallest, length_of(epochs * part), seed) for part in AROUND]
    return sorted(
        [*around, *(Run(batch, length_of(epochs), seed) for batch in batches)],
        key=lambda run: (run.epochs, run.batch_size),
    )


def further_runs(
    base: Base, batches: Sequence[int], epochs: float, price: Callable[[int], float], repeat: int
) -> list[Run]:
    """The larger batches at the lengths at which they should reach the target, and the smallest.

    The critical batch grows while the loss falls, so that runs say most about a target if they end
    near it.

    Args:
        base: The recipe.
        batches: Batch sizes.
        epochs: Length of the target run in epochs.
        price: Epochs of a batch in those of the smallest, as far as they are known.
        repeat: Number of the repeat, from 0, which is added to the recipe's seed.
    """
    seed, smallest = base.recipe.seed + repeat, min(batches)
    lengths = [(batch, price(batch)) for batch in batches if batch > smallest]
    lengths += [(smallest, part) for part in AROUND]
    runs = [Run(batch, length_of(epochs * part), seed) for batch, part in lengths]
    return sorted(runs, key=lambda run: (run.epochs, run.batch_size))


def length_of(epochs: float) -> float:
    """The length of a run, of four digits."""
    return float(f"{epochs:.4g}")


def _two_passes(recipe: Recipe, world_size: int) -> int | None:
    """The recipe's images per forward pass, or fewer if a step would be one backward pass."""
    own = recipe.batch_size
    if world_size > 1 or recipe.micro_batch_size not in (None, own):
        return recipe.micro_batch_size
    if recipe.batch_norm.over != "micro-batch":
        return recipe.micro_batch_size
    parts = (n for n in range(own // 2, 1, -1) if own % n == 0)
    return next(parts, recipe.micro_batch_size)


def rounded_down(length: float) -> float:
    """A length with two digits, rounded down."""
    if not 0 < length < math.inf:
        return length
    unit = 10.0 ** (math.floor(math.log10(length)) - 1)
    return round(math.floor(length / unit + 1e-9) * unit, 9)


def label_entropy(smoothing: float, classes: int) -> float:
    """Entropy of a label after smoothing: the lowest cross-entropy that a prediction can have."""
    rest = smoothing / classes
    shares = [1 - smoothing + rest, *[rest] * (classes - 1)]
    return -sum(share * math.log(share) for share in shares if share)


def _relative_lengths(recipe: Recipe, images: int) -> dict[str, Any]:
    """The keys of a recipe that hold lengths, as fractions of its run.

    Raises:
        RecipeError: A length is longer than the run.
    """

    def part(key: str, span: Span) -> Span:
        per_run = {
            "dur": 1.0,
            "ep": recipe.epochs,
            "": recipe.epochs * images / recipe.batch_size,
        }[span.unit]
        found = span.value / per_run
        if found > 1 + 1e-9:
            raise RecipeError(
                f"{key}: {span} is longer than the run, {recipe.epochs:g} epochs, so that it has "
                "no place in a shorter one; valid: a length within the run"
            )
        return Span(min(found, 1.0), "dur")

    schedule: Schedule = recipe.schedule
    milestones = tuple(part("schedule.milestones", span) for span in schedule.milestones)
    decay = schedule.decay and part("schedule.decay", schedule.decay)
    of_schedule = {
        "warmup": part("schedule.warmup", schedule.warmup),
        "decay": decay,
        "milestones": milestones,
    }
    stages = tuple(
        stage.model_copy(update={"from_": part(f"stages.{index}.from", stage.from_)})
        for index, stage in enumerate(recipe.stages)
    )
    return {
        "schedule": schedule.model_copy(update=of_schedule),
        "stages": stages,
    }
