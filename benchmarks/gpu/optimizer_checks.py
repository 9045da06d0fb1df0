"""LARS and Muon on a GPU: agreement with their references, and CUDA graphs, which allow no waits.

LARS's reference (lars/reference.py) runs on the same device with the same gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import graphs
from benchmarks.gpu.place import need
from benchmarks.gpu.report import Case, Skipped
from largebatch.lars import DIALECTS, LARS, NS_COEFFICIENTS, newton_schulz
from largebatch.lars.muon.newton_schulz import polynomials
from largebatch.lars.triton import step as triton_update

#: Dtype of the parameters, whether there are masters, and the tolerance of weights (relative).
FORMS: dict[str, tuple[torch.dtype, bool, float]] = {
    "fp64": (torch.float64, False, 1e-10),
    "fp32": (torch.float32, False, 1e-5),
    "bf16 with masters": (torch.bfloat16, True, 1e-5),
    "fp16 with masters": (torch.float16, True, 1e-5),
    "fp16": (torch.float16, False, 4e-3),
}
#: Options beside the dialect, by the title of a check. Each is checked in fp32.
OPTIONS: dict[str, dict[str, Any]] = {
    "Nesterov": {"nesterov": True},
    "norm of the sum": {"denominator": "norm-of-sum"},
    "clip": {"trust_clip": True},
    "no decay at a zero norm, maximize": {"decay_at_zero_norm": False, "maximize": True},
}
#: Dialects whose kernels load different tensors for the norms: title, dialect, options.
DIVISORS: dict[str, tuple[str, dict[str, Any]]] = {
    **{dialect: (dialect, {}) for dialect in DIALECTS},
    "torch, norm of the sum": ("torch", {"denominator": "norm-of-sum"}),
}
#: The agreements of a dry run, because Triton's interpreter is slow; tests/lars checks the others.
_DRY = (
    *(("triton", "mlperf", form, "") for form in ("fp32", "bf16 with masters")),
    ("triton", "mlperf", "fp16 with masters", ""),
    ("foreach", "mlperf-corrected", "fp16 with masters", ""),
)
_LOSS_SCALE = 1024.0

#: dtype of Newton-Schulz, and the largest error of a matrix with condition number 10, as in
#: tests/lars/muon.
BOUNDS = {"bfloat16": 0.5, "float16": 0.35, "float32": 1e-4}


def lars_agrees(dialect: str, form: str, title: str = "", implementation: str = "triton") -> str:
    """Return the name of a check of agreement."""
    more = f", {title}" if title else ""
    return f"LARS is its reference: {dialect}, {form}{more}, {implementation}"


def cases(dry: bool) -> Iterator[Case]:
    """Yield the checks, in a dry run fewer."""
    for implementation, dialect, form, title in _DRY if dry else _agreements():
        check = partial(agrees, implementation, dialect, form, OPTIONS.get(title, {}))
        yield Case(lars_agrees(dialect, form, title, implementation), check)
    yield Case("LARS is its reference: gradients at any address", takes_any_address)
    for title, (dialect, options) in DIVISORS.items():
        for precision in graphs.PRECISIONS if title == "mlperf" else graphs.PRECISIONS[:1]:
            check = partial(graphs.lars_is_eager, dialect, options, precision)
            yield Case(f"LARS in a CUDA graph: {title}, {precision}", check)
    for dtype in BOUNDS:
        for name in NS_COEFFICIENTS:
            check = partial(is_the_polynomial, dtype, name)
            yield Case(f"Newton-Schulz is the polynomial: {dtype}, {name}", check)
    yield Case("Muon in a CUDA graph", graphs.muon_is_eager)


def _agreements() -> Iterator[tuple[str, str, str, str]]:
    for implementation, lacks in (("triton", "simclr-popular"), ("foreach", None)):
        for dialect in (name for name in DIALECTS if name != lacks):
            yield from ((implementation, dialect, form, "") for form in FORMS)
            yield from ((implementation, dialect, "fp32", title) for title in OPTIONS)


def _need_implementation(implementation: str, device: torch.device, dtype: torch.dtype) -> None:
    if implementation != "triton":
        return
    need("triton")
    if not triton_update.runs_on(device):
        raise Skipped(f"Triton does not run on {device.type} without its interpreter")
    if device.type == "cpu" and dtype == torch.bfloat16:
        raise Skipped("Triton's interpreter does not round to bfloat16 as a GPU does")


def tensors(seed: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of various sizes and layouts; one needs several programs."""
    shapes = [(), (1,), (7,), (3, 5), (130, 131), (4, 3, 3, 3), (8, 4, 3, 3)]
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    found[-1] = found[-1].to(memory_format=torch.channels_last)
    return [tensor.to(device, dtype) for tensor in found]


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    vectors = {"params": parameters[:3], "adapt": False, "weight_decay": 0.0}
    return [vectors, {"params": parameters[3:], "adapt": True}]


def _state(parameters: list[nn.Parameter], optimizer: LARS) -> list[Tensor]:
    """Return copies of everything that a step may change."""
    states = [optimizer.state[p] for p in parameters]
    found = [p.detach() for p in parameters] + [t for s in states for t in s.values()]
    found += [g["previous_lr"] for g in optimizer.param_groups if "previous_lr" in g]
    return [tensor.clone() for tensor in found]


def agrees(
    implementation: str, dialect: str, form: str, options: dict[str, Any], device: torch.device
) -> None:
    """Check weights, masters and trust ratios against the reference at changing learning rates.

    A step with an overflow must change no bit, and no step may modify the gradients.
    """
    dtype, masters, rtol = FORMS[form]
    _need_implementation(implementation, device, dtype)
    options = {"dialect": dialect, "weight_decay": 1e-3, "master_weights": masters, **options}
    runs: list[tuple[list[nn.Parameter], Any]] = []
    for name in ("reference", implementation):
        parameters = [nn.Parameter(t) for t in tensors(0, device, dtype)]
        with torch.no_grad():
            parameters[3].zero_()  # zero weights: the trust ratio is 1
        runs.append((parameters, LARS(_groups(parameters), 0.5, implementation=name, **options)))
    scale = torch.full((), _LOSS_SCALE if dtype == torch.float16 else 1.0, device=device)
    for step, lr in enumerate((0.5, 0.4, 7.0, 0.3, 0.2)):
        overflows = step == 2
        gradients = [0.1 * t for t in tensors(step + 1, device, dtype)]
        gradients[4].zero_()  # the trust ratio is 1, unless it divides by the decay or momentum
        if overflows:
            gradients[5].view(-1)[0] = float("inf")
        for parameters, optimizer in runs:
            for group in optimizer.param_groups:
                group["lr"] = lr
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = (gradient * scale).to(dtype)
            given = [p.grad.clone() for p in parameters if p.grad is not None]
            optimizer.grad_scale = scale
            optimizer.found_inf = torch.full((), float(overflows), device=device)
            before = _state(parameters, optimizer)
            optimizer.step()
            left = [p.grad for p in parameters if p.grad is not None]
            _same(given, left, "gradients")
            if overflows:
                _same(before, _state(parameters, optimizer), "what an overflow leaves")
    (expected, reference), (found, fast) = runs
    for theirs, ours in zip(expected, found, strict=True):
        a, b = reference.state[theirs].get("master", theirs), fast.state[ours].get("master", ours)
        torch.testing.assert_close(b, a, rtol=rtol, atol=rtol / 10)
        torch.testing.assert_close(ours, b.to(dtype), rtol=0, atol=0)
    ratios, others = reference.trust_ratios(), fast.trust_ratios()
    assert ratios.keys() == others.keys()
    for name, ratio in ratios.items():
        assert abs(others[name] - ratio) <= 1e-3 * abs(ratio), (name, others[name], ratio)


def _same(before: list[Tensor], after: list[Tensor], what: str) -> None:
    for old, new in zip(before, after, strict=True):
        # NaN and Inf compare as equal here.
        assert torch.equal(old.nan_to_num(), new.nan_to_num()), f"{what} changed"


def takes_any_address(device: torch.device) -> None:
    """Check gradients that are views into a bucket, not aligned to 16 bytes, as DDP makes them."""
    _need_implementation("triton", device, torch.float32)
    results = []
    for implementation in ("reference", "triton"):
        bucket = torch.ones(130 * 131 + 1).cumsum(0).to(device) / 1e4
        parameter = nn.Parameter(tensors(0, device, torch.float32)[4])
        parameter.grad = bucket[1:].view(130, 131)
        LARS([parameter], 1.0, implementation=implementation).step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results)


def is_the_polynomial(dtype: str, name: str, device: torch.device) -> None:
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
            found = newton_schulz(scale * x, dtype=getattr(torch, dtype), coefficients=name)
            error = torch.linalg.matrix_norm(found.cpu().double() - expected, 2).max().item()
            assert error < BOUNDS[dtype], (rows, columns, scale, error)
