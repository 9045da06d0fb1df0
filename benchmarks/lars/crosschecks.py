"""Claim: every implementation of every dialect matches the reference, and the reference matches
what other libraries publish, to the rounding of float64.

    python -m benchmarks.lars.crosschecks

Each pair trains the same tensors of 0 to 4 dimensions for 40 steps of a warm-up and decay. The
table shows, for each pair, the largest difference in any tensor relative to its largest value.
Libraries that are installed run themselves; the others are written out by formula in
benchmarks/lars/published.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

if not os.environ.get("CUDA_VISIBLE_DEVICES"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytorch_optimizer
import timm.optim
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from benchmarks import tables
from benchmarks.lars.published import Optax, Published
from largebatch.lars import CONVENTIONS, DIALECTS, LARS, polynomial

RESULTS = tables.RESULTS
SHAPES = [(), (1,), (7,), (3, 5), (64, 32), (2, 3, 4), (4, 3, 3, 3)]
STEPS = 40
Make = Callable[[list[nn.Parameter]], Optimizer]


def train(make: Make, *, changing_lr: bool = True, sign: int = 1) -> list[torch.Tensor]:
    """Train random tensors on random gradients, the same ones each time, and return them."""
    generator = torch.Generator().manual_seed(0)

    def tensors() -> list[torch.Tensor]:
        return [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]

    schedule = polynomial(2.0, STEPS, warmup_steps=10, start=0.1, end=0.01)
    parameters = [nn.Parameter(t) for t in tensors()]
    optimizer = make(parameters)
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, tensors(), strict=True):
            parameter.grad = sign * gradient
        for group in optimizer.param_groups:
            group["lr"] = schedule(step) if changing_lr else 1.0
        optimizer.step()
    return [p.detach() for p in parameters]


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to each tensor's maximum."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


#: What a form adds to a dialect: the title, and the options.
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("Nesterov", {"nesterov": True}),
    ("norm of the sum", {"denominator": "norm-of-sum"}),
    ("clip, no decay at a zero norm", {"trust_clip": True, "decay_at_zero_norm": False}),
]
INSTALLED: dict[str, Callable[..., Optimizer]] = {
    "timm": timm.optim.Lars,
    "pytorch-optimizer": pytorch_optimizer.LARS,
    "optax": Optax,
}


def lars(dialect: str, implementation: str = "reference", **options: Any) -> Make:
    return lambda p: LARS(
        p, 1.0, dialect=dialect, implementation=implementation, adapt=True, **options
    )


def without_adaptation(dialect: str, **options: Any) -> Make:
    return lambda p: LARS([{"params": p, "adapt": False}], 1.0, dialect=dialect, **options)


def main() -> None:
    rows = []
    decay = {"weight_decay": 1e-3}
    for dialect in DIALECTS:
        for title, form in FORMS:
            has_no_effect = {"simclr-popular": "denominator", "larc": "trust_clip"}
            if has_no_effect.get(dialect) in form:
                continue
            theirs = train(lars(dialect, **decay, **form))
            for implementation in ("foreach", "fused", "triton"):
                ours = train(lars(dialect, implementation, **decay, **form))
                name = f"{dialect}{title and ', ' + title}: {implementation}"
                rows.append((name, "reference", difference(ours, theirs)))
    for library, row in CONVENTIONS.items():
        make = INSTALLED.get(library, partial(Published, library))
        installed = "itself" if library in INSTALLED else "by formula"
        largest = 0.0
        for options in ({"weight_decay": 0.0}, decay, {"weight_decay": 0.1}):
            ours = train(
                lambda p, o=options, name=library: LARS.like(
                    name, p, 1.0, implementation="reference", **o
                )
            )
            theirs = train(lambda p, o=options, make=make: make(p, lr=1.0, **o))
            largest = max(largest, difference(ours, theirs))
        rows.append((f'LARS.like("{library}")', f"{row.library}, {installed}", largest))
    for nesterov in (False, True):
        options = {**decay, "nesterov": nesterov}
        theirs = train(lambda p, o=options: SGD(p, 1.0, momentum=0.9, **o))
        for dialect in ("torch", "larc", "mlperf-corrected", "simclr-popular"):
            ours = train(without_adaptation(dialect, **options))
            title = f"{dialect}, adapt off{', Nesterov' if nesterov else ''}"
            rows.append((title, "torch.optim.SGD", difference(ours, theirs)))
    ours = train(without_adaptation("mlperf", **decay), changing_lr=False)
    theirs = train(lambda p: SGD(p, 1.0, momentum=0.9, **decay), changing_lr=False)
    rows.append(("mlperf, adapt off, constant lr", "torch.optim.SGD", difference(ours, theirs)))
    ours, theirs = train(lars("mlperf-corrected", **decay)), train(lars("torch", **decay))
    rows.append(("mlperf-corrected", "dialect torch", difference(ours, theirs)))
    ours = train(lars("torch", maximize=True, **decay), sign=-1)
    rows.append(("torch, maximize, gradients negated", "dialect torch", difference(ours, theirs)))

    columns = {"ours": "l", "held to": "l", "largest relative difference": "r"}
    others = ("pytorch_optimizer", "optax", "jax")
    about = tables.about("float64", f"{STEPS} steps", more=others)
    text = tables.table(columns, [(ours, other, f"{d:.1e}") for ours, other, d in rows])
    (RESULTS / "lars_crosschecks.md").write_text(f"{text}\n\n{about}\n")
    print(text)


if __name__ == "__main__":
    main()
