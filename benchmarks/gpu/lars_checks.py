"""LARS on a GPU: agreement with the reference, absence of host syncs, and CUDA graphs.

The reference (lars/reference.py) runs on the same device with the same gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.lars_graphs import LOSS_SCALE, graph_is_eager
from benchmarks.gpu.place import need, need_cuda
from benchmarks.gpu.report import Case, Skipped
from benchmarks.gpu.waiting import check_that_syncs_fail, does_not_wait
from largebatch.lars import DIALECTS, LARS
from largebatch.lars.triton import step as triton_update

#: Dtype of the parameters, whether there are masters, and the tolerance of weights (relative).
FORMS: dict[str, tuple[torch.dtype, bool, float]] = {
    "fp64": (torch.float64, False, 1e-10),
    "fp32": (torch.float32, False, 1e-5),
    "bf16 with masters": (torch.bfloat16, True, 1e-5),
    "fp16 with masters": (torch.float16, True, 1e-5),
    "fp16": (torch.float16, False, 4e-3),
}
GRAPH_PRECISIONS = ("fp32", "bf16", "fp16-master")


#: Options beside the dialect, by the title of a check. Each is checked in fp32.
OPTIONS: dict[str, dict[str, Any]] = {
    "Nesterov": {"nesterov": True},
    "norm of the sum": {"denominator": "norm-of-sum"},
    "clip": {"trust_clip": True},
    "no decay at a zero norm, maximize": {"decay_at_zero_norm": False, "maximize": True},
}

#: Dialects whose kernels load different tensors for the norms, which tests of speed and waiting
#: must cover too: title, dialect, options.
DIVISORS: dict[str, tuple[str, dict[str, Any]]] = {
    **{dialect: (dialect, {}) for dialect in DIALECTS},
    "torch, norm of the sum": ("torch", {"denominator": "norm-of-sum"}),
}

#: The cases of a dry run, because Triton's interpreter is slow; tests/lars checks the others.
_DRY = [
    ("triton", "torch", "fp32", "norm of the sum"),
    ("foreach", "mlperf-corrected", "fp16 with masters", ""),
]


def cases(dry: bool = False) -> Iterator[Case]:
    """Yield all checks of LARS."""
    for implementation, dialect, form, title in _DRY if dry else _agreements():
        check = partial(agrees, implementation, dialect, form, OPTIONS.get(title, {}))
        more = f", {title}" if title else ""
        yield Case(f"{implementation} is the reference: {dialect}{more}, {form}", check)
    yield Case("triton is the reference: gradients at any address", takes_any_address)
    for implementation in ("triton", "foreach"):
        for title, (dialect, options) in DIVISORS.items():
            name = f"no host sync: {implementation}, {title}"
            yield Case(name, partial(never_waits, implementation, dialect, options))
    for precision in GRAPH_PRECISIONS:
        for title, (dialect, options) in DIVISORS.items():
            if precision == "fp32" or title == "mlperf":
                name = f"CUDA graph of forward, backward and step: {title}, {precision}"
                yield Case(name, partial(graph_is_eager, dialect, options, precision))


def _agreements() -> Iterator[tuple[str, str, str, str]]:
    for implementation in ("triton", "foreach"):
        for dialect in DIALECTS:
            for form in FORMS:
                yield implementation, dialect, form, ""
            for title in OPTIONS:
                yield implementation, dialect, "fp32", title


def _need_implementation(implementation: str, device: torch.device, dtype: torch.dtype) -> None:
    if implementation != "triton":
        return
    need("triton")
    if not triton_update.runs_on(device):
        raise Skipped(f"Triton does not run on {device.type} without its interpreter")
    if device.type == "cpu" and dtype == torch.bfloat16:
        raise Skipped("Triton's interpreter does not round to bfloat16 as a GPU does")


def _tensors(seed: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of various sizes and layouts; one needs several programs."""
    shapes = [(), (1,), (7,), (3, 5), (130, 131), (4, 3, 3, 3), (8, 4, 3, 3)]
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[-1] = tensors[-1].to(memory_format=torch.channels_last)
    return [tensor.to(device, dtype) for tensor in tensors]


def _state(parameters: list[nn.Parameter], optimizer: LARS) -> list[Tensor]:
    """Return copies of everything that a step may change."""
    states = [optimizer.state[p] for p in parameters]
    tensors = [p.detach() for p in parameters] + [t for s in states for t in s.values()]
    tensors += [g["previous_lr"] for g in optimizer.param_groups if "previous_lr" in g]
    return [tensor.clone() for tensor in tensors]


def agrees(
    implementation: str, dialect: str, form: str, options: dict[str, Any], device: torch.device
) -> None:
    """Check weights, masters and trust ratios against the reference at changing learning rates.

    A step with an overflow must change no bit, and no step may modify the gradients.
    """
    dtype, masters, rtol = FORMS[form]
    _need_implementation(implementation, device, dtype)
    runs = []
    for name in ("reference", implementation):
        parameters = [nn.Parameter(t) for t in _tensors(0, device, dtype)]
        with torch.no_grad():
            parameters[3].zero_()  # zero weights: the trust ratio is 1
        groups = [
            {"params": parameters[:3], "adapt": False, "weight_decay": 0.0},
            {"params": parameters[3:], "adapt": True},
        ]
        optimizer = LARS(
            groups,
            0.5,
            weight_decay=1e-3,
            dialect=dialect,
            master_weights=masters,
            implementation=name,
            **options,
        )
        runs.append((parameters, optimizer))
    scale = torch.full((), LOSS_SCALE if dtype == torch.float16 else 1.0, device=device)
    for step, lr in enumerate((0.5, 0.4, 7.0, 0.3, 0.2)):
        overflows = step == 2
        gradients = [0.1 * t for t in _tensors(step + 1, device, dtype)]
        gradients[4].zero_()  # the trust ratio is 1, unless it divides by the decay or momentum
        if overflows:
            gradients[5].view(-1)[0] = float("inf")
        for parameters, optimizer in runs:
            for group in optimizer.param_groups:
                group["lr"] = lr
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = (gradient * scale).to(dtype)
            given = [p.grad.clone() for p in parameters if p.grad is not None]
            optimizer.grad_scale = scale  # type: ignore[attr-defined]
            optimizer.found_inf = torch.full((), float(overflows), device=device)  # type: ignore[attr-defined]
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
        weight, bucket = _tensors(0, device, torch.float32)[4], torch.ones(130 * 131 + 1)
        bucket = bucket.cumsum(0).to(device) / 1e4
        parameter = nn.Parameter(weight)
        parameter.grad = bucket[1:].view(130, 131)
        LARS([parameter], 1.0, implementation=implementation).step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results)


def never_waits(
    implementation: str, dialect: str, options: dict[str, Any], device: torch.device
) -> None:
    """Check that no FP16 step with masters and GradScaler waits, at old or new addresses."""
    need_cuda(device)
    _need_implementation(implementation, device, torch.float16)
    check_that_syncs_fail(device)
    parameters = [nn.Parameter(t) for t in _tensors(0, device, torch.float16)]
    optimizer = LARS(
        [{"params": parameters[:3], "adapt": False}, {"params": parameters[3:]}],
        0.5,
        dialect=dialect,
        master_weights=True,
        implementation=implementation,
        **options,
    )
    scaler = torch.amp.GradScaler("cuda", init_scale=LOSS_SCALE)
    scaler.scale(torch.ones((), device=device))  # creates the scale, as scaling a loss does
    gradients = [_tensors(seed, device, torch.float16) for seed in range(3)]

    def step(number: int) -> None:
        for parameter, gradient in zip(parameters, gradients[number], strict=True):
            parameter.grad = gradient
        scaler.step(optimizer)
        scaler.update()

    for number in (0, 1, 0):  # compiles, creates the state, and leaves pinned memory to reuse
        step(number)
    does_not_wait(partial(step, 0), device)
    does_not_wait(partial(step, 2), device)
