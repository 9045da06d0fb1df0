"""Time of Newton-Schulz and of a Muon step on the hidden layers of ResNet-50, after checks of both.

Goal: the orthogonalisation in bfloat16 takes at most 5 % of the training step of ResNet-50 with 256
images, which here is the plain PyTorch loop in BF16, eager.

The floor of Newton-Schulz is the larger of its FLOPs at the rate of a large bfloat16 product and
its bytes at the bandwidth of a copy, both measured here, batch by batch.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.gpu import clock
from benchmarks.gpu.capture import captured
from benchmarks.gpu.contenders import BARE, CONTENDERS
from benchmarks.gpu.lars_step import copy_bandwidth, measure_of
from benchmarks.gpu.loops import step_of
from benchmarks.gpu.place import Place, need, need_cuda
from benchmarks.gpu.report import Case, Report
from benchmarks.gpu.waiting import does_not_wait
from benchmarks.lars.shapes import RESNET_50, Shape
from largebatch.lars import LARS, NS_COEFFICIENTS, Muon, newton_schulz
from largebatch.lars.muon import newton_schulz as module
from largebatch.lars.muon.cost import newton_schulz_cost
from largebatch.lars.muon.newton_schulz import polynomials
from largebatch.lars.muon.options import RULES

TITLE = "Muon: time of a step"

OURS, TRAINING = "ours, bf16", "training step, 256 images"
#: dtype of the arithmetic, and whether products in FP32 may round to TF32.
FORMS = {
    "bf16": (torch.bfloat16, False),
    "FP16": (torch.float16, False),
    "FP32": (torch.float32, False),
    "TF32": (torch.float32, True),
}
#: The largest error of a matrix with condition number 10, as in tests/lars/muon.
BOUNDS = {"bf16": 0.5, "FP16": 0.35, "FP32": 1e-4, "TF32": 0.35}
GOAL = 0.05


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Let products in FP32 round to TF32, or not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def orthogonalize(x: Tensor, form: str, **options: Any) -> Tensor:
    """Return what newton_schulz gives in a form of :data:`FORMS`."""
    dtype, rounds = FORMS[form]
    with tf32(rounds):
        return newton_schulz(x, dtype=dtype, **options)


def plain(x: Tensor, form: str) -> Tensor:
    """Return the same with every step on the matrix itself."""
    with patch.object(module, "runs", lambda steps, *shape: tuple((step,) for step in steps)):
        return orthogonalize(x, form)


def cases() -> Iterator[Case]:
    """Yield the checks: agreement with float64, no waiting, CUDA graphs."""
    for form in FORMS:
        for name in NS_COEFFICIENTS:
            check = partial(is_the_polynomial, form, name)
            yield Case(f"Newton-Schulz is the polynomial: {name}, {form}", check)
    yield Case("Muon does not wait", muon_does_not_wait)
    yield Case("a Muon step in a CUDA graph is the eager one", graph_is_eager)


def is_the_polynomial(form: str, name: str, device: torch.device) -> None:
    """Check wide, tall and square batches against the polynomial in float64."""
    torch.manual_seed(0)
    for rows, columns in ((64, 576), (256, 64), (128, 128)):
        k = min(rows, columns)
        u = torch.linalg.qr(torch.randn(3, rows, k, dtype=torch.float64)).Q
        v = torch.linalg.qr(torch.randn(3, columns, k, dtype=torch.float64)).Q
        s = torch.logspace(0, -1, k, dtype=torch.float64)
        x = ((u * s) @ v.mT).float().to(device)
        s = s / s.norm()
        for a, b, c in polynomials(name, 5):
            s = a * s + b * s**3 + c * s**5
        expected = (u * s) @ v.mT
        for scale in (1.0, 2.0**-100):
            found = orthogonalize(scale * x, form, coefficients=name).cpu().double()
            error = torch.linalg.matrix_norm(found - expected, 2).max().item()
            assert error < BOUNDS[form], (rows, columns, scale, error)


def muon_does_not_wait(device: torch.device) -> None:
    """Check that the host runs ahead of the device, with a loss scale and a tensor as rate."""
    need_cuda(device)
    rate = torch.full((), 0.1, device=device)
    optimizer = _of_all_rules(rate, device, norm_projection=True)
    for _ in range(3):
        optimizer.step()
    does_not_wait(optimizer.step, device)


def graph_is_eager(device: torch.device) -> None:
    """Check replays of captured steps against eager ones: gradients, rates and an overflow change.

    In FP32, because in half precision another choice of kernels would show.
    """
    need_cuda(device)
    rate = torch.full((), 0.1, device=device)
    optimizers = [_of_all_rules(rate, device, ns_dtype=torch.float32) for _ in range(2)]
    eager, replayed = ([p for g in o.param_groups for p in g["params"]] for o in optimizers)
    replay = captured(optimizers[1].step, device)  # takes four steps before it captures
    for _ in range(4):
        optimizers[0].step()
    for number in range(3):
        rate.mul_(0.5)
        for optimizer in optimizers:
            optimizer.found_inf.fill_(float(number == 1))  # type: ignore[attr-defined]
        for a, b in zip(eager, replayed, strict=True):
            a.grad.mul_(-1.5).add_(0.1 * number)  # type: ignore[union-attr]
            b.grad.copy_(a.grad)  # type: ignore[union-attr]
        optimizers[0].step()
        replay()
    for a, b in zip(eager, replayed, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)


def _of_all_rules(rate: Tensor, device: torch.device, **options: Any) -> Muon:
    """Return Muon with a loss scale, of hidden layers and of a group for each other rule."""
    groups: list[dict[str, Any]] = [
        {"params": _parameters([(16, 8, 3, 3), (16, 8, 3, 3), (8, 64)], device)}
    ]
    for rule in RULES:
        parameters = _parameters([(8,), (4, 5)], device)
        groups.append({"params": parameters, "orthogonal": False, "rule": rule})
    optimizer = Muon(groups, rate, **options)
    optimizer.grad_scale = torch.full((), 1024.0, device=device)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
    return optimizer


def _parameters(shapes: list[Shape], device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(shape: Shape) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    parameters = [nn.Parameter(0.05 * normal(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = normal(tuple(parameter.shape))
    return parameters


def run(report: Report, place: Place) -> None:
    """Check, then measure."""
    for case in cases():
        if report.has_time(case.name, case.seconds):
            report.check(case.name, case.run, place.device)
    shapes = [shape for shape in RESNET_50 if len(shape) == 4][1:]
    if place.dry:
        shapes = [shape for shape in shapes if torch.Size(shape).numel() < 40_000][:3]
    took: dict[str, float] = {}
    if report.has_time("Newton-Schulz"):
        took |= measure_newton_schulz(report, place, shapes)
    if report.has_time("steps"):
        with tf32(True):  # which the training step sets, and nothing puts back
            took |= measure_steps(report, place, shapes)
    if place.dry or not {OURS, TRAINING} <= took.keys():
        return
    share = took[OURS] / took[TRAINING]
    report.goal("ResNet-50: Newton-Schulz in bf16 / training step, 256 images", share, most=GOAL)


def measure_newton_schulz(report: Report, place: Place, shapes: list[Shape]) -> dict[str, float]:
    """Measure all hidden layers: forms, dtypes, in batches and one by one, against others."""
    matrices = [(shape[0], torch.Size(shape[1:]).numel()) for shape in shapes]
    batches = Counter(tuple(sorted(matrix)) for matrix in matrices)
    inputs = [torch.randn(n, *matrix, device=place.device) for matrix, n in batches.items()]
    single = [torch.randn(matrix, device=place.device) for matrix in matrices]

    def each(function: Callable[[Tensor], object], tensors: list[Tensor]) -> Callable[[], object]:
        return lambda: [function(x) for x in tensors]

    jordan = NS_COEFFICIENTS["original"][0]
    runs: dict[str, Callable[[], object]] = {}
    for form in FORMS:
        runs[f"ours, {form}"] = each(partial(orthogonalize, form=form), inputs)
        runs[f"ours, {form}, plain steps"] = each(partial(plain, form=form), inputs)
    runs["ours, bf16, one by one"] = each(partial(orthogonalize, form="bf16"), single)
    with report.attempt("ours, bf16, in a CUDA graph"):
        need_cuda(place.device)
        runs["ours, bf16, in a CUDA graph"] = captured(runs[OURS], place.device)
    with report.attempt("torch, bf16, one by one"):
        from torch.optim._muon import _zeropower_via_newtonschulz as theirs

        steps = partial(theirs, ns_coefficients=jordan, ns_steps=5, eps=1e-7)
        runs["torch, bf16, one by one"] = each(steps, single)
    with report.attempt("timm, bf16, one by one"):
        need("timm")
        from timm.optim.muon import zeropower_via_newtonschulz as timms

        runs["timm, bf16, one by one"] = each(
            partial(timms, steps=5, coefficients=[jordan]), single
        )
    floor = _floor_seconds(report, place, batches)
    table = f"Newton-Schulz, {len(shapes)} hidden layers of ResNet-50"
    medians = _measure(report, place, table, runs, OURS)
    if OURS in medians and not place.dry:
        report.note(f"{OURS} takes {medians[OURS] / floor:.2f} times its roofline here")
    return medians


def _floor_seconds(report: Report, place: Place, batches: Counter[tuple[int, ...]]) -> float:
    """Return the least time of our form in bfloat16 at the rates of this device."""
    size = 128 if place.dry else 8192
    x = torch.randn(size, size, device=place.device, dtype=torch.bfloat16)
    product = partial(torch.mm, x, x)
    clock.seconds(product, place.device, 3)
    rate = 2 * size**3 / clock.seconds(product, place.device, 5)
    bandwidth = copy_bandwidth(place, 3)
    report.row("rates", teraflops=rate / 1e12, gigabytes_per_second=bandwidth / 1e9)
    costs = [newton_schulz_cost(*matrix, matrices=n) for matrix, n in batches.items()]
    return sum(max(cost.flops / rate, cost.bytes_moved / bandwidth) for cost in costs)


def measure_steps(report: Report, place: Place, shapes: list[Shape]) -> dict[str, float]:
    """Measure optimizer steps of the hidden layers, and the training step beside them."""

    def stepper(make: Callable[[list[nn.Parameter]], Optimizer]) -> Callable[[], object]:
        return make(_parameters(shapes, place.device)).step

    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "Muon": lambda: stepper(lambda p: Muon(p, lr=1e-4)),
        "Muon, projected": lambda: stepper(lambda p: Muon(p, lr=1e-4, norm_projection=True)),
        "Muon, FP16": lambda: stepper(lambda p: Muon(p, lr=1e-4, ns_dtype=torch.float16)),
        "LARS": lambda: stepper(lambda p: LARS(p, lr=1e-4)),
        TRAINING: lambda: step_of(CONTENDERS[f"{BARE}: cudnn.benchmark"], place),
    }
    runs: dict[str, Callable[[], object]] = {}
    for name, make in makers.items():
        with report.attempt(name):
            if name == TRAINING:
                need("timm")
            runs[name] = make()
    with report.attempt("Muon, in a CUDA graph"):
        need_cuda(place.device)
        runs["Muon, in a CUDA graph"] = captured(makers["Muon"](), place.device)
    return _measure(report, place, "steps of ResNet-50's hidden layers", runs, "LARS")


def _measure(
    report: Report,
    place: Place,
    table: str,
    runs: dict[str, Callable[[], object]],
    unit: str,
) -> dict[str, float]:
    """Measure each, interleaved; returns the median seconds on the device."""
    ready = {}
    for name, step in runs.items():
        with report.attempt(f"{table}: {name}"):
            ready[name] = measure_of(step, place.device)
    times = clock.interleaved(ready, 2 if place.dry else 15, lambda: report.seconds_left > 0)
    medians = {name: statistics.median(d for _, d, _ in values) for name, values in times.items()}
    for name, values in times.items():
        device = [on_device for _, on_device, _ in values]
        ratio = {"ratio": medians[name] / medians[unit]} if unit in medians else {}
        report.row(
            table,
            what=name,
            **{f"device_{k}": v for k, v in clock.spread(device, 1e3).items()},
            **ratio,
            host_median_ms=1e3 * statistics.median(h for h, _, _ in values),
            in_a_row_median_ms=1e3 * statistics.median(s for _, _, s in values),
            repeats=len(values),
        )
    return medians
