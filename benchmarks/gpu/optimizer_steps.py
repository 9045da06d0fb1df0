"""Time of LARS and Muon on the shapes of ResNet-50, against their floor, others and a step.

Goals: LARS takes at most 1.3 times the time of its memory traffic at the bandwidth of a copy, and
is at least 10 times as fast as timm's; the orthogonalisation in bfloat16 takes at most 5 % of a
training step of 256 images, which here is the plain PyTorch loop in BF16, eager.

A LARS step reads or writes 7 FP32 values per parameter (weight and gradient for the norms; weight,
gradient and momentum read, weight and momentum written), SGD 5. With FP32 masters of FP16
parameters it moves 26 bytes per parameter: 6 for the norms, 10 read, 10 written.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.gpu import clock
from benchmarks.gpu.contenders import BARE, EAGER, Contender
from benchmarks.gpu.loops import step_of
from benchmarks.gpu.optimizer_checks import lars_agrees
from benchmarks.gpu.place import Place, need
from benchmarks.gpu.report import Report
from benchmarks.lars.shapes import RESNET_50, Shape
from largebatch.lars import LARS, Muon, newton_schulz

TITLE = "Optimizers: time of a step"

OURS, TIMM = "LARS", "timm's Lars"
ORTHOGONAL, TRAINING = "Newton-Schulz, bf16", "training step, 256 images"
_RESTS_ON = {
    OURS: (lars_agrees("mlperf", "fp32"), lars_agrees("mlperf", "fp16 with masters")),
    ORTHOGONAL: ("Newton-Schulz is the polynomial: bfloat16",),
}

Step = Callable[[], object]


def run(report: Report, place: Place) -> None:
    """Measure steps of LARS on all parameters, and of Muon on the hidden layers."""
    device, shapes = place.device, RESNET_50
    if place.dry:
        shapes = [shape for shape in shapes if torch.Size(shape).numel() < 40_000][:9]
    hidden = [shape for shape in shapes if len(shape) == 4][1:]
    matrices = Counter(tuple(sorted((s[0], torch.Size(s[1:]).numel()))) for s in hidden)
    shared = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}

    def timms() -> Step:
        need("timm")
        from timm.optim import Lars

        # All tensors decay here, and timm's Lars adapts those that decay.
        return Lars(_parameters(shapes, device), **shared).step  # type: ignore[no-any-return]

    def masters() -> Step:
        half = _parameters(shapes, device, torch.float16)
        return LARS(_groups(half), master_weights=True, **shared).step

    def orthogonal() -> Step:
        inputs = [torch.randn(n, *matrix, device=device) for matrix, n in matrices.items()]
        return lambda: [newton_schulz(x, dtype=torch.bfloat16) for x in inputs]

    def training() -> Step:
        need("timm")
        return step_of(Contender(BARE, EAGER), place)

    #: What makes a step, and the bytes that it moves for each parameter.
    makers: dict[str, tuple[Callable[[], Step], int]] = {
        OURS: (lambda: LARS(_groups(_parameters(shapes, device)), **shared).step, 28),
        f"{OURS}, FP16 with masters": (masters, 26),
        TIMM: (timms, 28),
        "torch's SGD, fused": (
            lambda: SGD(_parameters(shapes, device), fused=True, **shared).step,
            20,
        ),
        ORTHOGONAL: (orthogonal, 0),
        "Muon, hidden layers": (lambda: Muon(_parameters(hidden, device), lr=1e-4).step, 0),
        TRAINING: (training, 0),
    }
    measures = {}
    for name, (make, _) in makers.items():
        with report.attempt(name):
            measures[name] = _times_of(make(), device)
    times = clock.interleaved(measures, 2 if place.dry else 15, lambda: report.seconds_left > 0)
    bandwidth = copy_bandwidth(place)
    report.row("copy on the device", GB_per_second=bandwidth / 1e9)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    alone, in_a_row, over_floor = dict[str, float](), dict[str, float](), dict[str, float]()
    for name, of_name in times.items():
        of_device, of_row = zip(*of_name, strict=True)
        alone[name], in_a_row[name] = statistics.median(of_device), statistics.median(of_row)
        floor = makers[name][1] * count / bandwidth
        columns = {"over_floor": over_floor.setdefault(name, alone[name] / floor)} if floor else {}
        report.row(
            f"ResNet-50, {count:,} parameters in {len(shapes)} tensors",
            rests_on=_RESTS_ON.get(name.partition(", FP16")[0], ()),
            step=name,
            **clock.spread([*of_device], "_device_ms", 1e3),
            **columns,
            in_a_row_ms=1e3 * in_a_row[name],
        )
    if place.dry:
        return
    if OURS in over_floor:
        report.goal("ResNet-50: LARS on the device / byte floor", over_floor[OURS], most=1.3)
    if {OURS, TIMM} <= in_a_row.keys():
        ratio = in_a_row[TIMM] / in_a_row[OURS]
        report.goal("ResNet-50: timm's Lars / ours, steps in a row", ratio, least=10)
    if {ORTHOGONAL, TRAINING} <= alone.keys():
        share = alone[ORTHOGONAL] / in_a_row[TRAINING]
        report.goal("Newton-Schulz in bf16 / training step, 256 images", share, most=0.05)


def _parameters(
    shapes: list[Shape], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Return random parameters with gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(shape: Shape, scale: float) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

    parameters = [nn.Parameter(normal(shape, 0.05)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = normal(tuple(parameter.shape), 1e-3)
    return parameters


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    vectors = [p for p in parameters if p.ndim <= 1]
    matrices = [p for p in parameters if p.ndim > 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "adapt": False}]


def copy_bandwidth(place: Place) -> float:
    """Return the median bandwidth of a copy on the device, bytes read plus written per second."""
    elements = 2**20 if place.dry else 2**28  # 1 GiB, well past any cache
    source = torch.ones(elements, device=place.device)
    target = torch.empty_like(source)
    step = partial(target.copy_, source)
    clock.seconds(step, place.device, 3)
    times = [clock.seconds(step, place.device, 5) for _ in range(2 if place.dry else 15)]
    return 2 * source.nbytes / statistics.median(times)


def _times_of(step: Step, device: torch.device) -> Callable[[], tuple[float, float]]:
    """Warm a step up, and return what measures its seconds on the device, and in a row."""
    for _ in range(3):
        step()
    steps = max(1, min(50, round(0.02 / max(clock.seconds(step, device), 1e-6))))
    return lambda: (clock.device_seconds(step, device), clock.seconds(step, device, steps))
