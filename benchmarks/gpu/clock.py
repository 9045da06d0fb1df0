"""Time measurements: CUDA events on a GPU, the host's clock on a CPU; interleaved repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

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
    start, end = _events()
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (1e-3 * start.elapsed_time(end))


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def seconds(run: Run, device: torch.device, steps: int = 1) -> float:
    """Return the time per run of ``steps`` consecutive runs, of host and device together."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(steps):
            run()
        return (time.perf_counter() - began) / steps
    synchronize(device)
    start, end = _events()
    start.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / steps


def device_seconds(run: Run, device: torch.device) -> float:
    """Return the time of one run on the device, which sleeps while the host enqueues the run.

    A run of more than a thousand kernels, as many as the queue holds, includes gaps between them.
    """
    if device.type != "cuda":
        return seconds(run, device)
    synchronize(device)
    start, end = _events()
    sleep(_AHEAD_SECONDS, device)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


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


def spread(values: list[float], scale: float, unit: str) -> dict[str, float]:
    """Return the median, minimum and maximum, as columns of a table row."""
    return {
        f"median_{unit}": scale * statistics.median(values),
        f"least_{unit}": scale * min(values),
        f"most_{unit}": scale * max(values),
    }
