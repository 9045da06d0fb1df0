"""Claim: at equal epochs, LARS at batch 2,560 is within 0.5 points, and at 4,096 within 1.0 point,
of the best baseline at batch 256, on CIFAR-10; and how it stands to SGD with Nesterov momentum.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.large_batch --data data/cifar10 [--trials 4] [--workers 2] [--minutes N]
    python -m benchmarks.tables

For each optimizer and batch size, the learning rate and the warm-up are tuned in the same number of
trials, on 5,000 of the training images that are not trained on. From one guess at 256 for each
optimizer: linear scaling, square-root scaling and the geometric mean of the two (at 256: the guess,
half and double), all with the same warm-up; then what Optuna's Gaussian process suggests for both.
The best is trained on all training images with three seeds, and evaluated on the test set at its
end, once. The paper's ablations are of the tuned LARS at 4,096.

Hours on a CPU. Every run that ended is in benchmarks/results/large_batch.json at once, and is not
run again; the same command goes on after a stop, and after --trials was raised.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from benchmarks.large_batch_report import BATCHES, report
from largebatch.recipes.summary import processor, versions

RESULTS = Path(__file__).parent / "results" / "large_batch.json"
SEEDS = (0, 1, 2)
HELD_OUT = 5000  # of the training images, to tune on

#: By optimizer, the recipe that is run, with its values replaced.
RECIPES = {"lars": "cifar10-b256", "nesterov": "cifar10-nesterov-b256"}

#: What tuning starts from: learning rates at 256, and epochs of warm-up for all.
GUESSES = {"lars": 4.0, "nesterov": 0.2}
WARMUP_EPOCHS = 3

#: With a thread each, runs side by side are faster than one run on all cores. Unless told not to,
#: glibc gives the memory of activations back to the system at each step, and gets it in small
#: pages: that cost a sixth of the time.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1000000000"
    ":glibc.malloc.trim_threshold=10000000000",
}

#: Nothing is evaluated or saved before the end.
PLAIN = ["evaluate_every=1dur", "checkpoint.every=null"]

#: What is taken away from the tuned run at 4,096.
ABLATION_BATCH = 4096
ABLATIONS = {
    "without warm-up": ["schedule.warmup=0"],
    "decay on bias and norm": ["optimizer.decay_bias_and_norm=true"],
    "without zero gamma": ["model.zero_init_last_norm=false"],
}

#: Batch sizes in the order in which they are worth knowing, should the time not suffice.
ORDER = (256, 4096, 2560, 8192, 1024)
assert sorted(ORDER) == list(BATCHES)


@dataclass(frozen=True)
class Run:
    """One training run, and what tells it from the others.

    Attributes:
        kind: ``trial`` (evaluated on held-out training images), ``final`` or ``ablation`` (on the
            test set).
        optimizer: of :data:`RECIPES`.
        batch_size: global.
        lr: peak learning rate.
        warmup_epochs: of its rise.
        seed: of the weights, the order and the crops.
        variant: of :data:`ABLATIONS`, or empty.
    """

    kind: str
    optimizer: str
    batch_size: int
    lr: float
    warmup_epochs: int
    seed: int = 0
    variant: str = ""

    def overrides(self) -> list[str]:
        """Of the recipe."""
        return [
            f"batch_size={self.batch_size}",
            f"optimizer.lr={self.lr!r}",
            f"schedule.warmup={self.warmup_epochs}ep",
            f"seed={self.seed}",
            *([f"data.holdout={HELD_OUT}"] if self.kind == "trial" else []),
            *(ABLATIONS[self.variant] if self.variant else []),
        ]


class Runs:
    """The runs that ended, in a file; used from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.rows: list[dict[str, Any]] = (
            json.loads(path.read_text())["runs"] if path.exists() else []
        )

    def find(self, run: Run) -> dict[str, Any] | None:
        """What a run gave, if it ended."""
        return next(
            (row for row in self.rows if all(row[k] == v for k, v in vars(run).items())), None
        )

    def trials(self, optimizer: str, batch_size: int) -> list[dict[str, Any]]:
        """The trials of a cell, in the order in which they ended."""
        cell = ("trial", optimizer, batch_size)
        return [r for r in self.rows if (r["kind"], r["optimizer"], r["batch_size"]) == cell]

    def add(self, run: Run, values: dict[str, Any]) -> None:
        with self._lock:
            self.rows.append({**vars(run), **values})
            content = {
                "claim": " ".join((__doc__ or "").partition("\n\n")[0].split()),
                "machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0))},
                "versions": versions(),
                "runs": self.rows,
            }
            unfinished = self._path.with_suffix(".partial")
            unfinished.write_text(json.dumps(content, indent=1) + "\n")
            unfinished.replace(self._path)


class Grid:
    """Makes the runs that are missing.

    Args:
        runs: those that ended.
        data: folder of the data set.
        trials: of each cell.
        deadline: of ``time.monotonic()``, past which no run is started.
    """

    def __init__(self, runs: Runs, data: Path, trials: int, deadline: float) -> None:
        self.runs, self._data, self._trials, self._deadline = runs, data, trials, deadline
        # The ablations wait for the trials of their cell, which another thread may be at.
        self._tuning = {(o, b): threading.Lock() for o in GUESSES for b in BATCHES}

    def result(self, run: Run) -> dict[str, Any] | None:
        """What a run gives, from the file or by training; None where the time is over."""
        if (known := self.runs.find(run)) is None and time.monotonic() < self._deadline:
            values = self._train(run)
            self.runs.add(run, values)
            known = self.runs.find(run)
            print(
                f"{run.kind} {run.optimizer} {' '.join(run.overrides())}: {values['top1']:.2f} %",
                flush=True,
            )
        return known

    def _train(self, run: Run) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "run"
            command = [sys.executable, "-m", "largebatch.recipes.train", RECIPES[run.optimizer]]
            command += [f"data.path={self._data}", f"run_dir={run_dir}", *run.overrides(), *PLAIN]
            ended = subprocess.run(
                command,
                env=os.environ | ENVIRONMENT,
                capture_output=True,
                text=True,
                check=False,
            )
            if ended.returncode and "training diverged" not in ended.stderr + ended.stdout:
                raise RuntimeError(f"{' '.join(command)}:\n{ended.stderr[-2000:]}")
            lines = (run_dir / "metrics.jsonl").read_text().splitlines()
            metrics = [json.loads(line) for line in lines]
            last = {m["split"]: m for m in metrics}
            # Where the loss is not a number any more, the network knows no more than chance.
            top1 = 10.0 if ended.returncode else last["val"]["top1"]
            return {
                "top1": round(top1, 2),
                "diverged": bool(ended.returncode),
                "train_loss": round(last["train"]["loss"], 4),
                "steps": last["train"]["step"],
                "train_seconds": round(sum(m["seconds"] for m in metrics if m["split"] == "train")),
                "date": date.today().isoformat(),
            }

    def tune(self, optimizer: str, batch_size: int) -> dict[str, Any] | None:
        """The best trial of a cell; None where the time was over before the last one."""
        first = _starts(optimizer, batch_size)
        with self._tuning[optimizer, batch_size]:
            for number in range(self._trials):
                done = self.runs.trials(optimizer, batch_size)
                if number < len(done):
                    continue
                lr, warmup = first[number] if number < len(first) else _suggested(first, done)
                if self.result(Run("trial", optimizer, batch_size, lr, warmup)) is None:
                    return None
        return max(self.runs.trials(optimizer, batch_size)[: self._trials], key=lambda r: r["top1"])

    def cell(self, optimizer: str, batch_size: int) -> None:
        """Tune an optimizer at a batch size, then train with the three seeds."""
        if best := self.tune(optimizer, batch_size):
            for seed in SEEDS:
                self.result(_tuned("final", optimizer, batch_size, best, seed))

    def ablation(self, variant: str, seed: int) -> None:
        """Train the tuned LARS at 4,096 without one of its parts."""
        if best := self.tune("lars", ABLATION_BATCH):
            warmup = 0 if variant == "without warm-up" else best["warmup_epochs"]
            tuned = best | {"warmup_epochs": warmup}
            self.result(_tuned("ablation", "lars", ABLATION_BATCH, tuned, seed, variant))


def _tuned(
    kind: str, optimizer: str, batch_size: int, best: dict[str, Any], seed: int, variant: str = ""
) -> Run:
    return Run(kind, optimizer, batch_size, best["lr"], best["warmup_epochs"], seed, variant)


def _starts(optimizer: str, batch_size: int) -> list[tuple[float, int]]:
    """The first trials of a cell: learning rate and epochs of warm-up."""
    smallest = min(BATCHES)
    if batch_size == smallest:
        factors = [1.0, 0.5, 2.0]
    else:
        factors = [(batch_size / smallest) ** power for power in (1, 0.5, 0.75)]
    return [(_written(factor * GUESSES[optimizer]), WARMUP_EPOCHS) for factor in factors]


def _written(lr: float) -> float:
    """A learning rate as one would write it."""
    return float(f"{lr:.3g}")


def _suggested(first: list[tuple[float, int]], done: list[dict[str, Any]]) -> tuple[float, int]:
    """What Optuna suggests after the trials that are done, rounded to what one would write."""
    lrs = [lr for lr, _ in first]
    low, high = min(lrs) / 2, 2 * max(lrs)
    space: dict[str, BaseDistribution] = {
        "lr": FloatDistribution(low, high, log=True),
        "warmup_epochs": IntDistribution(1, 8),
    }
    sampler = optuna.samplers.GPSampler(seed=0, n_startup_trials=len(first))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for row in done:
        params = {name: row[name] for name in space}
        trial = optuna.trial.create_trial(params=params, distributions=space, value=row["top1"])
        study.add_trial(trial)
    params = study.ask(space).params
    return _written(params["lr"]), params["warmup_epochs"]


def jobs(grid: Grid) -> Iterator[Callable[[], None]]:
    """What is to be done, each in a thread, in the order in which it is worth knowing."""
    for batch_size in ORDER:
        for optimizer in GUESSES:
            yield partial(grid.cell, optimizer, batch_size)
        if batch_size == ABLATION_BATCH:
            yield from (partial(grid.ablation, variant, SEEDS[0]) for variant in ABLATIONS)
    for seed in SEEDS[1:]:
        yield from (partial(grid.ablation, variant, seed) for variant in ABLATIONS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="prepared CIFAR-10")
    parser.add_argument("--trials", type=int, default=4, help="of each optimizer and batch size")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    runs = Runs(RESULTS)
    grid = Grid(runs, options.data, options.trials, time.monotonic() + 60 * options.minutes)
    with ThreadPoolExecutor(options.workers) as pool:
        for job in [pool.submit(job) for job in jobs(grid)]:
            job.result()
    print(report(RESULTS))


if __name__ == "__main__":
    main()
