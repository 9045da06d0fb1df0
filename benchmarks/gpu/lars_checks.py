"""LARS on a GPU: agreement with the reference, absence of host syncs, and CUDA graphs.

The reference (lars/reference.py) runs on the same device with the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import clock
from benchmarks.gpu.place import Place, need, need_cuda
from benchmarks.gpu.report import Report, Skipped
from largebatch.amp import Precision
from largebatch.lars import DIALECTS, LARS, split_parameters
from largebatch.lars.triton import step as triton_update

TITLE = "LARS: correctness"

#: Dtype of the parameters, whether there are masters, and the tolerance of weights (relative).
FORMS: dict[str, tuple[torch.dtype, bool, float]] = {
    "fp64": (torch.float64, False, 1e-10),
    "fp32": (torch.float32, False, 1e-5),
    "bf16 with masters": (torch.bfloat16, True, 1e-5),
    "fp16 with masters": (torch.float16, True, 1e-5),
    "fp16": (torch.float16, False, 4e-3),
}
GRAPH_PRECISIONS = ("fp32", "bf16", "fp16-master")
_LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class Case:
    """A named check; ``run`` takes the device, and raises if the check fails."""

    name: str
    run: Callable[[torch.device], None]


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
    ("triton", "mlperf-corrected", "fp16 with masters", ""),
    ("triton", "torch", "fp32", "norm of the sum"),
    ("triton", "simclr-popular", "fp32", "Nesterov"),
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


def run(report: Report, place: Place) -> None:
    """Run every check."""
    for case in cases(place.dry):
        if report.has_time(case.name):
            report.check(case.name, case.run, place.device)


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
    scale = torch.full((), _LOSS_SCALE if dtype == torch.float16 else 1.0, device=device)
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


@contextmanager
def host_syncs_fail() -> Iterator[None]:
    """Raise where the host waits for the device, as far as torch detects it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _check_that_syncs_fail(device: torch.device) -> None:
    value = torch.ones((), device=device)
    with host_syncs_fail():
        try:
            value.item()
        except RuntimeError:
            return
    raise AssertionError("torch did not detect a host sync, so this check is impossible here")


def does_not_wait(step: Callable[[], object], device: torch.device) -> None:
    """Check that ``step`` returns while the device is still busy with earlier work.

    This detects every way of waiting, but also fails a step of about a thousand kernels, which
    waits for room in the queue.
    """
    torch.cuda.synchronize(device)
    clock.sleep(0.3, device)
    busy = torch.cuda.Event()
    busy.record()
    with host_syncs_fail():
        step()
    waited = busy.query()
    torch.cuda.synchronize(device)
    assert not waited, "the host waited until the device had finished its earlier work"


def never_waits(
    implementation: str, dialect: str, options: dict[str, Any], device: torch.device
) -> None:
    """Check that no FP16 step with masters and GradScaler waits, at old or new addresses."""
    need_cuda(device)
    _need_implementation(implementation, device, torch.float16)
    _check_that_syncs_fail(device)
    parameters = [nn.Parameter(t) for t in _tensors(0, device, torch.float16)]
    optimizer = LARS(
        [{"params": parameters[:3], "adapt": False}, {"params": parameters[3:]}],
        0.5,
        dialect=dialect,
        master_weights=True,
        implementation=implementation,
        **options,
    )
    scaler = torch.amp.GradScaler("cuda", init_scale=_LOSS_SCALE)
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


class _Loop:
    """A small network and its training step, whose inputs keep their addresses for a CUDA graph."""

    def __init__(
        self, dialect: str, options: dict[str, Any], precision: str, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 8)
        self.precision = Precision(precision, device.type, loss_scale="none")
        self.model = self.precision.convert(nn.Sequential(*layers).to(device))
        self.rate = torch.full((), 0.5, device=device)
        masters = self.precision.form.masters
        groups = split_parameters(self.model, 1e-3)
        self.optimizer = LARS(groups, self.rate, dialect=dialect, master_weights=masters, **options)
        self.overflow = torch.zeros((), device=device)
        self.scale = torch.full((), _LOSS_SCALE, device=device)
        self.optimizer.grad_scale = self.scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = self.overflow  # type: ignore[attr-defined]
        self.x = torch.zeros(32, 64, device=device)

    def step(self) -> None:
        """Take one step with new gradients, which a CUDA graph allocates in its own memory."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision.forward():
            loss = self.model(self.x).float().square().mean()
        (loss * self.scale).backward()
        self.optimizer.step()

    def values(self) -> dict[str, Any]:
        state = self.optimizer.state
        named = self.model.named_parameters()
        return {name: state[p].get("master", p).detach().clone() for name, p in named}


def graph_is_eager(
    dialect: str, options: dict[str, Any], precision: str, device: torch.device
) -> None:
    """Check replays of a captured step against eager steps.

    Inputs, learning rates and overflows change between replays. Capture follows torch's notes on
    CUDA graphs: warm-up on a side stream, and gradients allocated by the graph.
    """
    need_cuda(device)
    loops = [_Loop(dialect, options, precision, device) for _ in range(2)]
    eager, captured = loops
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(32, 64, generator=generator).to(device) for _ in range(8)]

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for x in inputs[:3]:
            captured.x.copy_(x)
            captured.step()
    torch.cuda.current_stream(device).wait_stream(side)
    for x in inputs[:3]:
        eager.x.copy_(x)
        eager.step()

    graph = torch.cuda.CUDAGraph()
    captured.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        captured.step()
    for number, x in enumerate(inputs[3:]):
        for loop in loops:
            loop.x.copy_(x)
            loop.rate.fill_(0.5 / (number + 1))
            loop.overflow.fill_(float(number == 2))
        before = captured.values()
        eager.step()
        graph.replay()
        if number == 2:
            for name, value in captured.values().items():
                assert torch.equal(value, before[name]), f"an overflow changed {name}"
    found, expected = captured.values(), eager.values()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
    start = _Loop(dialect, options, precision, device).values()
    assert not all(torch.equal(start[name].float(), v.float()) for name, v in found.items())
    a, b = (loop.optimizer.trust_ratios() for loop in loops)
    for name, ratio in a.items():
        assert abs(b[name] - ratio) <= 1e-2 * abs(ratio), (name, b[name], ratio)
