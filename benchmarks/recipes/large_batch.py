"""Claim: at equal epochs, LARS at batch 2,560 is within 0.5 points, and at 4,096 within 1.0 point,
of the best of LARS and SGD at batch 256, on CIFAR-10; and how LARS stands to SGD with Nesterov
momentum, and Muon to both.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.recipes.large_batch --data data/cifar10 [--trials 4] [--minutes N]

For each optimizer and batch size, `largebatch tune lr`'s search tunes the learning rate and the
warm-up with the same number of trials of the recipe's length, scored on 5,000 training images that
are held out of training. The first three trials start from one guess for each optimizer at batch
256 and scale it linearly, by the square root, and by the geometric mean of the two (at 256: the
guess, half and double), all with the same warm-up. Earlier trials name their method in their rows:
the same starts, then Optuna's Gaussian process. The best trial's values are trained on all training
images with three seeds, and each run is evaluated on the test set once, at its end. The paper's
ablations start from the tuned LARS at 4,096.

This takes hours on a CPU. Each finished run is written to benchmarks/results/large_batch.json
immediately and is not repeated. The same command resumes after an interruption: a search in
--studies, if that folder is kept. With a larger --trials, cells that have fewer are searched.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain, product
from pathlib import Path
from typing import Any

from benchmarks.recipes.large_batch_report import best_of, report, trials
from benchmarks.recipes.large_batch_starts import HELD_OUT, RECIPES
from benchmarks.recipes.task_pool import TaskPool
from largebatch.recipes.training.summary import processor, versions
from largebatch.recipes.tune.learning_rate.search import TOO_SHORT

RESULTS = Path(__file__).parents[1] / "results" / "large_batch.json"
SEEDS = (0, 1, 2)

#: Parallel runs with one thread each are faster than one run on all cores. By default, glibc
#: returns the memory of activations to the system at each step and gets it back in small pages,
#: which cost a sixth of the time.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1000000000"
    ":glibc.malloc.trim_threshold=10000000000",
}

#: Overrides under which nothing is evaluated or saved before the end.
PLAIN = ["evaluate_every=1dur", "checkpoint.every=null"]

#: Overrides that each remove one part of the tuned run at 4,096.
ABLATION_BATCH = 4096
ABLATIONS = {
    "without warm-up": ["schedule.warmup=0"],
    "decay on bias and norm": ["optimizer.decay_bias_and_norm=true"],
    "without zero gamma": ["model.zero_init_last_norm=false"],
}

#: Cells (optimizer, batch size) by priority, as the time may not suffice for all.
ORDER = (
    *((o, b) for b in (4096, 2560, 256, 8192, 1024) for o in ("lars", "nesterov")),
    *(("muon", b) for b in (2560, 8192, 256, 4096, 1024)),
)
ABLATIONS_AFTER = ("lars", 2560)  # the cell before the ablations with the first seed


@dataclass(frozen=True)
class Run:
    """The settings that identify one training run.

    Attributes:
        kind: ``trial`` (evaluated on held-out training images), ``final`` or ``ablation`` (both
            evaluated on the test set).
        optimizer: A key of :data:`RECIPES`.
        batch_size: Global batch size in images.
        lr: Peak learning rate.
        warmup_epochs: Length of the warm-up in epochs.
        seed: Seed of the weights, the order of images and the crops.
        variant: A key of :data:`ABLATIONS`, or empty.
    """

    kind: str
    optimizer: str
    batch_size: int
    lr: float
    warmup_epochs: float
    seed: int = 0
    variant: str = ""

    def overrides(self) -> list[str]:
        """Return the overrides of the recipe."""
        return [
            f"batch_size={self.batch_size}",
            f"optimizer.lr={self.lr!r}",
            f"schedule.warmup={self.warmup_epochs:g}ep",
            f"seed={self.seed}",
            *([f"data.holdout={HELD_OUT}"] if self.kind == "trial" else []),
            *(ABLATIONS[self.variant] if self.variant else []),
        ]


@dataclass(frozen=True)
class Search:
    """The search for the learning rate and the warm-up of one cell of the grid.

    Attributes:
        optimizer: A key of :data:`RECIPES`.
        batch_size: Global batch size in images.
    """

    optimizer: str
    batch_size: int


class Runs:
    """The finished runs, stored in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._processor, self._versions = path, processor(), versions()
        self.rows: list[dict[str, Any]] = (
            json.loads(path.read_text())["runs"] if path.exists() else []
        )

    def find(self, run: Run) -> dict[str, Any] | None:
        """Return the row of a run, or None if the run has not finished."""
        return next(
            (row for row in self.rows if all(row[k] == v for k, v in vars(run).items())), None
        )

    def trials(self, optimizer: str, batch_size: int) -> list[dict[str, Any]]:
        """Return the trials of a cell, in the order in which they finished."""
        return trials(self.rows, optimizer, batch_size)

    def add(self, run: Run, values: dict[str, Any]) -> None:
        """Add a finished run and write the file, unless the run is there already."""
        if self.find(run):
            return
        self.rows.append({**vars(run), **values, "processor": self._processor})
        content = {
            "claim": " ".join((__doc__ or "").partition("\n\n")[0].split()),
            "cores": len(os.sched_getaffinity(0)),
            "versions": self._versions,
            "runs": self.rows,
        }
        unfinished = self._path.with_suffix(".partial")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(self._path)


Found = list[tuple[Run, dict[str, Any]]]


class Grid(TaskPool[Run | Search, Found]):
    """Train the missing runs, each as soon as the runs that it depends on have finished.

    Args:
        runs: The finished runs.
        data: Folder of the data set.
        trials: Number of trials per cell.
        deadline: Value of ``time.monotonic()`` after which no run is started.
        studies: Folder of the searches.
    """

    def __init__(
        self, runs: Runs, data: Path, trials: int, deadline: float, studies: Path = Path()
    ) -> None:
        super().__init__(deadline)
        self.runs, self._data, self._trials = runs, data, trials
        self._studies = studies

    def finish(self, task: Run | Search) -> Found:
        """Train a run, or all trials of a search, and return the results."""
        if isinstance(task, Run):
            return [(task, self._train(task))]
        found = []
        for row in self._search(task):
            lr, warmup = row.pop("lr"), row.pop("warmup_epochs")
            found.append((Run("trial", task.optimizer, task.batch_size, lr, warmup), row))
        return found

    def store(self, task: Run | Search, result: Found) -> None:
        """Add the runs to the file."""
        for run, values in result:
            self.runs.add(run, values)
            settings = " ".join(run.overrides())
            print(f"{run.kind} {run.optimizer} {settings}: {values['top1']:.2f} %", flush=True)

    def missing(self) -> Iterator[Run | Search]:
        """Return the missing searches and runs of known settings, in the order of :data:`ORDER`."""
        wanted: list[Iterator[Run | Search]] = []
        for optimizer, batch_size in ORDER:
            wanted.append(self._cell(optimizer, batch_size))
            if (optimizer, batch_size) == ABLATIONS_AFTER:
                wanted.append(self._ablations(SEEDS[:1]))
        wanted.append(self._ablations(SEEDS[1:]))
        return (
            task
            for task in chain(*wanted)
            if isinstance(task, Search) or self.runs.find(task) is None
        )

    def _cell(self, optimizer: str, batch_size: int) -> Iterator[Run | Search]:
        """Yield the search of a cell, then the final runs with the best trial's values."""
        if best := self.best(optimizer, batch_size):
            for seed in SEEDS:
                yield _tuned("final", optimizer, batch_size, best, seed)
        else:
            yield Search(optimizer, batch_size)

    def _ablations(self, seeds: Sequence[int]) -> Iterator[Run]:
        """Yield the runs of the tuned LARS at 4,096 that each lack one part."""
        if best := self.best("lars", ABLATION_BATCH):
            for seed, variant in product(seeds, ABLATIONS):
                warmup = 0 if variant == "without warm-up" else best["warmup_epochs"]
                tuned = best | {"warmup_epochs": warmup}
                yield _tuned("ablation", "lars", ABLATION_BATCH, tuned, seed, variant)

    def best(self, optimizer: str, batch_size: int) -> dict[str, Any] | None:
        """Return the best trial of a cell, or None until all its trials have finished."""
        done = self.runs.trials(optimizer, batch_size)
        return best_of(done) if len(done) >= self._trials else None

    def _train(self, run: Run) -> dict[str, Any]:
        return train(RECIPES[run.optimizer], self._data, run.overrides())

    def _search(self, cell: Search) -> list[dict[str, Any]]:
        name = f"{cell.optimizer}-b{cell.batch_size}"
        command = [sys.executable, "-m", "benchmarks.recipes.large_batch_search"]
        command += ["--optimizer", cell.optimizer, "--batch-size", str(cell.batch_size)]
        command += ["--trials", str(self._trials), "--data", str(self._data)]
        command += ["--out", str(self._studies / name)]
        if self._deadline < math.inf:
            command += ["--minutes", str(max(0.1, (self._deadline - time.monotonic()) / 60))]
        process = _run(command)
        if process.returncode and TOO_SHORT in process.stderr:
            return []  # the next call continues the study
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{process.stderr[-2000:]}")
        found: list[dict[str, Any]] = json.loads(process.stdout)
        return found


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the environment of a run."""
    return subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )


def train(
    recipe: str,
    data: Path,
    overrides: Sequence[str],
    more: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda metrics: {},
) -> dict[str, Any]:
    """Train a recipe in a subprocess and return its results.

    Args:
        recipe: Name of the recipe.
        data: Folder of the data set.
        overrides: Its overrides.
        more: Returns what else to keep of the lines of ``metrics.jsonl``.

    Raises:
        RuntimeError: The run failed other than by divergence.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "largebatch.recipes.train", recipe]
        command += [f"data.path={data}", f"run_dir={run_dir}", *PLAIN, *overrides]
        process = _run(command)
        if process.returncode and "training diverged" not in process.stderr + process.stdout:
            raise RuntimeError(f"{' '.join(command)}:\n{process.stderr[-2000:]}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        last = {m["split"]: m for m in metrics}
        # Once the loss is no longer finite, the network predicts at chance level.
        top1 = 10.0 if process.returncode else last["val"]["top1"]
        return {
            "top1": round(top1, 2),
            "diverged": bool(process.returncode),
            "train_loss": round(last["train"]["loss"], 4),
            "steps": last["train"]["step"],
            "train_seconds": round(sum(m["seconds"] for m in metrics if m["split"] == "train")),
            "date": date.today().isoformat(),
            **more(metrics),
        }


def _tuned(
    kind: str, optimizer: str, batch_size: int, best: dict[str, Any], seed: int, variant: str = ""
) -> Run:
    return Run(kind, optimizer, batch_size, best["lr"], best["warmup_epochs"], seed, variant)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="prepared CIFAR-10")
    parser.add_argument("--trials", type=int, default=4, help="trials per optimizer and batch size")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="time after which no run is started"
    )
    parser.add_argument(
        "--studies", type=Path, default=Path("tuning/large-batch"), help="folder of the searches"
    )
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    grid = Grid(Runs(RESULTS), options.data, options.trials, deadline, options.studies)
    grid.run(options.workers)
    print(report(RESULTS))


if __name__ == "__main__":
    main()
