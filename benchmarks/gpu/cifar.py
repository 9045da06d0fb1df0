"""CIFAR-10 on the GPU: steps that each optimizer needs to 94 %, by batch size.

The network is airbench's in full width at 32 pixels (recipe ``airbench-b256`` with its
source's widths), in BF16; images lie on the GPU as uint8 and are augmented there. Every cell, an
optimizer and a batch size, gets the same tuning: rates around one guess for the optimizer, scaled
by the root of the batch, at one length, scored on training images that are held out. Then each
seed is trained on all images at three lengths, and evaluated on the test set; the steps to 94 % are
read between these lengths. Accuracy is with test-time augmentation, as in the source: the mean of
six views, each image and its mirror at three places.

Batch sizes of the goal come first, then the others with as many seeds, then further seeds of all,
so that a run that is stopped has fewer cells or seeds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.airbench_optimizers import OPTIMIZERS, RECIPE
from benchmarks.gpu.cifar_images import Order, Split, augmented, normalised, padded, read
from benchmarks.gpu.place import TRAINER, Place, need
from benchmarks.gpu.report import Report

TITLE = "CIFAR-10: steps to 94 % against batch size"

#: The table of runs on the test set.
RUNS = "one row for each run on the test set"

TARGET = 94.0
#: The goal: at most this many steps at these batch sizes, with the best optimizer.
GOAL_STEPS, GOAL_BATCHES = 200, (2048, 4096, 8192)

_OTHER_BATCHES = (256, 1024, 16384, 512)
_HELD_OUT = 5000
_SHIFT = 2  # pixels, of training images
#: Seeds of each group of batch sizes before the next one, and seeds in all.
_FIRST_SEEDS, _SEEDS = 3, 20
#: Epochs at which rates are tuned. Larger batches than this have more, for their steps are few.
_EPOCHS, _EPOCHS_FROM = 10.0, 4096
#: Rates that are tried, over the guess; further ones where the best is at the edge.
_FACTORS, _FURTHER = (1.0, 0.5, 2.0), 2
#: Lengths over that of the tuning, where that reaches the target and where it does not.
_SHORTER, _LONGER = (0.6, 0.8, 1.0), (0.8, 1.2, 1.8)

_FULL = ("model.args={widths: [64, 256, 256]}", "data.image_size=32", "data.eval_resize=32")
_SMALL = ("model.args={widths: [8, 8, 8]}", "data.image_size=32", "data.eval_resize=32")


@dataclass(frozen=True)
class Cell:
    """An optimizer, a key of :data:`OPTIMIZERS`, at a batch size in images."""

    optimizer: str
    batch: int

    def overrides(self, lr: float, epochs: float, seed: int) -> list[str]:
        """Return the overrides of the recipe."""
        return [
            *OPTIMIZERS[self.optimizer].overrides,
            f"batch_size={self.batch}",
            f"micro_batch_size={self.batch}",
            f"optimizer.lr={lr!r}",
            f"epochs={epochs!r}",
            f"seed={seed}",
        ]

    @property
    def guess(self) -> float:
        """The learning rate that is tried first."""
        return OPTIMIZERS[self.optimizer].guess(self.batch)

    @property
    def epochs(self) -> float:
        """Epochs of the runs that tune the rate."""
        return _EPOCHS * math.sqrt(max(1.0, self.batch / _EPOCHS_FROM))


def train(
    overrides: Sequence[str], train_split: Split, test_split: Split, place: Place
) -> dict[str, float]:
    """Train once, and return the values of the run.

    Returns:
        ``top1`` and, without test-time augmentation, ``plain_top1``, in percent; ``train_loss`` of
        the last step; ``seconds``, with the first steps, in which kernels are chosen; ``steps``.
    """
    from largebatch.lars import as_scheduler
    from largebatch.recipes.models.build import build_model
    from largebatch.recipes.models.optimizers import build_optimizer
    from largebatch.recipes.schema.load import load
    from largebatch.recipes.training.lr import learning_rates
    from largebatch.recipes.training.timeline import timeline_of

    images, labels = train_split
    recipe = load(RECIPE, [*(_SMALL if place.dry else _FULL), *overrides]).recipe
    size, device = recipe.data.image_size, place.device
    timeline = timeline_of(recipe, len(images))
    torch.manual_seed(recipe.seed)
    model: Any = build_model(recipe.model, 10).to(device)
    # Images are in order of class.
    mixed = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    some = mixed[: recipe.init.images].to(device)
    model.init_from_images(normalised(images[some]))
    model = model.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(recipe, model, device.type)
    scheduler = as_scheduler(optimizer, learning_rates(recipe, timeline).schedule)
    order, source = Order(len(images), recipe.seed, device), padded(images, _SHIFT)
    began = time.monotonic()
    loss = torch.zeros((), device=device)
    for _ in range(timeline.total_steps):
        chosen, mirrored = order.take(recipe.batch_size)
        x = normalised(augmented(source[chosen], mirrored, size, order.generator))
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(x)
        loss = F.cross_entropy(
            logits.float(), labels[chosen], label_smoothing=recipe.label_smoothing
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
    top1, plain = evaluate(model, test_split)
    return {
        "top1": top1,
        "plain_top1": plain,
        "train_loss": loss.item(),
        "seconds": time.monotonic() - began,
        "steps": float(timeline.total_steps),
    }


def evaluate(model: nn.Module, split: Split) -> tuple[float, float]:
    """Return the accuracy of a model in percent, with and without test-time augmentation."""
    model.eval()
    right = torch.zeros(2, device=split[0].device)
    with torch.no_grad(), torch.autocast(split[0].device.type, torch.bfloat16):
        for images, labels in zip(*(part.split(2000) for part in split), strict=True):
            plain = model(normalised(images)).float()
            right[0] += (_views(model, images).argmax(1) == labels).sum()
            right[1] += (plain.argmax(1) == labels).sum()
    top1, plain_top1 = (100 * right / len(split[1])).tolist()
    return top1, plain_top1


def _views(model: nn.Module, images: Tensor) -> Tensor:
    """Logits of each image and its mirror: half of them in place, half at two places beside it."""
    size, around = images.shape[-1], padded(images, 1)
    total = torch.zeros(len(images), 10, device=images.device)
    for corner, weight in ((1, 0.5), (0, 0.25), (2, 0.25)):
        view = normalised(around[:, :, corner : corner + size, corner : corner + size])
        total += weight * (model(view) + model(view.flip(3))).float()
    return total


class Comparison:
    """The runs of the comparison, each reported as a row.

    Args:
        report: the part's section.
        place: the device, and whether this is a dry run.
        train_split: all training images.
        test_split: the test images.
    """

    def __init__(self, report: Report, place: Place, train_split: Split, test_split: Split) -> None:
        self._report, self._place = report, place
        self._train, self._test = train_split, test_split
        count = len(train_split[1]) // 10 if place.dry else _HELD_OUT
        mixed = torch.randperm(len(train_split[1]), generator=torch.Generator().manual_seed(0))
        held, kept = (mixed[part].to(place.device) for part in (slice(count), slice(count, None)))
        self._kept = (train_split[0][kept], train_split[1][kept])
        self._held = (train_split[0][held], train_split[1][held])
        self._took = 0.0  # seconds of the longest run so far
        self._is_over = False  # the time

    def tune(self, cell: Cell) -> tuple[float, float] | None:
        """Return the best rate of a cell and its accuracy on held-out images."""
        found: dict[float, float] = {}
        factors, further = list(_FACTORS), 0
        while factors:
            lr = float(f"{cell.guess * factors.pop(0):.3g}")
            row = self._run(
                "tuning, on held-out images", cell, lr, self._epochs(cell), 0, final=False
            )
            if row is None:
                break
            found[lr] = row["top1"]
            best = max(found, key=lambda rate: found[rate])
            if not factors and len(found) > 2 and further < _FURTHER:
                rates = sorted(found)
                if best in (rates[0], rates[-1]):
                    factors.append(best / cell.guess * (2 if best == rates[-1] else 0.5))
                    further += 1
        return (best, found[best]) if found else None

    def finals(self, tuned: Mapping[Cell, tuple[float, float]], seeds: Iterable[int]) -> None:
        """Train cells on all images at three lengths, and evaluate on the test set.

        Args:
            tuned: the rate of each cell and its accuracy in tuning, as :meth:`tune` returns them.
            seeds: the seeds, each of all cells in turn.
        """
        for seed, (cell, (lr, top1)) in product(seeds, tuned.items()):
            for part in _SHORTER if top1 >= TARGET else _LONGER:
                if self._is_over:
                    return
                self._run(RUNS, cell, lr, part * self._epochs(cell), seed, final=True)

    def _epochs(self, cell: Cell) -> float:
        return 2.0 if self._place.dry else cell.epochs

    def _run(
        self, table: str, cell: Cell, lr: float, epochs: float, seed: int, *, final: bool
    ) -> dict[str, float] | None:
        what = (
            f"{cell.optimizer}, batch {cell.batch}, rate {lr:g}, {epochs:.3g} epochs, seed {seed}"
        )
        if self._is_over or not self._report.has_time(what, 1.1 * self._took):
            self._is_over = True
            return None
        overrides = cell.overrides(lr, epochs, seed)
        if self._place.dry:
            overrides += ["batch_size=16", "micro_batch_size=16", "init.images=32"]
        splits = (self._train, self._test) if final else (self._kept, self._held)
        found = None
        with self._report.attempt(what):
            found = train(overrides, *splits, self._place)
            self._took = max(self._took, found["seconds"])
            self._report.row(
                table,
                optimizer=cell.optimizer,
                batch=cell.batch,
                lr=lr,
                epochs=round(epochs, 2),
                seed=seed,
                **found,
            )
        return found


def run(report: Report, place: Place) -> None:
    """Tune each cell, then train seed by seed, as long as there is time."""
    need(*TRAINER)
    train_split, test_split = read(place)
    if place.on_gpu:
        torch.backends.cudnn.benchmark = True
    comparison = Comparison(report, place, train_split, test_split)
    groups = [GOAL_BATCHES[:1]] if place.dry else [GOAL_BATCHES, _OTHER_BATCHES]
    everything: dict[Cell, tuple[float, float]] = {}
    for batches in groups:
        tuned = {}
        for cell in (Cell(optimizer, batch) for batch in batches for optimizer in OPTIMIZERS):
            best = comparison.tune(cell)
            if best is not None:
                tuned[cell] = best
        comparison.finals(tuned, range(1 if place.dry else _FIRST_SEEDS))
        everything |= tuned
    if not place.dry:
        comparison.finals(everything, range(_FIRST_SEEDS, _SEEDS))
    summarise(report, place)


def summarise(report: Report, place: Place) -> None:
    """Report the steps to the target of each cell, and compare the best ones with the goal."""
    cells: dict[tuple[str, int], dict[int, list[tuple[float, float]]]] = {}
    for row in report.content["tables"].get(RUNS, []):
        seeds = cells.setdefault((row["optimizer"], row["batch"]), {})
        seeds.setdefault(row["seed"], []).append((row["steps"], row["top1"]))
    least: dict[int, float] = {}
    for (optimizer, batch), seeds in cells.items():
        # A seed without its longest run, for lack of time, tells only if it reaches the target.
        longest = max(steps for points in seeds.values() for steps, _ in points)
        crossed = [(steps_to(TARGET, points), points) for points in seeds.values()]
        found = [s for s, points in crossed if s is not None or max(points)[0] == longest]
        if not found:
            continue
        at_first = sum(s is not None and s == min(points)[0] for s, points in crossed)
        reached = [steps for steps in found if steps is not None]
        # The median of all seeds, those that do not reach the target being the largest.
        middle = sorted(math.inf if s is None else s for s in found)[len(found) // 2]
        report.row(
            f"steps to {TARGET:g} % on the test set",
            optimizer=optimizer,
            batch=batch,
            median="not reached" if math.isinf(middle) else round(middle),
            least=round(min(reached)) if reached else "",
            most=round(max(reached)) if reached else "",
            reached=f"{len(reached)} of {len(found)} seeds"
            + (f", {at_first} in the shortest run or less" if at_first else ""),
            best_top1=max(
                statistics.mean(points[i][1] for points in seeds.values() if len(points) > i)
                for i in range(max(map(len, seeds.values())))
            ),
        )
        least[batch] = min(least.get(batch, math.inf), middle)
    for batch in GOAL_BATCHES:
        if batch in least and place.on_gpu:
            steps = min(least[batch], 1e9)
            report.goal(f"CIFAR-10: steps to 94 % at {batch:,}", steps, most=GOAL_STEPS)


def steps_to(target: float, points: Sequence[tuple[float, float]]) -> float | None:
    """Steps at which accuracy meets a target, on lines over the logarithm of steps.

    Args:
        target: accuracy in percent.
        points: pairs of steps and accuracy in percent, at least two.

    Returns:
        The steps; those of the shortest run where it is above the target; None where none is.
    """
    ordered = sorted(points)
    if ordered[0][1] >= target:
        return ordered[0][0]
    for (a, below), (b, above) in pairwise(ordered):
        if below < target <= above:
            return a * (b / a) ** ((target - below) / (above - below))
    return None
