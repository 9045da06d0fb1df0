"""Train matrices and convolutions by our Muon, by that of other libraries, and by formula.

tests/lars/muon/test_crosschecks.py holds them to one another, to the rounding of float64, or of
BF16 where they orthogonalise in BF16. Each pair trains the same tensors for 24 steps; a difference
is relative to how far a tensor has gone from its start. Libraries that are installed run
themselves; the others are written out by formula in benchmarks/lars/muon_published.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import timm.optim
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.lars.muon_published import airbench94, jordan, newton_schulz
from largebatch.lars import NS_COEFFICIENTS, Muon
from largebatch.lars.muon import reference

MATRICES = [(6, 10), (12, 5), (7, 7)]
CONVOLUTIONS = [(8, 3, 3, 3), (9, 2, 1, 1), (4, 8, 3, 3), (6, 4, 3)]
VECTORS = [(5,), (1,), (3, 4)]
STEPS, LR = 24, 0.05
Make = Callable[[list[nn.Parameter]], Optimizer]
Shapes = Sequence[tuple[int, ...]]
#: How far each tensor has gone from its start.
Went = list[Tensor]

#: The settings of timm's Muon: ``adjust_lr_fn`` by our name and theirs.
TIMM_FACTORS = {
    "none": None,
    "original": "original",
    "match_rms_adamw": "match_rms_adamw",
    "spectral_unclamped": "rms_to_rms",
}
TIMM_SETTINGS = {
    "adjust_lr_fn": list(TIMM_FACTORS),
    "conv_mode": list(reference.CONV_MODES),
    "ns_coefficients": list(NS_COEFFICIENTS),
    "nesterov": [False, True],
    "weight_decay": [0.0, 0.1],
}
TORCH_SETTINGS = {
    "adjust_lr_fn": ["original", "match_rms_adamw", "spectral_unclamped"],
    "nesterov": [False, True],
    "weight_decay": [0.0, 0.1],
}


def combinations(settings: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in product(*settings.values()):
        yield dict(zip(settings, values, strict=True))


def tensors(shapes: Shapes, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def train(make: Make, shapes: Shapes, dtype: torch.dtype = torch.float64) -> Went:
    """Train random tensors on random gradients, the same ones each time; return how far they went.

    The learning rate falls linearly.
    """
    parameters = [nn.Parameter(t) for t in tensors(shapes, 0, dtype)]
    optimizer = make(parameters)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, tensors(shapes, 1 + step, dtype), strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / STEPS)
        optimizer.step()
    return [p.detach() - t for p, t in zip(parameters, tensors(shapes, 0, dtype), strict=True)]


def difference(ours: Went, theirs: Went) -> float:
    """Return the largest difference of two lists of tensors, relative to each tensor's norm."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


class ByFormula(Optimizer):
    """An optimizer that takes the steps of a function of muon_published."""

    def __init__(
        self, params: list[nn.Parameter], step: Callable[..., Any], **options: Any
    ) -> None:
        super().__init__(params, {"lr": LR})
        self.formula = partial(step, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].get("v", torch.zeros_like(p))
                new, self.state[p]["v"] = self.formula(p, p.grad, buffer, group["lr"])
                p.copy_(new)


class Reference(Optimizer):
    """An optimizer that takes the steps of lars/muon/reference.py, with U Vᵀ by SVD."""

    def __init__(self, params: list[nn.Parameter], **options: Any) -> None:
        super().__init__(params, {"lr": LR})
        self.options = options

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            hyper = reference.Hyper(lr=group["lr"], **self.options)
            for p in group["params"]:
                buffer = self.state[p].setdefault("v", torch.zeros_like(p))
                reference.update([p], [p.grad], [buffer], hyper)


def ours(**options: Any) -> Make:
    return lambda p: Muon(p, LR, **options)


def others(**options: Any) -> Make:
    """Return Muon whose parameters are all updated by the rule for other groups."""
    return lambda p: Muon([{"params": p, "orthogonal": False, **options}], LR)


@contextmanager
def timm_in(dtype: torch.dtype) -> Iterator[None]:
    """Let timm orthogonalise in another dtype than BF16, by the argument that its function has."""
    module = importlib.import_module("timm.optim.muon")
    function = partial(module.zeropower_via_newtonschulz, dtype=dtype)
    with mock.patch.object(module, "zeropower_via_newtonschulz", function):
        yield


@contextmanager
def torch_in(dtype: torch.dtype) -> Iterator[None]:
    """Let torch orthogonalise in another dtype than BF16, which its function has not."""
    module = importlib.import_module("torch.optim._muon")

    def function(u: Tensor, abc: Sequence[float], steps: int, eps: float) -> Tensor:
        return newton_schulz(u, steps, dtype, abc)

    with mock.patch.object(module, "_zeropower_via_newtonschulz", function):
        yield


def of_weights(ns_dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if ns_dtype == torch.float64 else torch.float32


def muon(ns_dtype: torch.dtype, shapes: Shapes, momentum: float = 0.9, **setting: Any) -> Went:
    """Train by Muon that orthogonalises in ``ns_dtype``, with weights in float64 or else FP32."""
    return train(
        ours(momentum=momentum, ns_dtype=ns_dtype, **setting), shapes, of_weights(ns_dtype)
    )


def timms(ns_dtype: torch.dtype, shapes: Shapes, momentum: float = 0.9, **setting: Any) -> Went:
    """Train by timm's Muon, as it is in BF16, or in another dtype."""
    factor = TIMM_FACTORS[setting["adjust_lr_fn"]]
    options = {"momentum": momentum, **setting, "adjust_lr_fn": factor}
    with nullcontext() if ns_dtype == torch.bfloat16 else timm_in(ns_dtype):
        return train(
            lambda p: timm.optim.Muon([{"params": p, "use_muon": True}], LR, **options),
            shapes,
            of_weights(ns_dtype),
        )


def torchs(ns_dtype: torch.dtype, shapes: Shapes, momentum: float = 0.9, **setting: Any) -> Went:
    """Train by torch's Muon, which takes matrices alone, as it is in BF16, or in another dtype."""
    with nullcontext() if ns_dtype == torch.bfloat16 else torch_in(ns_dtype):
        return train(
            lambda p: torch.optim.Muon(p, LR, momentum=momentum, **setting),
            shapes,
            of_weights(ns_dtype),
        )


def to_jordan(shapes: Shapes, adjust_lr_fn: str) -> float:
    options = {"momentum": 0.95, "weight_decay": 0.1, "adjust_lr_fn": adjust_lr_fn}
    formula = {"momentum": 0.95, "decay": 0.1, "dtype": torch.float64}
    return difference(
        train(ours(**options), shapes), train(lambda p: ByFormula(p, jordan, **formula), shapes)
    )


def to_airbench(nesterov: bool) -> float:
    options = {"momentum": 0.6, "nesterov": nesterov}
    mine = ours(**options, norm_projection=True, adjust_lr_fn="none", ns_steps=3)
    formula = {**options, "dtype": torch.float64}
    shapes = MATRICES + CONVOLUTIONS
    return difference(
        train(mine, shapes), train(lambda p: ByFormula(p, airbench94, **formula), shapes)
    )


def to_reference(**setting: Any) -> float:
    """Return the difference from U Vᵀ by SVD of Newton-Schulz with steps until it has converged."""
    options = {"momentum": 0.9, **setting}
    shapes = MATRICES + CONVOLUTIONS
    exact = {"ns_coefficients": "polar_express", "ns_steps": 16}
    return difference(
        train(ours(**options, **exact), shapes), train(lambda p: Reference(p, **options), shapes)
    )
