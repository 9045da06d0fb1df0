"""Shares of a training step: LARS, schedule and meters beside forward and backward; peak memory.

The share of a part is its device time between CUDA events, in the trainer's own steps.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.loops import RIVAL_DTYPE, Load, ours
from benchmarks.gpu.place import TRAINER, Place, need, need_cuda
from benchmarks.gpu.report import Report
from benchmarks.gpu.training import warmed
from largebatch.amp import PRECISIONS

TITLE = "ResNet-50: what a step is made of, and memory"

_BATCH, _REPEATS = 256, 20


class Marks:
    """Device and host time of calls of chosen methods."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, Any, Any, float]] = []

    def around(self, owner: Any, method: str, name: str) -> None:
        """Measure calls of ``owner.method`` under ``name``."""
        call: Callable[..., Any] = getattr(owner, method)

        def marked(*arguments: Any, **options: Any) -> Any:
            start, began = self._now(), time.perf_counter()
            result = call(*arguments, **options)
            self._spans.append((name, start, self._now(), time.perf_counter() - began))
            return result

        setattr(owner, method, marked)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> dict[str, tuple[float, float]]:
        """Return the seconds on the device and on the host since the last read, by name."""
        clock.synchronize(self._device)
        totals: dict[str, tuple[float, float]] = {}
        for name, start, end, host in self._spans:
            on_gpu = self._device.type == "cuda"
            device = 1e-3 * start.elapsed_time(end) if on_gpu else end - start
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + device, before[1] + host)
        self._spans.clear()
        return totals


def run(report: Report, place: Place) -> None:
    """Measure the shares for the precisions in ``RIVAL_DTYPE``, then the memory of all."""
    need(*TRAINER)
    batch = 4 if place.dry else _BATCH
    for precision in RIVAL_DTYPE:
        what = f"shares of a step, {precision}"
        if report.has_time(what):
            with report.attempt(what):
                shares(report, place, Load(precision, batch))
            _clean(place)
    with report.attempt("peak memory"):
        need_cuda(place.device)
        report.note("memory: with the four batches of FP32 images that are trained on in turn")
        for precision in PRECISIONS:
            what = f"peak memory, {precision}"
            if report.has_time(what):
                with report.attempt(what):
                    memory(report, place, Load(precision, batch))
                _clean(place)


def shares(report: Report, place: Place, load: Load) -> None:
    """Report medians over steps; the device sleeps before each, so that the host runs ahead."""
    loop = warmed(ours(load, place), place)
    marks = Marks(place.device)
    marks.around(loop.trainer, "_update", "step")
    marks.around(loop.trainer.precision, "step", "LARS and loss scale")
    marks.around(loop.trainer.scheduler, "step", "schedule")
    marks.around(loop.meter, "add", "meters")
    steps = []
    for _ in range(2 if place.dry else _REPEATS):
        if place.on_gpu:
            clock.sleep(0.05, place.device)
        loop.step()
        steps.append(marks.read())
    whole = statistics.median(step["step"][0] for step in steps)
    added = 0.0
    for name in ("LARS and loss scale", "schedule", "meters", "step"):
        device = statistics.median(step[name][0] for step in steps)
        added += device if name != "step" else 0.0
        report.row(
            f"shares of a step, batch {load.batch}",
            precision=load.precision,
            part=name if name != "step" else "whole step",
            device_ms=1e3 * device,
            host_ms=1e3 * statistics.median(step[name][1] for step in steps),
            share_percent=100 * device / whole,
        )
    share = 100 * added / whole
    report.note(f"{load.precision}: LARS, schedule and meters are {share:.2f} % of a step")


def memory(report: Report, place: Place, load: Load) -> None:
    """Report the peak allocation within a step and the allocation between steps."""
    torch.cuda.reset_peak_memory_stats(place.device)
    loop = ours(load, place)
    for _ in range(3):
        loop.step()
    clock.synchronize(place.device)
    report.row(
        f"memory, batch {load.batch}",
        precision=load.precision,
        peak_GiB=torch.cuda.max_memory_allocated(place.device) / 2**30,
        between_steps_GiB=torch.cuda.memory_allocated(place.device) / 2**30,
    )


def _clean(place: Place) -> None:
    gc.collect()
    if place.on_gpu:
        torch.cuda.empty_cache()
