"""Check the hook on collectives that are really called, with several ranks on one GPU.

The ways to do it, each in processes of its own:

- ``gloo`` takes CUDA tensors, which exercises streams and futures, but not NCCL's;
- ``nccl`` allows several ranks on one GPU from 2.30 on, with ``NCCL_MULTI_RANK_GPU_ENABLE=1``;
- ``nccl, one rank`` works with any NCCL: the groups within and across nodes, which
  :class:`Topology` leaves out for a single rank, are made nevertheless.

Gradients are whole numbers whose sums and means are exact in BF16, so that they must be equal to
those of DDP without a hook. Each collective starts after a random delay on its stream, and each
bucket has more chunks than an all-reduce has phases, so that streams that do not wait for one
another show. On a CPU, gloo takes the place of NCCL.

    python -m benchmarks.gpu.ranks_on_one_gpu      prints the outcome of every case
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Report, Skipped, error_line
from largebatch.comm import ALGORITHMS, Grid, Groups, Plan, Rule, Topology, collectives, register

TITLE = "All-reduce hook on several ranks"

CHUNKS = 12
_TIMEOUT = timedelta(seconds=60)
_ROOT = Path(__file__).parents[2]

#: Algorithms that send messages from rank to rank on gloo, which it does not do on CUDA.
_POINT_TO_POINT = ("leader", "halving-doubling", "parameter-server")


@dataclass(frozen=True)
class Way:
    """A way to call collectives on one device.

    Attributes:
        name: for the report.
        backend: of torch.distributed.
        ranks: number of processes.
        ranks_per_node: ranks that count as one node.
    """

    name: str
    backend: str
    ranks: int
    ranks_per_node: int

    def check(self) -> None:
        """Raise :class:`Skipped` if this machine cannot do it."""
        if not dist.is_backend_available(self.backend):
            raise Skipped(f"needs {self.backend}")
        if self.backend == "nccl" and self.ranks > 1:
            version = torch.cuda.nccl.version()
            if version < (2, 30):
                shown = ".".join(map(str, version))
                raise Skipped(f"NCCL {shown} refuses several ranks on one GPU; 2.30 allows it")


def ways(device: torch.device) -> list[Way]:
    """Return the ways for a device."""
    if device.type != "cuda":
        return [Way("gloo", "gloo", 2, 1), Way("gloo, one rank", "gloo", 1, 1)]
    return [
        Way("gloo", "gloo", 4, 2),
        Way("nccl", "nccl", 4, 2),
        Way("nccl, one rank", "nccl", 1, 1),
    ]


def cases(way: Way, device: torch.device, bucket_bytes: int) -> dict[str, Rule]:
    """Return the rules to check: every algorithm, in chunks if it has phases, in every dtype."""
    rules = {}
    for wire in (None, "bf16", "fp16"):
        chunk = bucket_bytes // CHUNKS // (2 if wire else 1)
        of_dtype = f", {wire}" if wire else ""
        for name in ALGORITHMS:
            if (way.backend, device.type) == ("gloo", "cuda") and name in _POINT_TO_POINT:
                continue
            rules[name + of_dtype] = Rule(name, wire_dtype=wire)
        for name in ("hierarchical", "leader", "torus"):
            if name + of_dtype not in rules:
                continue
            # The torus of one column sends nothing in the first of its phases.
            shape = (1, way.ranks) if name == "torus" else None
            rules[f"{name}{of_dtype}, in chunks"] = Rule(name, None, wire, chunk, shape)
    return rules


class Products(nn.Module):
    """Gradients are equal to the input: layer by layer, they are multiplied and added."""

    def __init__(self, layers: int, elements: int) -> None:
        super().__init__()
        # Lengths that chunks and ranks do not divide.
        self.weights = nn.ParameterList(torch.ones(elements + 7 * i) for i in range(layers))

    def forward(self, inputs: list[Tensor]) -> Tensor:
        total: Tensor = sum(
            (weight * x).sum() for weight, x in zip(self.weights, inputs, strict=True)
        )  # type: ignore[assignment]
        return total


@contextmanager
def groups_of_one_rank() -> Iterator[None]:
    """Make process groups of a single rank, for which Topology has None, inside the block."""
    world, first, second = (dist.new_group([0]) for _ in range(3))
    with (
        mock.patch.object(Topology, "groups", Groups(world, first, second)),
        mock.patch.object(Topology, "grid", return_value=Grid(first, second)),
    ):
        yield


@contextmanager
def delayed_collectives(device: torch.device, seed: int) -> Iterator[None]:
    """Start every collective of a phase after a random delay on the current stream."""
    rng = random.Random(seed)

    def delay(call: Any) -> Any:
        def later(*arguments: Any) -> Any:
            torch.cuda._sleep(rng.choice((0, 0, 20_000, 200_000)))  # up to 0.1 ms
            return call(*arguments)

        return later

    names = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
    changed = {name: delay(getattr(collectives, name)) for name in names}
    with mock.patch.multiple(collectives, **changed) if device.type == "cuda" else nullcontext():
        yield


def inputs_of(step: int, model: nn.Module, device: torch.device) -> list[Tensor]:
    """Return whole numbers, other ones for each rank and step, up to 36, multiples of 12."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return [
        (12 * torch.randint(-3, 4, weight.shape, generator=generator)).float().to(device)
        for weight in model.parameters()
    ]


def gradients_of(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Run a step; the gradients are read on the current stream right after backward."""
    model.zero_grad()
    model(inputs).backward()
    return [p.grad * 1 for p in model.parameters() if p.grad is not None]


def equal_those_of_ddp(rule: Rule, way: Way, device: torch.device, dry: bool) -> None:
    """Check that the hook averages as DDP does, on this rank.

    Raises:
        AssertionError: a gradient differs; the message has its step and layer.
    """
    layers, elements, steps = (4, 2_000, 2) if dry else (8, 500_000, 20)
    if way.ranks > 1 and not dry:
        steps = 5  # processes take turns on a GPU, so that each collective takes milliseconds
    plan = Plan((rule,), fusion_threshold_bytes=_bucket_bytes(dry))
    plain, hooked = (
        DistributedDataParallel(Products(layers, elements).to(device), **plan.ddp_options())
        for _ in range(2)
    )
    register(hooked, plan, Topology.from_environment(way.ranks_per_node))
    for step in range(steps):
        inputs = inputs_of(step, plain, device)
        expected = gradients_of(plain, inputs)
        with delayed_collectives(device, step):
            found = gradients_of(hooked, inputs)
        for layer, (a, b) in enumerate(zip(expected, found, strict=True)):
            if not torch.equal(a, b):
                wrong = int((a != b).sum())
                raise AssertionError(f"step {step}, layer {layer}: {wrong} of {a.numel()} differ")


def _bucket_bytes(dry: bool) -> int:
    return 4 * (4_000 if dry else 1_000_000)


def rank(way: Way, index: int, folder: Path, device: torch.device, dry: bool) -> None:
    """Run all cases as one rank, and write the error of each to a file as soon as it is known."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        way.backend,
        init_method=f"file://{folder}/store",
        rank=index,
        world_size=way.ranks,
        timeout=_TIMEOUT,
    )
    outcomes: dict[str, str] = {}
    with groups_of_one_rank() if way.ranks == 1 else nullcontext():
        for case, rule in cases(way, device, _bucket_bytes(dry)).items():
            try:
                equal_those_of_ddp(rule, way, device, dry)
                outcomes[case] = ""
            except Exception as error:
                outcomes[case] = f"rank {index}: {error_line(error)}"
            (folder / f"rank-{index}.partial").write_text(json.dumps(outcomes))
            os.replace(folder / f"rank-{index}.partial", folder / f"rank-{index}.json")
            if outcomes[case] and "AssertionError" not in outcomes[case]:
                os._exit(1)  # a collective failed, and the other ranks may wait in it
    dist.destroy_process_group()


def outcomes(way: Way, place: Place, seconds: float) -> dict[str, str]:
    """Run all ranks, for at most ``seconds``; return the first error of each case, or "" if none.

    Raises:
        Skipped: this machine cannot do it.
    """
    way.check()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
    expected = cases(way, place.device, _bucket_bytes(place.dry))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu.ranks_on_one_gpu", "--folder", folder]
        command += ["--way", way.name, "--device", str(place.device), *["--dry"] * place.dry]
        processes = [
            subprocess.Popen([*command, "--rank", str(i)], env=environment)
            for i in range(way.ranks)
        ]
        end = time.monotonic() + seconds
        try:
            for process in processes:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        files = [Path(folder) / f"rank-{i}.json" for i in range(way.ranks)]
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    ended = f"not done: exit codes {codes}; None is a rank that was killed after {seconds:.0f} s"
    return {
        case: next((one.get(case, ended) for one in found if one.get(case, ended)), "")
        for case in expected
    }


def check(error: str) -> None:
    """Raise a check's error, if there is one."""
    assert not error, error


def run(report: Report, place: Place) -> None:
    """Check every case in every way that this machine can do."""
    for way in ways(place.device):
        with report.attempt(f"hook on several ranks: {way.name}"):
            seconds = min(report.seconds_left, 120.0)
            for case, error in outcomes(way, place, seconds).items():
                report.check(f"gradients are those of DDP on {way.name}: {case}", check, error)


def main() -> int:
    """Run one rank, or all cases; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ranks_on_one_gpu")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dry", action="store_true", help="small shapes and few repeats")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.rank is not None:
        way = next(way for way in ways(device) if way.name == options.way)
        rank(way, options.rank, options.folder, device, options.dry)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        file.write_text('{"parts": {}}')
        report = Report(file, "ranks", TITLE, 600)
        run(report, Place(device, dry=options.dry))
        report.finish("ok")
    return int(report.content["state"] == "failed")


if __name__ == "__main__":
    sys.exit(main())
