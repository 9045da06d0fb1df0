"""The runs that faults happen to: their forms, how one is started, and what it must end with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.watched import INJECTED, MARKS, SAID, STACKS, read_marks
from largebatch.recipes.training.folder.names import METRICS
from largebatch.recipes.training.watch.clocks import PHASES
from tests.ranks import FORKED, start_module, torchrun

STEPS, CHECKPOINT_EVERY, EVALUATE_EVERY = 24, 4, 6

_RECIPE = (
    "digits",
    "model.name=resnet9",
    "model.args.width=4",
    "data.image_size=16",
    "data.eval_resize=20",
    "data.backend=torchvision",
    "batch_size=24",
    "micro_batch_size=null",
    "epochs=0.4",  # of 1,437 images: 24 steps
    "schedule.warmup=4",
    "device=cpu",
    "comm.ranks_per_node=null",
    "comm.timeout_seconds=60",
    "log_every=2",
    f"evaluate_every={EVALUATE_EVERY}",
    f"checkpoint.every={CHECKPOINT_EVERY}",
    "checkpoint.keep=3",
    "callbacks=benchmarks.faults.watched:Watched",
)
_STAGES = "stages=[{from: 0.5dur, image_size: 20}]"
_SGD = ("optimizer.name=sgd", "optimizer.lr=0.05")

#: What runs have in common but for the number of ranks, by name.
FORMS = {
    "FP32, LARS": ("precision=fp32",),
    "BF16, LARS, moving average": ("precision=bf16", "ema.decay=0.9"),
    "FP16 with FP32 masters, LARS, accumulation": ("precision=fp16-master", "micro_batch_size=4"),
    "FP32, SGD, stages": ("precision=fp32", *_SGD, _STAGES),
    "BF16, SGD, accumulation": ("precision=bf16", *_SGD, "micro_batch_size=4"),
    "FP16 with FP32 masters, SGD, moving average": (
        *("precision=fp16-master", "ema.decay=0.9"),
        *_SGD,
    ),
}
ENTRY = Path(__file__).with_name("entry.py")
#: What a line of metrics says of the time, which is not the same in two runs.
_TIMES = (
    *("images_per_second", "wait_seconds", "seconds", "step_wait_seconds"),
    *("all_reduce_wait_seconds", "least_all_reduce_wait_seconds"),
    *("slowest_rank", "slowest_rank_seconds", "memory_bytes"),
    *PHASES,
)


@dataclass(frozen=True)
class Form:
    """What a run is like: a key of :data:`FORMS`, and the number of ranks."""

    name: str
    ranks: int

    @property
    def scales(self) -> bool:
        """Whether its loss is scaled, so that a step whose gradient is not finite is skipped."""
        return self.name.startswith("FP16")


@dataclass
class Started:
    """A run that was started by torchrun."""

    agent: BaseProcess  # The process of torchrun
    marks: Path  # Folder in which the ranks say what they do

    def ranks(self) -> dict[int, tuple[int, str, int]]:
        """Process, phase and step of each rank that has begun, by rank."""
        return read_marks(self.marks)

    def end(self, seconds: float = 120) -> int:
        """Wait for the end, and return the exit code."""
        self.agent.join(seconds)
        if self.agent.exitcode is None:
            raise TimeoutError(f"the run still goes on after {seconds:.0f} seconds")
        return self.agent.exitcode

    def orphans(self) -> list[int]:
        """The ranks that live on though torchrun has ended."""
        alive = [p for p, _, _ in self.ranks().values() if Path(f"/proc/{p}").exists()]
        return [] if self.agent.is_alive() else alive

    @property
    def said(self) -> str:
        """All that the ranks have printed, without torchrun's own report."""
        return "".join(path.read_text() for path in sorted(self.marks.glob(f"{SAID}*")))

    @property
    def stacks(self) -> str:
        """Where each rank was that had not begun to train in time."""
        found = [(path.name, path.read_text()) for path in sorted(self.marks.glob(f"{STACKS}*"))]
        return "".join(f"{name}:\n{text}" for name, text in found if text)


@dataclass
class Place:
    """The folder of one fault."""

    folder: Path  # Holds the output, and the run folder if that has no disk of its own
    data: Path  # The digits
    form: Form  # What the run is like
    disk: Path | None = None  # A disk for the run folder alone
    _started: list[Started] = field(default_factory=list, init=False)

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return (self.disk or self.folder) / "run"

    @property
    def checkpoints(self) -> list[Path]:
        """The complete ones, the oldest first."""
        return sorted((self.run_dir / "checkpoints").glob("step-*"))

    def start(
        self, *overrides: str, restarts: int = 0, injected: Mapping[str, Any] | None = None
    ) -> Started:
        """Start the run, or resume it where it has a checkpoint."""
        marks, out, environment = self._prepare(injected)
        agent = torchrun(
            ENTRY,
            self._arguments(overrides),
            out,
            ranks=self.form.ranks,
            restarts=restarts,
            environment=environment,
        )
        return self._keep(Started(agent, marks))

    def start_node(self, endpoint: str, marks: Path, *overrides: str, hosts: bool) -> Started:
        """Start one rank and its torchrun, as a machine of a job that goes on with fewer."""
        _, out, environment = self._prepare(None)
        waits = "join_timeout=60,last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=2"
        waits += f",is_host={str(hosts).lower()}"
        options = ["--nnodes", f"1:{self.form.ranks}", "--nproc-per-node", "1"]
        options += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", self.folder.name]
        options += ["--rdzv-endpoint", endpoint, "--rdzv-conf", waits, "--local-addr", "127.0.0.1"]
        options += [*FORKED, str(ENTRY)]
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", MARKS: str(marks)}
        arguments = [*options, *self._arguments(overrides)]
        module = "torch.distributed.run"
        agent = start_module(module, arguments, out, cwd=ENTRY.parent, environment=environment)
        return self._keep(Started(agent, marks))

    def _keep(self, run: Started) -> Started:
        self._started.append(run)
        return run

    def _prepare(self, injected: Mapping[str, Any] | None) -> tuple[Path, Path, dict[str, str]]:
        number = len(self._started)
        marks = self.folder / f"marks-{number}"
        marks.mkdir(parents=True)
        environment = {MARKS: str(marks)}
        if injected:
            environment[INJECTED] = json.dumps(injected)
        return marks, self.folder / f"out-{number}", environment

    def _arguments(self, overrides: Sequence[str]) -> list[str]:
        here = [f"data.path={self.data}", f"run_dir={self.run_dir}", "resume=true"]
        return [*_RECIPE, *FORMS[self.form.name], *here, *overrides]

    @property
    def stacks(self) -> str:
        """Where each rank was that had not begun to train in time."""
        return "".join(run.stacks for run in self._started)

    def clear(self) -> None:
        """End what still runs, and remove the folder."""
        for run in self._started:
            agent = run.agent.pid or 0
            living = [agent, *started_by(agent)] if run.agent.is_alive() else []
            for process in {*living, *run.orphans()}:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            run.agent.join()
        shutil.rmtree(self.folder, ignore_errors=True)


class References:
    """Results of runs to which nothing happens, each made when it is first asked for."""

    def __init__(self, folder: Path, data: Path) -> None:
        self._folder, self._data = folder, data
        self._found: dict[Form, dict[str, Any]] = {}

    def result(self, form: Form) -> dict[str, Any]:
        """Return the result of an uninterrupted run."""
        if form not in self._found:
            place = Place(self._folder / f"reference-{len(self._found)}", self._data, form)
            try:
                run = place.start()
                if run.end():
                    said = f"{run.said[-2000:]}{run.stacks}"
                    raise RuntimeError(f"the run without a fault failed:\n{said}")
                self._found[form] = result_of(place)
            finally:
                place.clear()
        return self._found[form]


def result_of(place: Place) -> dict[str, Any]:
    """Return the weights and the metrics of a run, without times."""
    lines = (place.run_dir / METRICS).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    metrics = [{k: v for k, v in row.items() if k not in _TIMES} for row in rows]
    files = sorted(place.run_dir.glob("weights*.pt"))  # also those of the moving average
    return {"metrics": metrics, "weights": {file.name: torch.load(file) for file in files}}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return what is not equal to the bit in two results."""
    found = [] if ours["metrics"] == theirs["metrics"] else ["metrics"]
    return found + _unequal(ours["weights"], theirs["weights"], "weights")


def _unequal(ours: Any, theirs: Any, name: str) -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [line for key in ours for line in _unequal(ours[key], theirs[key], f"{name}.{key}")]
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return [] if torch.equal(ours, theirs) else [name]
    return [] if ours == theirs else [name]


def started_by(agent: int) -> list[int]:
    """Return the ranks that a process of torchrun has started and that live.

    They are children of its fork server.
    """
    return [rank for server in _children(agent) for rank in _children(server)]


def _children(process: int) -> list[int]:
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [int(number) for number in text.split()]


def wait_for(condition: Any, seconds: float = 60, every: float = 0.0005) -> Any:
    """Wait until a condition gives something, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(every)
    raise TimeoutError("the moment of a fault has not come")
