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

#: The longest sleep of the device while the host gets ahead of it.
MOST_AHEAD_SECONDS = 0.2


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


def host_and_device_seconds(
    run: Run, device: torch.device, ahead_seconds: float
) -> tuple[float, float]:
    """Return the time that the host and the device each spend on one run.

    The device first sleeps for at least ``ahead_seconds``, while the host enqueues the run, and
    longer if the host was not ahead, up to :data:`MOST_AHEAD_SECONDS`. The queue holds about a
    thousand kernels: the host of a longer run waits until the sleep ends, and the device time then
    includes gaps.
    """
    if device.type != "cuda":
        took = seconds(run, device)
        return took, took
    hosts = []
    ahead_seconds = min(ahead_seconds, MOST_AHEAD_SECONDS)
    while True:
        synchronize(device)
        start, end = _events()
        sleep(ahead_seconds, device)
        start.record()
        began = time.perf_counter()
        run()
        hosts.append(time.perf_counter() - began)
        was_ahead = not start.query()
        end.record()
        end.synchronize()
        if was_ahead or ahead_seconds >= MOST_AHEAD_SECONDS:
            return min(hosts), 1e-3 * start.elapsed_time(end)
        ahead_seconds = min(3 * ahead_seconds, MOST_AHEAD_SECONDS)


def steps_for(run: Run, device: torch.device, wanted_seconds: float, most: int = 50) -> int:
    """Return the number of runs that take about ``wanted_seconds``, at most ``most``."""
    return max(1, min(most, round(wanted_seconds / max(seconds(run, device), 1e-6))))


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


def spread(values: list[float], scale: float = 1.0, unit: str = "ms") -> dict[str, float]:
    """Return the median, minimum and maximum, as columns of a table row."""
    return {
        f"median_{unit}": scale * statistics.median(values),
        f"least_{unit}": scale * min(values),
        f"most_{unit}": scale * max(values),
    }
