"""The all-reduce hook on NCCL with one rank: its overlap with backward.

A slow collective stands in for the network: it occupies its stream for a given time and then
doubles its input, so that gradients read too early are detected. On a CPU, gloo replaces NCCL.
ranks_on_one_gpu.py checks the gradients of every algorithm.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import clock
from benchmarks.gpu.kernels import events_of, kernels_of
from benchmarks.gpu.place import Place, need_cuda
from benchmarks.gpu.report import Report, Skipped
from largebatch.comm import ALGORITHMS, Plan, Topology, Traffic, register

TITLE = "All-reduce hook"

WAITS = "gradients are not read before slow collectives are done"

SLOW = "slow"
_LAYERS = 8


class SlowAllReduce:
    """An all-reduce that takes ``seconds`` and doubles its input."""

    name = SLOW

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def check(self, topology: Topology) -> None:
        """Accept every topology."""

    def all_reduce(self, tensor: Tensor, topology: Topology) -> None:
        if tensor.is_cuda:
            clock.sleep(self._seconds, tensor.device)
        else:
            time.sleep(self._seconds)
        dist.all_reduce(tensor)
        tensor.mul_(2)

    def traffic(self, size_bytes: int, topology: Topology) -> Traffic:
        return Traffic(0, 0.0, 1, float(size_bytes))


@contextmanager
def slow_all_reduce(seconds: float) -> Iterator[None]:
    """Register :class:`SlowAllReduce` as an algorithm inside the ``with`` block."""
    ALGORITHMS[SLOW] = SlowAllReduce(seconds)
    try:
        yield
    finally:
        del ALGORITHMS[SLOW]


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Create a process group of this process alone, inside the ``with`` block.

    Raises:
        Skipped: torch was built without the back end.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    # Plans that make groups beside the default one need it.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if not dist.is_backend_available(backend):
        raise Skipped(f"needs {backend}")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def network(width: int, device: torch.device) -> nn.Module:
    """Return a network with the same weights each time."""
    torch.manual_seed(0)
    layers = [module for _ in range(_LAYERS) for module in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).to(device)


def waits_for_slow_collectives(device: torch.device) -> None:
    """Check that code after backward reads the doubled gradients, not those from before."""
    with slow_all_reduce(0.02), one_rank(device):
        plain = network(256, device)
        hooked = DistributedDataParallel(network(256, device), bucket_cap_mb=0.5)
        register(hooked, Plan.single(SLOW), Topology.from_environment())
        for _ in range(3):
            x = torch.randn(32, 256, device=device)
            read = []
            for model in (plain, hooked):
                model.zero_grad()
                model(x).square().mean().backward()
                read.append([p.grad * 1 for p in model.parameters() if p.grad is not None])
            for a, b in zip(*read, strict=True):
                torch.testing.assert_close(2 * a, b, rtol=1e-5, atol=1e-7)


def run(report: Report, place: Place) -> None:
    """Check the gradients, then measure the overlap."""
    report.check(WAITS, waits_for_slow_collectives, place.device)
    if report.has_time("overlap"):
        overlap(report, place)


def overlap(report: Report, place: Place) -> None:
    """Measure the part of the slow collectives that backward hides, by the clock and by a trace."""
    device = place.device
    width, batch = (64, 256) if place.dry else (4096, 4096)
    x = torch.randn(batch, width, device=device)
    bucket_mb = 4 * width * width / 2**20  # one layer per bucket
    with one_rank(device):
        step = backward(network(width, device), x)
        for _ in range(3):
            step()
        alone = statistics.median(clock.seconds(step, device) for _ in range(5))
        each = max(0.5 * alone / _LAYERS, 1e-3)
        with slow_all_reduce(each):
            model = DistributedDataParallel(network(width, device), bucket_cap_mb=bucket_mb)
            calls = counted(ALGORITHMS[SLOW])
            register(model, Plan.single(SLOW), Topology.from_environment())
            step = backward(model, x)
            for _ in range(3):
                step()
            calls.clear()
            times = [clock.seconds(step, device) for _ in range(5)]
            buckets = len(calls) // 5
            both = statistics.median(times)
            collective = buckets * each
            report.row(
                "backward and slow collectives, one after the other or at once",
                forward_and_backward_ms=1e3 * alone,
                collectives=buckets,
                collectives_ms=1e3 * collective,
                both_ms=1e3 * both,
                hidden_percent=100 * (alone + collective - both) / collective,
            )
            report.check("a trace shows them at once", traced, report, step, device)


def backward(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def counted(algorithm: Any) -> list[int]:
    """Return a list that records the number of elements of each later call of an algorithm."""
    calls: list[int] = []
    original = algorithm.all_reduce

    def all_reduce(tensor: Tensor, topology: Topology) -> None:
        calls.append(tensor.numel())
        original(tensor, topology)

    algorithm.all_reduce = all_reduce
    return calls


def traced(report: Report, step: Callable[[], None], device: torch.device) -> None:
    """Check, in a profiler's trace of a step, that other streams compute during slow kernels."""
    need_cuda(device)
    clock.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        clock.synchronize(device)
    kernels = kernels_of(events_of(profiler))
    if not kernels:
        raise Skipped("the profiler sees no kernels here")
    slow, covered = covered_microseconds(kernels)
    report.row(
        "a profiler's trace of one step",
        slow_kernels_ms=1e-3 * slow,
        others_compute_meanwhile_ms=1e-3 * covered,
        share_percent=100 * covered / slow if slow else 0.0,
    )
    assert slow > 0, "the trace has no slow kernel"
    assert covered > 0.2 * slow, f"backward computes in {covered:.0f} of {slow:.0f} us"


def covered_microseconds(kernels: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the duration of the ``torch.cuda._sleep`` kernels, and how much other streams cover.

    Both are in microseconds; concurrent kernels of other streams are counted once.
    """
    slow = [event for event in kernels if "spin_kernel" in event["name"]]
    streams = {event["args"]["stream"] for event in slow}
    others = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in kernels
        if event["args"]["stream"] not in streams
    )
    covered = 0.0
    for event in slow:
        reached, end = event["ts"], event["ts"] + event["dur"]
        for began, ended in others:
            covered += max(0.0, min(ended, end) - max(began, reached))
            reached = max(reached, min(ended, end))
    return sum(event["dur"] for event in slow), covered
