"""Claim: at 19.5 updates per epoch (a batch of 2,560), LARS needs at most 1.6 times the epochs of a
batch of 256 to the same accuracy on CIFAR-10, and the best of SGD with Nesterov momentum, LARS and
Muon no more epochs than the best at 256. The best at 4,096 needs at most 1.1 times the epochs of
the best at 256, and at 8,192 at most 1.5 times.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.recipes.epochs_to_target --data data/cifar10 [--minutes N]

The network is a small airbench. In each cell, an optimizer at a batch size, `largebatch tune lr`
searches learning rate, warm-up, power of the decay and momentum at one length, with the same budget
of epochs; its trials are scored on training images that are held out. The tuned values are then
trained on all training images at lengths on both sides of the target, and at further ones until
both ends of the interval lie within them. Each run has a schedule of its own and is evaluated on
the test set once, at its end. The target is the mean of the first seeds of SGD at 256, with
airbench's learning rate of biases, so that it is known before any other cell is trained.

Finished runs and searches are written to benchmarks/results/epochs_to_target.json immediately and
are not repeated. A search that was interrupted goes on from its folder in --studies, if that is
kept. The first twelve cells took 19 hours on two cores.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.airbench_optimizers import OPTIMIZERS, RECIPE
from benchmarks.recipes.epochs_to_target_estimates import (
    TARGET_CELL,
    TARGET_SEEDS,
    epochs_of,
    finals,
    search_of,
    target_of,
)
from benchmarks.recipes.epochs_to_target_report import write
from benchmarks.recipes.large_batch import ENVIRONMENT, train
from benchmarks.recipes.large_batch_single import Rows, find, parser
from benchmarks.recipes.large_batch_starts import HELD_OUT
from benchmarks.recipes.task_pool import TaskPool
from benchmarks.tables import RESULTS
from largebatch.recipes.training.summary import processor, versions
from largebatch.recipes.tune.learning_rate.search import TOO_SHORT

RESULT = RESULTS / "epochs_to_target.json"

#: The network and its precision, for all cells.
NETWORK = (
    "model.args.widths=[32, 128, 256]",
    "data.image_size=24",
    "data.eval_resize=24",
    "precision=bf16",
)
#: Epochs of the trials at full length.
EPOCHS = 16
#: Lengths that may be trained, over that.
LADDER = (0.32, 0.4, 0.5, 0.64, 0.8, 1.0, 1.25, 1.6, 2.0, 2.5)
#: Epochs of a search, over those of a trial at full length.
BUDGET = 6
#: A search tries rates from the guess over this to the guess times this.
REACH = 12

#: A length is clearly below or above the target from this many points of accuracy: with less, an
#: interval could reach beyond the lengths that are trained.
MARGIN = 0.3
#: Keys of the recipe by what a search calls them.
KEYS = {"lr": "optimizer.lr", "power": "schedule.power", "momentum": "optimizer.momentum"}

#: Seeds of the lengths next to the target, at first and where a claim rests on the cell.
SEEDS, SEEDS_OF_CLAIMS = 3, 8
#: Seeds of the other lengths.
SEEDS_ON_THE_WAY = 2

#: Cells (optimizer, batch size), the most urgent first. The cells of a group are all searched and
#: trained at the length of the search before any is trained at others: which optimizer is the best
#: at a batch is known early.
GROUPS = (
    (
        *((o, 256) for o in ("Nesterov", "Muon", "LARS")),
        *((o, b) for b in (2560, 4096, 8192) for o in ("Muon", "LARS", "Nesterov")),
    ),
    tuple(("Nesterov-1x", b) for b in (2560, 8192, 256, 4096)),
    (("LAMB", 4096), *((o, 1024) for o in ("Nesterov-1x", "Muon", "LARS"))),
)
#: Cells that a claim rests on.
CLAIMS = tuple((o, b) for b in (256, 2560, 4096, 8192) for o in ("LARS", "Muon", "Nesterov-1x"))


@dataclass(frozen=True)
class Search:
    """The search for the values of a cell.

    Attributes:
        optimizer: A key of ``OPTIMIZERS``.
        batch_size: Global batch size in images.
    """

    optimizer: str
    batch_size: int

    def command(self, data: Path, out: Path) -> list[str]:
        """Return the command, which prints the result as JSON."""
        guess = OPTIMIZERS[self.optimizer].guess(self.batch_size)
        command = [sys.executable, "-m", "largebatch.recipes.tune_lr", RECIPE]
        command += cell_overrides(self.optimizer, self.batch_size, EPOCHS)
        command += [f"data.path={data}", f"data.holdout={HELD_OUT}", f"optimizer.lr={guess:.3g}"]
        also = "power" if self.optimizer == "LAMB" else "power,momentum"  # LAMB takes betas
        command += ["--also", also, "--epochs", str(BUDGET * EPOCHS)]
        command += ["--lr", f"{guess / REACH:.3g}..{guess * REACH:.3g}"]
        return [*command, "--out", str(out), "--json"]


@dataclass(frozen=True)
class Run:
    """A run on all training images with the values of a cell's search.

    Attributes:
        optimizer: A key of ``OPTIMIZERS``.
        batch_size: Global batch size in images.
        epochs: Length of the run.
        seed: Seed of the weights, the order of images and their augmentation.
    """

    optimizer: str
    batch_size: int
    epochs: float
    seed: int

    def overrides(self, tuned: Mapping[str, float]) -> list[str]:
        """Return the overrides of the recipe.

        Args:
            tuned: What the search found; the warm-up as a share of the run.
        """
        return [
            *cell_overrides(self.optimizer, self.batch_size, self.epochs),
            *(f"{key}={tuned[name]!r}" for name, key in KEYS.items() if name in tuned),
            f"schedule.warmup={tuned['warmup']:g}dur",
            f"seed={self.seed}",
        ]


def cell_overrides(optimizer: str, batch_size: int, epochs: float) -> list[str]:
    """Return the overrides of the recipe that all runs of a cell have."""
    return [
        *NETWORK,
        *OPTIMIZERS[optimizer].overrides,
        f"batch_size={batch_size}",
        f"epochs={epochs:g}",
    ]


class Results:
    """The finished searches and runs, stored in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._processor, self._versions = path, processor(), versions()
        content = json.loads(path.read_text()) if path.exists() else {}
        self.searches: Rows = content.get("searches", [])
        self.runs: Rows = content.get("runs", [])

    def add(self, to: Rows, row: dict[str, Any]) -> None:
        """Add a row to the searches or runs and write the file."""
        versions = {"torch": self._versions["torch"], "largebatch": self._versions["largebatch"]}
        origin = {"date": date.today().isoformat(), "processor": self._processor, **versions}
        to.append({**row, **origin})
        content = {
            "claim": " ".join((__doc__ or "").partition("\n\n")[0].split()),
            "network": list(NETWORK),
            "epochs": EPOCHS,
            "cores": len(os.sched_getaffinity(0)),
            "versions": self._versions,
            "searches": self.searches,
            "runs": self.runs,
        }
        unfinished = self._path.with_suffix(".partial")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(self._path)


class Grid(TaskPool[Search | Run, dict[str, Any] | None]):
    """Make the missing searches and runs.

    Args:
        results: The finished ones.
        data: Folder of the data set.
        studies: Folder of the searches.
        deadline: Value of ``time.monotonic()`` after which nothing is started.
    """

    def __init__(
        self, results: Results, data: Path, studies: Path, deadline: float = math.inf
    ) -> None:
        super().__init__(deadline)
        self.results, self._data, self._studies = results, data, studies

    def missing(self) -> Iterator[Search | Run]:
        """Yield what can be done now: group by group, then the further seeds of claims."""
        steps = [(seeds, cells) for cells in GROUPS for seeds in (0, SEEDS)]
        for seeds, cells in (*steps, (SEEDS_OF_CLAIMS, CLAIMS)):
            for optimizer, batch_size in cells:
                if not search_of(self.results.searches, optimizer, batch_size):
                    yield Search(optimizer, batch_size)
                    continue
                for run in self._runs(optimizer, batch_size, seeds):
                    if not find(self.results.runs, vars(run)):
                        yield run

    def _runs(self, optimizer: str, batch_size: int, seeds: int) -> Iterator[Run]:
        """Yield the runs of a cell, finished or not, whose lengths are known by now.

        Without ``seeds`` those of the length of the search, :data:`SEEDS_ON_THE_WAY` of them.
        """

        def runs(length: float, number: int) -> Iterator[Run]:
            for seed in range(number):
                yield Run(optimizer, batch_size, round(length * EPOCHS, 2), seed)

        if (optimizer, batch_size) == TARGET_CELL:
            yield from runs(1.0, TARGET_SEEDS)
        target = target_of(self.results.runs, EPOCHS)
        if target is None:
            return  # until the target is known
        if not seeds:
            yield from runs(1.0, SEEDS_ON_THE_WAY)
            return
        walked = dict[float, float]()
        length: float | None = 1.0
        while length is not None:
            yield from runs(length, SEEDS_ON_THE_WAY)
            found = finals(self.results.runs, optimizer, batch_size, round(length * EPOCHS, 2))
            if len(found) < SEEDS_ON_THE_WAY:
                return  # until its result is known
            walked[length] = statistics.mean(row["top1"] for row in found[:SEEDS_ON_THE_WAY])
            length = next_length(walked, target)
        lengths = around(walked, target)
        while True:
            for length in lengths:
                yield from runs(length, seeds)
            wider = self._longer_or_shorter(optimizer, batch_size, walked, lengths, target)
            if wider is None:
                return
            lengths = sorted([*lengths, wider])

    def _longer_or_shorter(
        self,
        optimizer: str,
        batch_size: int,
        walked: Mapping[float, float],
        lengths: Sequence[float],
        target: float,
    ) -> float | None:
        """Return a length that may close an open end of a cell's interval, the shorter one first.

        None if there is none, or before the first :data:`SEEDS` seeds of each length have finished.
        The interval is made from the cell's own spread, so that the runs of a cell do not depend on
        those of others.
        """
        rows = Rows()
        for length in {*walked, *lengths}:
            found = finals(self.results.runs, optimizer, batch_size, round(length * EPOCHS, 2))
            rows += found[:SEEDS]
            if length in lengths and [r["seed"] for r in found[:SEEDS]] != list(range(SEEDS)):
                return None
        epochs = epochs_of(rows, optimizer, batch_size, target, spread=None)
        trained = sorted({*walked, *lengths})
        below, above = LADDER.index(trained[0]) - 1, LADDER.index(trained[-1]) + 1
        if epochs and epochs.low == 0 and below >= 0:
            return LADDER[below]
        if epochs and math.isinf(epochs.high) and above < len(LADDER):
            return LADDER[above]
        return None

    def finish(self, task: Search | Run) -> dict[str, Any] | None:
        """Search or train, and return the result; None for a search that ran out of time."""
        if isinstance(task, Run):
            search = search_of(self.results.searches, task.optimizer, task.batch_size)
            assert search
            return train(RECIPE, self._data, task.overrides(search["best"]))
        command = task.command(self._data, self._studies / f"{task.optimizer}-b{task.batch_size}")
        if self._deadline < math.inf:
            minutes = (self._deadline - time.monotonic()) / 60
            command += ["--minutes", str(max(0.1, minutes))]
        environment = os.environ | ENVIRONMENT
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        out_of_time = self._deadline < math.inf and TOO_SHORT in process.stderr
        if process.returncode and not out_of_time:
            raise RuntimeError(f"{' '.join(command)}:\n{process.stderr[-2000:]}")
        if process.returncode:
            return None
        found: dict[str, Any] = json.loads(process.stdout)
        left = BUDGET * EPOCHS - found["epochs"]
        if self._deadline < math.inf and left >= EPOCHS and time.monotonic() > self._deadline:
            return None  # the next call goes on
        return found

    def store(self, task: Search | Run, result: dict[str, Any] | None) -> None:
        """Add the result to the file."""
        if result is None:
            return
        if isinstance(task, Run):
            self.results.add(self.results.runs, {**vars(task), **result})
        else:
            kept = ("best", "held_out", "epochs", "seconds", "ranges", "trials")
            found = {key: result[key] for key in kept}
            self.results.add(self.results.searches, {**vars(task), **found})
        print(task, result.get("top1", result.get("best")), flush=True)


def next_length(walked: Mapping[float, float], target: float) -> float | None:
    """Return the length to train next, None once the ends are clearly on both sides of the target.

    Args:
        walked: Mean accuracy by length, of neighbours on the ladder.
        target: The accuracy to reach.
    """
    first, last = LADDER.index(min(walked)), LADDER.index(max(walked))
    if walked[max(walked)] < target + MARGIN and last + 1 < len(LADDER):
        return LADDER[last + 1]
    if walked[min(walked)] > target - MARGIN and first > 0:
        return LADDER[first - 1]
    return None


def around(walked: Mapping[float, float], target: float) -> list[float]:
    """Return the lengths between the last clearly below the target and the first clearly above."""
    below = [length for length, top1 in walked.items() if top1 <= target - MARGIN]
    above = [length for length, top1 in walked.items() if top1 >= target + MARGIN]
    first, last = max(below, default=min(walked)), min(above, default=max(walked))
    return [length for length in sorted(walked) if first <= length <= last]


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--minutes", type=float, default=math.inf, help="time after which nothing is started"
    )
    made.add_argument(
        "--studies", type=Path, default=Path("tuning/epochs-to-target"), help="for the searches"
    )
    options = made.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    Grid(Results(RESULT), options.data, options.studies, deadline).run(options.workers)
    print(write(RESULT))


if __name__ == "__main__":
    main()
