"""Checks of GradientNoise in each precision, and the time that a measured step takes longer.

Goal: below 5 % of a training step of ResNet-50 in BF16, of two micro-batches of 128 images, which
is 0.5 % if every tenth step is measured.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import clock
from benchmarks.gpu.lars_step import measure_of
from benchmarks.gpu.place import Place, need, need_cuda
from benchmarks.gpu.report import Case, Report
from benchmarks.gpu.waiting import does_not_wait
from largebatch.amp import PRECISIONS, Precision
from largebatch.lars import LARS, GradientNoise, NoiseScale

TITLE = "Gradient noise: checks and time of a measured step"

GOAL, PASSES = 0.05, 2
PLAIN, MEASURED = "not measured", "measured"


def cases() -> Iterator[Case]:
    """Yield the checks."""
    for name in PRECISIONS:
        yield Case(f"the noise scale is that of FP64: {name}", partial(is_that_of_fp64, name))
    for name in ("bf16", "fp16", "fp16-master"):
        yield Case(f"a measured step does not wait: {name}", partial(does_not_wait_in, name))


class _Loop:
    """Steps on random images, of two backward passes each, with weights that do not move."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.precision = Precision(name, device.type)
        self.model = self.precision.convert(_network().to(device))
        self.optimizer = LARS(self.model.parameters(), lr=0.0, master_weights=True)
        self.noise = GradientNoise(self.model.parameters(), 16)
        self._batches = [(images.to(device), labels.to(device)) for images, labels in _batches()]

    def step(self, number: int = 0) -> None:
        """Take a step on two of the batches."""
        for images, labels in self._batches[2 * number :][:PASSES]:
            with self.precision.forward():
                loss = F.cross_entropy(self.model(images), labels)
            self.precision.backward(loss / PASSES)
        self.noise.step(self.precision.loss_scale_on_device)
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad()


def _network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
    )
    with torch.no_grad():
        model[-1].bias[0] = 2  # which most labels are not, so that there is much to learn
    return model


def _batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(16, 3, 8, 8, generator=generator),
            torch.randint(10, (16,), generator=generator),
        )
        for _ in range(8)
    ]


def _exact() -> NoiseScale:
    """Return the estimate over the four steps, in float64 on the CPU."""
    model, batches = copy.deepcopy(_network()).double(), _batches()
    noise = GradientNoise(model.parameters(), 16)
    for number in range(4):
        for images, labels in batches[2 * number :][:PASSES]:
            (F.cross_entropy(model(images.double()), labels) / PASSES).backward()
        noise.step()
        model.zero_grad()
    return noise.estimate()


@contextmanager
def _full_fp32() -> Iterator[None]:
    """Convolve FP32 values with all of their bits, not the 10 of TF32 that cuDNN has by default."""
    cudnn = torch.backends.cudnn
    before, cudnn.allow_tf32 = cudnn.allow_tf32, False
    try:
        yield
    finally:
        cudnn.allow_tf32 = before


@_full_fp32()
def is_that_of_fp64(name: str, device: torch.device) -> None:
    """Check the estimate of four steps, and with a loss scale that an overflow is left out."""
    loop, expected = _Loop(name, device), _exact()
    for _ in range(10):  # until the scale has fallen to where nothing overflows
        loop.noise.watch(False)
        loop.noise = GradientNoise(loop.model.parameters(), 16)
        for number in range(4):
            loop.step(number)
        found = loop.noise.estimate()
        if found.left_out == 0:
            break
    assert (found.steps, found.left_out) == (4, 0), found
    for field in ("noise_scale", "gradient_norm2", "trace"):
        ratio = getattr(found, field) / getattr(expected, field)
        assert abs(ratio - 1) < (0.001 if name == "fp32" else 0.05), (field, ratio)
    if loop.precision.scales:
        scale = loop.precision.loss_scale_on_device
        assert isinstance(scale, Tensor)
        scale.fill_(2.0**60)
        loop.step()
        found = loop.noise.estimate()
        assert (found.steps, found.left_out) == (4, 1), found


def does_not_wait_in(name: str, device: torch.device) -> None:
    """Check that the host runs ahead of the device in a measured step."""
    need_cuda(device)
    loop = _Loop(name, device)
    for _ in range(3):
        loop.step()
    does_not_wait(loop.step, device)


def run(report: Report, place: Place) -> None:
    """Check, then measure."""
    for case in cases():
        if report.has_time(case.name, case.seconds):
            report.check(case.name, case.run, place.device)
    if report.has_time("steps"):
        with report.attempt("steps"):
            need("timm")
            measure(report, place)


def measure(report: Report, place: Place) -> None:
    """Measure steps of ResNet-50 with hooks and without, in turns."""
    medians = {}
    runs = {name: measure_of(_training(name, place), place.device) for name in (PLAIN, MEASURED)}
    times = clock.interleaved(runs, 2 if place.dry else 15, lambda: report.seconds_left > 0)
    for name, values in times.items():
        in_a_row = [seconds for _, _, seconds in values]
        medians[name] = statistics.median(in_a_row)
        report.row(
            "steps of ResNet-50 in BF16, two micro-batches",
            step=name,
            **{f"in_a_row_{k}": v for k, v in clock.spread(in_a_row, 1e3).items()},
            device_median_ms=1e3 * statistics.median(d for _, d, _ in values),
            host_median_ms=1e3 * statistics.median(h for h, _, _ in values),
            repeats=len(values),
        )
    if not place.dry:
        share = medians[MEASURED] / medians[PLAIN] - 1
        report.goal("ResNet-50: measuring the gradient noise / training step", share, most=GOAL)


def _training(name: str, place: Place) -> Callable[[], object]:
    """Return a training step of a model of its own."""
    import timm

    precision = Precision("bf16", place.device.type)
    network = "test_resnet" if place.dry else "resnet50"
    model = timm.create_model(network).to(place.device, memory_format=torch.channels_last)
    optimizer = LARS(model.parameters(), lr=0.1)
    count, size = (2, 32) if place.dry else (128, 224)
    images = torch.randn(count, 3, size, size, device=place.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (count,), device=place.device)
    noise = GradientNoise(model.parameters(), count)
    noise.watch(name == MEASURED)

    def step() -> None:
        for _ in range(PASSES):
            with precision.forward():
                loss = F.cross_entropy(model(images), labels)
            precision.backward(loss / PASSES)
        noise.step()
        precision.step(optimizer)
        optimizer.zero_grad()

    return step
