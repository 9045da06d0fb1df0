"""Claim: Muon matches its definition and what other libraries publish, to the rounding of float64,
or of BF16 where they orthogonalise in BF16.

    python -m benchmarks.lars.muon_crosschecks

Each pair trains the same matrices and convolutions for 24 steps. A row is the largest difference
over all settings that both sides have, of any tensor, relative to how far it has gone from its
start. Libraries that are installed run themselves; the others are written out by formula in
benchmarks/lars/muon_published.py.
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

from benchmarks import tables
from benchmarks.lars.muon_published import airbench94, jordan, newton_schulz
from largebatch.lars import LARS, NS_COEFFICIENTS, Muon
from largebatch.lars.muon import reference

RESULTS = tables.RESULTS
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


def to_adamw(make: Make, **options: Any) -> float:
    return difference(train(others(rule="adamw", **options), VECTORS), train(make, VECTORS))


def rows() -> list[tuple[str, str, float]]:
    """Return what is held to what, and the largest relative difference."""
    fp64, bf16 = torch.float64, torch.bfloat16
    found = []
    # BF16 has an error of its own, which the last rows of each show.
    for theirs, name, shapes, settings in (
        (timms, "timm, Muon", MATRICES + CONVOLUTIONS, TIMM_SETTINGS),
        (torchs, "torch.optim.Muon", MATRICES, TORCH_SETTINGS),
    ):
        runs = [
            {
                (who, dtype): who(dtype, shapes, **setting)
                for who in (muon, theirs)
                for dtype in (fp64, bf16)
            }
            for setting in combinations(settings)
        ]
        for mine, held_to, title in (
            ((muon, fp64), (theirs, fp64), ("Muon, float64", f"{name}, float64")),
            ((muon, bf16), (theirs, bf16), ("Muon, BF16", f"{name}, as it is (BF16)")),
            ((muon, bf16), (muon, fp64), ("Muon, BF16", "Muon, float64")),
            ((theirs, bf16), (theirs, fp64), (f"{name}, as it is (BF16)", f"{name}, float64")),
        ):
            found.append((*title, max(difference(run[mine], run[held_to]) for run in runs)))
    source = "KellerJordan/Muon, by formula"
    found.append(
        ('Muon, matrices, adjust_lr_fn="original"', source, to_jordan(MATRICES, "original"))
    )
    square = [shape for shape in CONVOLUTIONS if len(shape) == 4]
    found.append(('Muon, convolutions, adjust_lr_fn="none"', source, to_jordan(square, "none")))
    largest = max(to_airbench(nesterov) for nesterov in (False, True))
    found.append(
        ('Muon, norm_projection=True, adjust_lr_fn="none"', "airbench94_muon, by formula", largest)
    )
    settings = combinations(
        {
            "adjust_lr_fn": list(reference.ADJUST_LR_FNS),
            "conv_mode": list(reference.CONV_MODES),
            "norm_projection": [False, True],
        }
    )
    largest = max(to_reference(**setting) for setting in settings)
    found.append(("Muon, Newton-Schulz until it has converged", "reference, by SVD", largest))
    adamw = {"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-7}
    fallback = {"params": None, "use_fallback": True, "nesterov": False, **adamw}
    found.append(
        (
            'Muon, rule="adamw"',
            "timm, the fallback of Muon",
            to_adamw(lambda p: timm.optim.Muon([{**fallback, "params": p}], LR), **adamw),
        )
    )
    found.append(
        (
            'Muon, rule="adamw"',
            "torch.optim.AdamW",
            to_adamw(lambda p: torch.optim.AdamW(p, LR, **adamw), **adamw),
        )
    )
    sgd = {"momentum": 0.85, "nesterov": True, "weight_decay": 0.1}
    theirs = train(lambda p: torch.optim.SGD(p, LR, **sgd), VECTORS)
    mine = train(others(rule="sgd", **sgd), VECTORS)
    found.append(('Muon, rule="sgd"', "torch.optim.SGD", difference(mine, theirs)))
    theirs = train(lambda p: LARS(p, LR, dialect="torch", **sgd), VECTORS)
    mine = train(others(rule="lars", **sgd), VECTORS)
    found.append(('Muon, rule="lars"', "LARS, dialect torch", difference(mine, theirs)))
    return found


def main() -> None:
    columns = {"this": "l", "held to": "l", "largest relative difference": "r"}
    text = tables.table(columns, [(this, other, f"{d:.1e}") for this, other, d in rows()])
    (RESULTS / "muon_crosschecks.md").write_text(f"{text}\n\n{tables.about(f'{STEPS} steps')}\n")
    print(text)


if __name__ == "__main__":
    main()
