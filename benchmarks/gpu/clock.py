"""Time by CUDA events, interleaved; by the processor's clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
Run = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sleep(seconds: float, device: torch.device) -> None:
    """Have the current stream of a GPU wait, without the host waiting."""
    torch.cuda._sleep(round(seconds * _cycles_per_second(device)))


@cache
def _cycles_per_second(device: torch.device) -> float:
    cycles = 50_000_000
    torch.cuda._sleep(10 * cycles)  # an idle GPU takes that long to raise its clock
    start, end = _events()
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (1e-3 * start.elapsed_time(end))


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def seconds(run: Run, device: torch.device, steps: int = 1) -> float:
    """Of one of ``steps`` runs, one after the other, as they take host and device together."""
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
    """Of one run: how long the host is busy with it, and how long the device.

    The device first sleeps ``ahead_seconds``, or longer, until the host has handed over what it
    can: about a thousand kernels, so that for more of them the device's time has gaps in it.
    """
    if device.type != "cuda":
        took = seconds(run, device)
        return took, took
    for _ in range(4):
        synchronize(device)
        start, end = _events()
        sleep(ahead_seconds, device)
        start.record()
        began = time.perf_counter()
        run()
        host = time.perf_counter() - began
        was_ahead = not start.query()
        end.record()
        end.synchronize()
        if was_ahead:
            break
        ahead_seconds *= 3
    return host, 1e-3 * start.elapsed_time(end)


def steps_for(run: Run, device: torch.device, wanted_seconds: float, most: int = 50) -> int:
    """How many runs take about ``wanted_seconds``."""
    return max(1, min(most, round(wanted_seconds / max(seconds(run, device), 1e-6))))


def interleaved(
    runs: dict[str, Callable[[], T]], repeats: int, has_time: Callable[[], bool]
) -> dict[str, list[T]]:
    """Measure each in turn, ``repeats`` times, or as often as there is time; once at least."""
    times: dict[str, list[T]] = {name: [] for name in runs}
    for repeat in range(repeats):
        if repeat and not has_time():
            break
        for name, measure in runs.items():
            times[name].append(measure())
    return times


def spread(values: list[float], scale: float = 1.0, unit: str = "ms") -> dict[str, float]:
    """Median, least and most, as columns of a row."""
    return {
        f"median_{unit}": scale * statistics.median(values),
        f"least_{unit}": scale * min(values),
        f"most_{unit}": scale * max(values),
    }
