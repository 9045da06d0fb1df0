"""Check the hook on collectives that are really called, with several ranks on one GPU.

The ways to do it (ways.py) are each in processes of their own.

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
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.contender import end_with_parent
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Report, error_line
from benchmarks.gpu.ways import Way, cases, left_out, ways
from largebatch.comm import Grid, Groups, Plan, Rule, Topology, collectives, register

TITLE = "All-reduce hook on several ranks"

_TIMEOUT = timedelta(seconds=60)
_ROOT = Path(__file__).parents[2]

#: A way that has not ended after so many seconds hangs; it is not begun with less than the others.
LIMIT_SECONDS, LEAST_SECONDS = 120.0, 45.0


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
    """Make process groups of a single rank, for which Groups has None, inside the block."""
    world, first, second = (dist.new_group([0]) for _ in range(3))
    with (
        mock.patch.multiple(Groups, world=world, intra=first, inter=second),
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

    A case is absent if ``seconds`` was less than what it takes to call ranks hanging, and they had
    no time for it.

    Raises:
        Skipped: this machine cannot do it.
    """
    way.check()
    paths = [str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
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
    only_late = seconds < LIMIT_SECONDS and None in codes and {*codes} <= {0, None}
    errors = {}
    for case in expected:
        of_ranks = [one.get(case) for one in found]
        if None not in of_ranks or any(of_ranks) or not only_late:
            errors[case] = next((e for e in of_ranks if e), ended if None in of_ranks else "")
    return errors


def check(error: str) -> None:
    """Raise a check's error, if there is one."""
    assert not error, error


def run(report: Report, place: Place) -> None:
    """Check every case in every way that this machine can do and for which there is time."""
    for way in ways(place.device):
        title = f"gradients are those of DDP on {way.name}"
        for algorithm in left_out(way, place.device):
            report.skip(f"{title}: {algorithm}", "gloo sends no messages between CUDA tensors")
        if not report.has_time(title, LEAST_SECONDS):
            continue
        with report.attempt(title):
            seconds = min(LIMIT_SECONDS, report.seconds_left / 2)  # some is for other checks
            errors = outcomes(way, place, seconds)
            for case in cases(way, place.device, _bucket_bytes(place.dry)):
                if case in errors:
                    report.check(f"{title}: {case}", check, errors[case])
                else:
                    report.no_time(f"{title}: {case}", f"the ranks had {seconds:.0f} s")


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
        end_with_parent()
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
