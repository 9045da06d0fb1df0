"""Time of a LARS step on the shapes of ResNet-50 and AlexNet-BN, against its byte floor and others.

Goals: at most 1.3 times the time of its memory traffic at the bandwidth of a copy, and at least 10
times as fast as timm's Lars.

A LARS step reads or writes 7 FP32 values per parameter (weight and gradient for the norms; weight,
gradient and momentum read, weight and momentum written), SGD 5. With FP32 masters of FP16
parameters it moves 26 bytes per parameter: 6 for the norms, 10 read, 10 written. The ratio of the
momentum reads the momentum for the norms too: 8 FP32 values.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.gpu import clock
from benchmarks.gpu.capture import captured
from benchmarks.gpu.place import Place, need, need_cuda
from benchmarks.gpu.report import Report
from benchmarks.lars.shapes import ALEXNET_BN, RESNET_50, Shape
from largebatch.lars import LARS

TITLE = "LARS: time of a step"

OURS, TIMM = "largebatch LARS", "timm Lars"
_SHARED = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
_LARS_BYTES, _SGD_BYTES, _MASTERS_BYTES, _MOVE_BYTES = 28, 20, 26, 32


#: Seconds of one step on the host, of one step on the device, and per step of several in a row.
Times = tuple[float, float, float]


@dataclass(frozen=True)
class Contender:
    """An optimizer with its own tensors.

    Attributes:
        step: takes one step.
        bytes_per_parameter: the least memory traffic of a step.
    """

    step: Callable[[], object]
    bytes_per_parameter: int


def _parameters(shapes: list[Shape], place: Place, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return random parameters with gradients."""
    generator = torch.Generator(place.device).manual_seed(0)

    def normal(shape: Shape, scale: float) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=place.device)).to(dtype)

    parameters = [nn.Parameter(normal(shape, 0.05)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = normal(tuple(parameter.shape), 1e-3)
    return parameters


def _lars(parameters: list[nn.Parameter], implementation: str = "auto", **more: Any) -> LARS:
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "adapt": False}]
    return LARS(groups, implementation=implementation, **_SHARED, **more)


def contenders(shapes: list[Shape], place: Place, report: Report) -> dict[str, Contender]:
    """Return the contenders that can run here; the report notes the others as skipped."""

    def eager(
        make: Callable[[list[nn.Parameter]], Optimizer], dtype: torch.dtype = torch.float32
    ) -> Callable[[], object]:
        return make(_parameters(shapes, place, dtype)).step

    def timm_lars() -> Callable[[], object]:
        need("timm")
        from timm.optim import Lars

        # All tensors decay here, and timm's Lars adapts those that decay.
        return eager(lambda p: Lars(p, **_SHARED))

    def graph() -> Callable[[], object]:
        need_cuda(place.device)
        return captured(eager(_lars), place.device)

    def masters() -> Callable[[], object]:
        return eager(partial(_lars, master_weights=True), torch.float16)

    makers: dict[str, tuple[Callable[[], Callable[[], object]], int]] = {
        OURS: (lambda: eager(_lars), _LARS_BYTES),
        f"{OURS}, in a CUDA graph": (graph, _LARS_BYTES),
        f"{OURS}, foreach": (lambda: eager(partial(_lars, implementation="foreach")), _LARS_BYTES),
        f"{OURS}, FP16 with masters": (masters, _MASTERS_BYTES),
        f"{OURS}, norm of the sum": (
            lambda: eager(partial(_lars, denominator="norm-of-sum")),
            _LARS_BYTES,
        ),
        f"{OURS}, ratio of the momentum": (
            lambda: eager(partial(_lars, dialect="simclr-popular")),
            _MOVE_BYTES,
        ),
        TIMM: (timm_lars, _LARS_BYTES),
        "torch SGD, fused": (lambda: eager(lambda p: SGD(p, fused=True, **_SHARED)), _SGD_BYTES),
        "torch SGD, foreach": (
            lambda: eager(lambda p: SGD(p, foreach=True, **_SHARED)),
            _SGD_BYTES,
        ),
    }
    found = {}
    for name, (make, size) in makers.items():
        with report.attempt(name):
            found[name] = Contender(make(), size)
    return found


def copy_bandwidth(place: Place, repeats: int) -> float:
    """Return the median bandwidth of a copy on the device, bytes read plus written per second."""
    elements = 2**20 if place.dry else 2**28  # 1 GiB, well past any cache
    source = torch.ones(elements, device=place.device)
    target = torch.empty_like(source)
    step = partial(target.copy_, source)
    clock.seconds(step, place.device, 3)
    times = [clock.seconds(step, place.device, 5) for _ in range(repeats)]
    return 2 * source.nbytes / statistics.median(times)


def run(report: Report, place: Place) -> None:
    """Measure all contenders on the shapes of both models."""
    repeats = 2 if place.dry else 25
    bandwidth = copy_bandwidth(place, repeats)
    report.row("copy on the device", gigabytes_per_second=bandwidth / 1e9, repeats=repeats)
    for title, shapes in (("ResNet-50", RESNET_50), ("AlexNet-BN", ALEXNET_BN)):
        if place.dry:
            shapes = [shape for shape in shapes if torch.Size(shape).numel() < 50_000][:9]
        if report.has_time(title):
            measure(report, place, title, shapes, bandwidth, repeats)


def measure(
    report: Report, place: Place, title: str, shapes: list[Shape], bandwidth: float, repeats: int
) -> None:
    """Measure device, host and back-to-back time of each contender, interleaved."""
    device = place.device
    entrants = contenders(shapes, place, report)
    measures = {}
    for name, entrant in entrants.items():
        with report.attempt(f"{title}: {name}"):
            measures[name] = measure_of(entrant.step, device)
    times = clock.interleaved(measures, repeats, lambda: report.seconds_left > 0)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    alone = {name: [d for _, d, _ in values] for name, values in times.items()}
    in_a_row = {name: statistics.median(s for _, _, s in values) for name, values in times.items()}
    if OURS not in times:
        return  # the report already says why
    against_floor = {}
    for name, values in times.items():
        floor = entrants[name].bytes_per_parameter * count / bandwidth
        against_floor[name] = statistics.median(alone[name]) / floor
        report.row(
            f"{title}, {count:,} parameters in {len(shapes)} tensors",
            optimizer=name,
            **{f"device_{k}": v for k, v in clock.spread(alone[name], 1e3).items()},
            device_against_byte_floor=against_floor[name],
            host_median_ms=1e3 * statistics.median(h for h, _, _ in values),
            in_a_row_median_ms=1e3 * in_a_row[name],
            in_a_row_against_ours=in_a_row[name] / in_a_row[OURS],
            repeats=len(values),
        )
    if place.dry:
        return
    report.goal(f"{title}: LARS on the device / byte floor", against_floor[OURS], most=1.3)
    if TIMM in in_a_row:
        ratio = in_a_row[TIMM] / in_a_row[OURS]
        report.goal(f"{title}: timm's Lars / ours, steps in a row", ratio, least=10)


def measure_of(step: Callable[[], object], device: torch.device) -> Callable[[], Times]:
    """Warm ``step`` up, which compiles it and creates its state, and return what measures it."""
    for _ in range(3):
        step()
    host, _ = clock.host_and_device_seconds(step, device, 0.02)
    steps = clock.steps_for(step, device, 0.02)

    def times() -> Times:
        alone = clock.host_and_device_seconds(step, device, 3 * host + 0.005)
        return *alone, clock.seconds(step, device, steps)

    return times
