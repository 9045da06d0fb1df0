"""Claim: what every run measures of its steps costs at most 1 % of their time.

    python -m benchmarks.recipes.step_meters [--rounds 10] [--out DIR]

Two ranks of one thread each train over gloo on this machine. Compared are the trainer's steps as
they are, with the phases, the wait for the all-reduce and the gathering of all ranks' times at each
reading, and the same steps without these. Each way has two copies of the network; the four take
turns of a few steps with one reading, in the order with, without, without, with, in one process.
The ratio is that of the times of a round, its mean and 95 % interval those of Student's t over the
logarithms of all rounds. It is taken of the time of the clock, and of the time that rank 0 had a
processor: where other programs take the cores, only the latter is resolved, and the wait of the
gathering is in the former alone.

Beside it, the same calls are timed alone, without a network: they are a fixed time for each step
and each reading, which the ratio can only bound.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from scipy.stats import t
from torch import Tensor

from benchmarks.tables import RESULTS
from largebatch.amp import Precision
from largebatch.comm import Plan, Topology
from largebatch.lars import LARS, split_parameters
from largebatch.recipes.ranks import Job
from largebatch.recipes.training.ddp import data_parallel
from largebatch.recipes.training.evaluate import Meter
from largebatch.recipes.training.interval import Interval
from largebatch.recipes.training.phases import Phases
from largebatch.recipes.training.step import TrainingStep
from largebatch.recipes.training.stragglers import StragglerReport
from largebatch.recipes.training.summary import processor, versions
from largebatch.recipes.training.waiting import AllReduceWait

RANKS = 2
GOAL = 0.01
CPU = torch.device("cpu")
#: Whether each copy of a network is measured, in the order of a round.
ORDER = (True, False, False, True)
#: Calls of what is timed alone.
ALONE = 2000


class Case(NamedTuple):
    """A network, and how it is trained.

    Attributes:
        model: Name in timm.
        size: Height and width of its images.
        images: Of a micro-batch.
        accumulation: Micro-batches of a step and rank.
        steps: Of a turn, with a reading after the last.
    """

    model: str
    size: int
    images: int
    accumulation: int
    steps: int

    def __str__(self) -> str:
        return f"{self.model}, {self.accumulation} x {self.images} images of {self.size} px"


CASES = (Case("resnet10t", 32, 64, 2, 5), Case("resnet18", 64, 16, 1, 5))


class Unmeasured:
    """Stands in for the phases of a step, and measures none."""

    input = forward = backward = optimizer = clearing = meters = nullcontext()

    def step(self) -> Any:
        """Return a context manager that does nothing."""
        return nullcontext()


class Copy:
    """A copy of a network that takes turns."""

    def __init__(self, case: Case, job: Job, topology: Topology, measured: bool) -> None:
        torch.manual_seed(0)
        self._case, self._job = case, job
        model = timm.create_model(case.model, num_classes=10)
        ddp = data_parallel(model, job, Plan.single("hierarchical"), topology)
        optimizer = LARS(split_parameters(model, 1e-4), 0.1, momentum=0.9)
        waiting = AllReduceWait(model, CPU) if measured else None
        self._step = TrainingStep(
            model, ddp, optimizer, Precision("fp32"), label_smoothing=0.1, waiting=waiting
        )
        if not measured:
            self._step.phases = Unmeasured()  # type: ignore[assignment]
        self._measured = measured
        self._stragglers = StragglerReport(job, topology, waiting, lambda line: None)
        self._meter = Meter(CPU)
        images = torch.randn(case.images, 3, case.size, case.size)
        self._batch: Any = images, torch.randint(10, (case.images,))

    def turn(self) -> tuple[float, float]:
        """Take the steps of a turn and read the meters.

        Returns:
            The seconds that it took, and those in which this process had a processor.
        """
        dist.barrier()
        case, interval = self._case, Interval(0.0)
        start, used = time.perf_counter(), time.process_time()
        for number in range(case.steps):
            self._meter.begin_step(measures_accuracy=number == case.steps - 1)
            self._step(iter([self._batch] * case.accumulation), case.accumulation, self._meter)
            interval.step(0.0)
        self._meter.read(self._job)
        self._job.all_reduce_max(interval.seconds(), *interval.waits)
        if self._measured:
            self._step.phases.read()
            self._stragglers.read(interval)
        return time.perf_counter() - start, time.process_time() - used


def each(function: Callable[[], object], calls: int) -> float:
    """Return the seconds of a call, as the median of ten parts of the calls."""
    parts = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(calls // 10):
            function()
        parts.append((time.perf_counter() - start) / (calls // 10))
    return statistics.median(parts)


def alone(accumulation: int, job: Job, topology: Topology) -> dict[str, float]:
    """Return the seconds of the calls of a step, and of a reading, without any work in them."""
    layer = torch.nn.Linear(1, 1)
    waiting = AllReduceWait(layer, CPU)
    phases = Phases(CPU, waiting)
    stragglers = StragglerReport(job, topology, waiting, lambda line: None)
    gradient: Tensor = layer.weight

    def step() -> None:
        with phases.step():
            for _ in range(accumulation):
                for phase in (phases.input, phases.forward, phases.backward, phases.meters):
                    with phase:
                        pass
                waiting._gradient(gradient)
            waiting.backward_returned()
            for phase in (phases.optimizer, phases.meters, phases.clearing):
                with phase:
                    pass

    def reading() -> None:
        interval = Interval(0.0)
        interval.step(0.0)
        with phases.step():
            for phase in (phases.forward, phases.backward, phases.optimizer):
                with phase:
                    pass
        phases.read()
        stragglers.read(interval)

    return {"step": each(step, ALONE), "reading": each(reading, ALONE // 10)}


def on_a_rank(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=10)
    )
    job, found = Job(rank, RANKS, RANKS, CPU), []
    for case in CASES:
        topology = Topology.of(RANKS, 1, rank)
        copies = [Copy(case, job, topology, measured) for measured in ORDER]
        for copy in copies:
            copy.turn()
        turns = [[copy.turn() for copy in copies] for _ in range(rounds)]
        found.append({"turns": turns, "alone": alone(case.accumulation, job, topology)})
        del copies
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def ratio(turns: list[list[float]]) -> tuple[float, float, float]:
    """Return the ratio of measured to unmeasured turns, and its 95 % interval."""
    logs = [
        math.log(
            sum(s for s, measured in zip(row, ORDER, strict=True) if measured)
            / sum(s for s, measured in zip(row, ORDER, strict=True) if not measured)
        )
        for row in turns
    ]
    mean = statistics.fmean(logs)
    half = t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def summarised(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a case, with times in seconds."""
    clock, processor_time = ([[turn[i] for turn in row] for row in found["turns"]] for i in (0, 1))
    plain = [s for row in clock for s, m in zip(row, ORDER, strict=True) if not m]
    step = statistics.median(plain) / case.steps
    own = found["alone"]["step"] + found["alone"]["reading"] / case.steps
    return {
        "case": str(case),
        "steps_of_a_reading": case.steps,
        "step_seconds": step,
        "ratio": ratio(clock),
        "processor_ratio": ratio(processor_time),
        "alone_step_seconds": found["alone"]["step"],
        "alone_reading_seconds": found["alone"]["reading"],
        "alone_share": own / step,
        "turns": found["turns"],
    }


def verdict(found: tuple[float, float, float]) -> str:
    """Return a ratio with its interval, and whether it meets the goal."""
    middle, low, high = found
    says = "met" if high <= 1 + GOAL else "missed" if low > 1 + GOAL else "unresolved"
    return f"{middle:.4f} ({low:.4f} to {high:.4f}): {says}"


def table(rows: list[dict[str, Any]]) -> str:
    """Tabulate the cases in Markdown."""
    lines = [
        "| network | step, ms | time with / without (95 % interval): goal, 1.01 "
        "| processor time with / without | calls alone, of a step | of a reading | share of the "
        "time |",
        "|---|---:|---|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['case']} | {1e3 * row['step_seconds']:.1f} "
            f"| {verdict(row['ratio'])} | {verdict(row['processor_ratio'])} "
            f"| {1e6 * row['alone_step_seconds']:.0f} us "
            f"| {1e6 * row['alone_reading_seconds']:.0f} us | {row['alone_share']:.2%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(on_a_rank, (folder, options.rounds), RANKS)
        found = json.loads(Path(folder, "found").read_text())
    rows = [summarised(case, one) for case, one in zip(CASES, found, strict=True)]
    about = {
        "date": date.today().isoformat(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "rounds": options.rounds,
        "versions": versions(),
    }
    content = {"about": about, "rows": rows}
    (options.out / "step_meters.json").write_text(json.dumps(content, indent=1) + "\n")
    text = (
        f"{table(rows)}\n{about['date']}, {about['processor']}, {about['cores']} cores, 2 ranks, "
        f"{options.rounds} rounds of {len(ORDER)} turns, a reading every {CASES[0].steps} steps, "
        f"torch {versions()['torch']}\n"
    )
    (options.out / "step_meters.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
