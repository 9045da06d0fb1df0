"""CIFAR-10 on the GPU: steps that each optimizer needs to 94 %, by batch size.

The network is airbench's in full width at 32 pixels (recipe ``airbench-b256`` with its source's
widths), in BF16; images lie on the GPU. Batch norm is over the batch, or over ghosts of 256 images
of it, as in the grid on the CPU. Each setting, an optimizer with its options and a form of batch
norm, gets the same tuning: three rates at one batch size and length, scored on training images that
are held out; at other batch sizes the rate is scaled by the root. Then it is trained on all images
at three lengths, and evaluated on the test set; the steps to 94 % are read between these lengths.
Accuracy is the mean over six views, as in the source: each image and its mirror at three places.

What decides most comes first, and then further seeds, so that a run that is stopped has fewer.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.airbench_optimizers import OPTIMIZERS, RECIPE
from benchmarks.gpu.cifar_images import SHIFT, Split, batches, cropped, read
from benchmarks.gpu.place import TRAINER, Place, need
from benchmarks.gpu.report import Report

TITLE = "CIFAR-10: steps to 94 % against batch size"

#: The tables of runs.
TUNING, RUNS = "tuning, on held-out images", "one row for each run on the test set"

TARGET = 94.0
#: The goal: at most this many steps at these batch sizes, with the best setting.
GOAL_STEPS, BATCHES = 200, (4096, 2048, 8192)

_HELD_OUT, _SEEDS = 5000, 20
#: Batch size and epochs of the tuning; larger batches have more epochs, for their steps are few.
_TUNED_AT, _EPOCHS = 4096, 10.0
#: Rates that are tried, over the guess.
_FACTORS = (1.0, 0.5, 2.0)
#: Lengths over that of the tuning, where that reaches the target and where it does not.
_SHORTER, _LONGER = (0.6, 0.8, 1.0), (0.8, 1.2, 1.8)
_GHOSTS = 256


@dataclass(frozen=True)
class Setting:
    """An optimizer, a key of ``OPTIMIZERS``, with changes of its overrides, and a batch norm."""

    name: str
    optimizer: str
    changes: tuple[tuple[str, str], ...] = ()
    ghosts: bool = False

    @property
    def norm(self) -> str:
        """Names what batch norm is over."""
        return f"ghosts of {_GHOSTS}" if self.ghosts else "the batch"

    def overrides(self, batch: int, lr: float, epochs: float, seed: int) -> list[str]:
        """Return the overrides of the recipe."""
        found = [*OPTIMIZERS[self.optimizer].overrides]
        for old, new in self.changes:
            found = [override.replace(old, new) for override in found]
        found += [f"batch_size={batch}", f"micro_batch_size={batch}", f"seed={seed}"]
        found += [f"optimizer.lr={lr!r}", f"epochs={epochs!r}"]
        return found + [f"batch_norm.images={_GHOSTS}"] * self.ghosts


_MOMENTUM, _STEPS = ("momentum=0.6", "momentum=0.9"), ("ns_steps: 3", "ns_steps: 5")
#: In the order of what they decide.
SETTINGS = tuple(
    replace(setting, ghosts=ghosts)
    for setting in (
        Setting("Muon, momentum 0.6, 3 steps", "Muon"),
        Setting("SGD", "Nesterov-1x"),
        Setting("LARS", "LARS"),
        Setting("Muon, momentum 0.9, 3 steps", "Muon", (_MOMENTUM,)),
        Setting("Muon, momentum 0.6, 5 steps", "Muon", (_STEPS,)),
        Setting("Muon, momentum 0.9, 5 steps", "Muon", (_MOMENTUM, _STEPS)),
    )
    for ghosts in (False, True)
)


def train(
    overrides: Sequence[str], train_split: Split, test_split: Split, place: Place
) -> dict[str, float]:
    """Train once, and return the accuracy ``top1`` in percent, ``steps``, and ``seconds``."""
    from largebatch.lars import as_scheduler
    from largebatch.recipes.models.batch_norm import share_statistics
    from largebatch.recipes.models.build import build_model
    from largebatch.recipes.models.optimizers import build_optimizer
    from largebatch.recipes.ranks import Job
    from largebatch.recipes.schema.load import load
    from largebatch.recipes.training.timeline import learning_rates, timeline_of

    (images, labels), device = train_split, place.device
    widths = [8, 8, 8] if place.dry else [64, 256, 256]
    full = (f"model.args={{widths: {widths}}}", "data.image_size=32", "data.eval_resize=32")
    recipe = load(RECIPE, [*full, *overrides]).recipe
    timeline = timeline_of(recipe, len(images))
    torch.manual_seed(recipe.seed)
    model: Any = build_model(recipe.model, 10).to(device)
    # Images are in order of class.
    mixed = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(device)
    model.init_from_images(cropped(images[mixed[: recipe.init.images]]))
    model = model.to(memory_format=torch.channels_last)
    share_statistics(model, recipe, Job(0, 1, 1, device))
    optimizer = build_optimizer(recipe, model)
    scheduler = as_scheduler(optimizer, learning_rates(recipe, timeline).schedule)
    source = batches(images, recipe.batch_size, recipe.seed)
    began = time.monotonic()
    for _ in range(timeline.total_steps):
        x, chosen = next(source)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(x)
        smoothing = recipe.label_smoothing
        F.cross_entropy(logits.float(), labels[chosen], label_smoothing=smoothing).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
    top1 = evaluate(model, test_split)
    seconds = time.monotonic() - began
    return {"top1": top1, "steps": float(timeline.total_steps), "seconds": seconds}


def evaluate(model: nn.Module, split: Split) -> float:
    """Return the accuracy of a model in percent, over six views of each image."""
    model.eval()
    right = torch.zeros((), device=split[0].device)
    with torch.no_grad(), torch.autocast(split[0].device.type, torch.bfloat16):
        for images, labels in zip(*(part.split(2000) for part in split), strict=True):
            total: Tensor = torch.zeros(len(images), 10, device=images.device)
            for shift, weight in ((0, 0.5), (-1, 0.25), (1, 0.25)):
                view = cropped(images, SHIFT + shift, SHIFT + shift)
                total += weight * (model(view) + model(view.flip(3))).float()
            right += (total.argmax(1) == labels).sum()
    return 100 * right.item() / len(split[1])


class Comparison:
    """The runs of the comparison, each reported as a row."""

    def __init__(self, report: Report, place: Place, train_split: Split, test_split: Split) -> None:
        self._report, self._place = report, place
        count = len(train_split[1]) // 10 if place.dry else _HELD_OUT
        mixed = torch.randperm(len(train_split[1]), generator=torch.Generator().manual_seed(0))
        held, kept = (mixed[part].to(place.device) for part in (slice(count), slice(count, None)))
        self._splits: dict[str, tuple[Split, Split]] = {
            RUNS: (train_split, test_split),
            TUNING: tuple((train_split[0][some], train_split[1][some]) for some in (kept, held)),  # type: ignore[dict-item]
        }
        self._tuned: dict[Setting, tuple[float, float]] = {}  # factor, accuracy on held-out images
        self._took = 0.0  # seconds of the longest run so far
        self._is_over = False  # the time

    def tune(self, setting: Setting) -> None:
        """Choose the factor of the guessed rate by the accuracy on held-out images."""
        top1s = {f: self._run(TUNING, setting, _TUNED_AT, f, 1.0, 0) for f in _FACTORS}
        found = {factor: top1 for factor, top1 in top1s.items() if top1 is not None}
        if found:
            best = max(found, key=lambda factor: found[factor])
            self._tuned[setting] = best, found[best]

    def final(self, setting: Setting, batch: int, seed: int) -> None:
        """Train a tuned setting on all images at three lengths, and evaluate on the test set."""
        if setting in self._tuned:
            factor, top1 = self._tuned[setting]
            for length in _SHORTER if top1 >= TARGET else _LONGER:
                self._run(RUNS, setting, batch, factor, length, seed)

    def _run(
        self, table: str, setting: Setting, batch: int, factor: float, length: float, seed: int
    ) -> float | None:
        """Train once if there is time, and return the accuracy in percent."""
        lr = float(f"{factor * OPTIMIZERS[setting.optimizer].guess(batch):.3g}")
        epochs = length * _EPOCHS * math.sqrt(max(1.0, batch / _TUNED_AT))
        what = f"{setting.name}, norm over {setting.norm}, batch {batch}, rate {lr:g}"
        if self._is_over or not self._report.has_time(what, 1.1 * self._took):
            self._is_over = True
            return None
        overrides = setting.overrides(batch, lr, 2.0 if self._place.dry else epochs, seed)
        if self._place.dry:
            overrides += ["batch_size=16", "micro_batch_size=16", "init.images=32"]
            overrides += ["batch_norm.images=8"] if setting.ghosts else []
        with self._report.attempt(what):
            found = train(overrides, *self._splits[table], self._place)
            self._took = max(self._took, found["seconds"])
            cell = {"optimizer": setting.name, "norm_over": setting.norm, "batch": batch, "lr": lr}
            self._report.row(table, **cell, epochs=round(epochs, 2), seed=seed, **found)
            return found["top1"]
        return None


def run(report: Report, place: Place) -> None:
    """Tune the settings, then train at each batch size, seed by seed, as long as there is time."""
    need(*TRAINER)
    splits = read(place)
    if place.on_gpu:
        torch.backends.cudnn.benchmark = True
    comparison = Comparison(report, place, *splits)
    # The first two need no others to decide, and have their runs before the others are tuned.
    for settings in (SETTINGS[:1], SETTINGS[3:4]) if place.dry else (SETTINGS[:2], SETTINGS[2:]):
        for setting in settings:
            comparison.tune(setting)
        for batch, setting in product(BATCHES[:1] if place.dry else BATCHES, settings):
            comparison.final(setting, batch, 0)
    for seed, batch, setting in product(range(1, 1 if place.dry else _SEEDS), BATCHES, SETTINGS):
        comparison.final(setting, batch, seed)
    summarise(report, place)


def summarise(report: Report, place: Place) -> None:
    """Report the steps to the target of each setting and batch size, and compare with the goal."""
    runs: dict[tuple[Any, ...], dict[int, list[tuple[float, float]]]] = {}
    for row in report.content["tables"].get(RUNS, []):
        seeds = runs.setdefault((row["batch"], row["optimizer"], row["norm_over"]), {})
        seeds.setdefault(row["seed"], []).append((row["steps"], row["top1"]))
    least: dict[int, float] = defaultdict(lambda: math.inf)
    for (batch, optimizer, norm), seeds in runs.items():
        whole = [points for points in seeds.values() if len(points) == len(_SHORTER)]
        # A seed that does not reach the target is the largest.
        steps = sorted(steps_to(TARGET, points) for points in whole)
        if not steps:
            continue  # for lack of time
        middle = steps[len(steps) // 2]
        columns = {"median": middle, "least": steps[0], "most": steps[-1]}
        report.row(
            f"steps to {TARGET:g} % on the test set",
            **{"optimizer": optimizer, "norm_over": norm, "batch": batch},
            **{k: "not reached" if math.isinf(v) else round(v) for k, v in columns.items()},
            seeds=len(steps),
            best_top1=max(top1 for points in whole for _, top1 in points),
        )
        least[batch] = min(least[batch], middle)
    for batch in sorted(least) if place.on_gpu else ():
        steps_needed = min(least[batch], 1e9)
        report.goal(f"CIFAR-10: steps to 94 % at {batch:,}", steps_needed, most=GOAL_STEPS)


def steps_to(target: float, points: Sequence[tuple[float, float]]) -> float:
    """Steps at which accuracy meets a target, on lines over the logarithm of steps."""
    ordered = sorted(points)
    if ordered[0][1] >= target:
        return ordered[0][0]
    for (a, below), (b, above) in pairwise(ordered):
        if below < target <= above:
            return a * (b / a) ** ((target - below) / (above - below))
    return math.inf
