"""Time measurements: CUDA events on a GPU, the host's clock on a CPU; interleaved repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Run = Callable[[], object]

#: How long the device sleeps while the host gets ahead of it.
_AHEAD_SECONDS = 0.05


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sleep(seconds: float, device: torch.device) -> None:
    """Make the current stream of a GPU wait, without blocking the host."""
    torch.cuda._sleep(round(seconds * _cycles_per_second(device)))


@cache
def _cycles_per_second(device: torch.device) -> float:
    cycles = 50_000_000
    torch.cuda._sleep(10 * cycles)  # the time that an idle GPU takes to raise its clock
    return cycles / _between_events(lambda: torch.cuda._sleep(cycles))


def _between_events(run: Run) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def seconds(run: Run, device: torch.device, steps: int = 1) -> float:
    """Return the time per run of ``steps`` consecutive runs, of host and device together."""

    def runs() -> None:
        for _ in range(steps):
            run()

    if device.type == "cuda":
        synchronize(device)
        return _between_events(runs) / steps
    began = time.perf_counter()
    runs()
    return (time.perf_counter() - began) / steps


def device_seconds(run: Run, device: torch.device) -> float:
    """Return the time of one run on the device, which sleeps while the host enqueues the run.

    A run of more than a thousand kernels, as many as the queue holds, includes gaps between them.
    """
    if device.type != "cuda":
        return seconds(run, device)
    synchronize(device)
    sleep(_AHEAD_SECONDS, device)
    return _between_events(run)


def interleaved(
    runs: dict[str, Callable[[], T]], repeats: int, has_time: Callable[[], bool]
) -> dict[str, list[T]]:
    """Measure each in turn, up to ``repeats`` times while there is time, but at least once."""
    times: dict[str, list[T]] = {name: [] for name in runs}
    for repeat in range(repeats):
        if repeat and not has_time():
            break
        for name, measure in runs.items():
            times[name].append(measure())
    return times


def spread(values: list[float], suffix: str = "", scale: float = 1.0) -> dict[str, Any]:
    """Return median, least and most as columns of a row."""
    found = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {key + suffix: scale * value for key, value in found.items()}
