"""Claim: at equal epochs, LARS at batch 2,560 is within 0.5 points, and at 4,096 within 1.0 point,
of the best baseline at batch 256, on CIFAR-10; and how it stands to SGD with Nesterov momentum.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.recipes.large_batch --data data/cifar10 [--trials 4] [--minutes N]

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from itertools import chain, product
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from benchmarks.recipes.large_batch_report import best_of, report, trials
from benchmarks.recipes.large_batch_starts import GUESSES, starts, written
from largebatch.recipes.training.summary import processor, versions

RESULTS = Path(__file__).parents[1] / "results" / "large_batch.json"
SEEDS = (0, 1, 2)
HELD_OUT = 5000  # of the training images, to tune on

#: By optimizer, the recipe that is run, with its values replaced.
RECIPES = {"lars": "cifar10-b256", "nesterov": "cifar10-nesterov-b256"}

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

#: Cells in the order in which they are worth knowing, should the time not suffice.
ORDER = tuple((o, b) for b in (4096, 2560, 256, 8192, 1024) for o in GUESSES)
ABLATIONS_AFTER = ("lars", 2560)  # those with the first seed


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
    """The runs that ended, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
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
        return trials(self.rows, optimizer, batch_size)

    def add(self, run: Run, values: dict[str, Any]) -> None:
        """Keep a run, in the file too."""
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
    """Makes the runs that are missing, each as soon as what it depends on has ended.

    Args:
        runs: those that ended.
        data: folder of the data set.
        trials: of each cell.
        deadline: of ``time.monotonic()``, past which no run is started.
    """

    def __init__(self, runs: Runs, data: Path, trials: int, deadline: float) -> None:
        self.runs, self._data, self._trials, self._deadline = runs, data, trials, deadline
        self._under_way: set[Run] = set()
        self._changed = threading.Condition()

    def work(self) -> None:
        """Train what is missing until nothing is, or the time is over; in any number of threads."""
        while run := self._next():
            try:
                values = self._train(run)
            except BaseException:
                with self._changed:
                    self._deadline = 0.0  # for the other threads too
                    self._under_way.discard(run)
                    self._changed.notify_all()
                raise
            with self._changed:
                self.runs.add(run, values)
                self._under_way.discard(run)
                self._changed.notify_all()
            settings = " ".join(run.overrides())
            print(f"{run.kind} {run.optimizer} {settings}: {values['top1']:.2f} %", flush=True)

    def _next(self) -> Run | None:
        """A run to train now; waits where all depend on those under way."""
        with self._changed:
            while time.monotonic() < self._deadline:
                run = next((r for r in self.missing() if r not in self._under_way), None)
                if run:
                    self._under_way.add(run)
                    return run
                if not self._under_way:
                    break
                self._changed.wait()
            return None

    def missing(self) -> Iterator[Run]:
        """The runs that are wanted and can be told by now, in the order of :data:`ORDER`."""
        wanted: list[Iterator[Run]] = []
        for optimizer, batch_size in ORDER:
            wanted.append(self._cell(optimizer, batch_size))
            if (optimizer, batch_size) == ABLATIONS_AFTER:
                wanted.append(self._ablations(SEEDS[:1]))
        wanted.append(self._ablations(SEEDS[1:]))
        return (run for run in chain(*wanted) if self.runs.find(run) is None)

    def _cell(self, optimizer: str, batch_size: int) -> Iterator[Run]:
        """Trials, and with the best of them the three seeds."""
        first = starts(optimizer, batch_size)
        trials = [Run("trial", optimizer, batch_size, lr, warmup) for lr, warmup in first]
        yield from trials
        done = self.runs.trials(optimizer, batch_size)
        if all(self.runs.find(run) for run in trials) and len(done) < self._trials:
            yield Run("trial", optimizer, batch_size, *_suggested(first, done))
        if best := self.best(optimizer, batch_size):
            for seed in SEEDS:
                yield _tuned("final", optimizer, batch_size, best, seed)

    def _ablations(self, seeds: Sequence[int]) -> Iterator[Run]:
        """The tuned LARS at 4,096 without one of its parts."""
        if best := self.best("lars", ABLATION_BATCH):
            for seed, variant in product(seeds, ABLATIONS):
                warmup = 0 if variant == "without warm-up" else best["warmup_epochs"]
                tuned = best | {"warmup_epochs": warmup}
                yield _tuned("ablation", "lars", ABLATION_BATCH, tuned, seed, variant)

    def best(self, optimizer: str, batch_size: int) -> dict[str, Any] | None:
        """The best trial of a cell; None before all of them have ended."""
        done = self.runs.trials(optimizer, batch_size)
        return best_of(done) if len(done) >= self._trials else None

    def _train(self, run: Run) -> dict[str, Any]:
        return train(RECIPES[run.optimizer], self._data, run.overrides())


def train(recipe: str, data: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """What a run in a process of its own comes to."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "largebatch.recipes.train", recipe]
        command += [f"data.path={data}", f"run_dir={run_dir}", *overrides, *PLAIN]
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


def _tuned(
    kind: str, optimizer: str, batch_size: int, best: dict[str, Any], seed: int, variant: str = ""
) -> Run:
    return Run(kind, optimizer, batch_size, best["lr"], best["warmup_epochs"], seed, variant)


def _suggested(first: list[tuple[float, int]], done: list[dict[str, Any]]) -> tuple[float, int]:
    """What Optuna suggests after the trials that are done, rounded to what one would write."""
    done = sorted(done, key=lambda row: (row["lr"], row["warmup_epochs"]))  # whichever ended first
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
    return written(params["lr"]), params["warmup_epochs"]


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
        for worker in [pool.submit(grid.work) for _ in range(options.workers)]:
            worker.result()
    print(report(RESULTS))


if __name__ == "__main__":
    main()
