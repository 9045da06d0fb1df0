"""Claim: Newton-Schulz on the CPU takes at most 1.3 times the time of its matrix products alone,
and under 10 % of a training step of the CIFAR-10 recipes at batch 256.

    OMP_NUM_THREADS=1 python -m benchmarks.lars.orthogonalization [--repeats 25] [--shared]

Errors are the largest over the layer shapes of ResNet-9 (width 16) and of ResNet-50 with at most
128 rows, as the spectral norm of the difference to the exact polynomial of the singular values, and
to U V^T. The matrices are random, with singular values equally spaced in the logarithm from 1 down
to 1 / condition. Plain steps work on the matrix itself; Gram steps on its Gram matrix, as far as
the dtype allows, whatever the shape.

Times are of all hidden layers of a network, interleaved, one after the other in one process. The
products alone are the matrix products of our form, of the same shapes in the same order, with
preallocated outputs. A training step is forward and backward of the network of cifar10-b256 for
256 images of 24 x 24 pixels in channels-last layout.

Repeats during which other processes used the CPU for 0.02 s or more do not count; with --shared
they all do, for a machine that is never idle, and the result says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any
from unittest.mock import patch

import torch
from timm.optim.muon import zeropower_via_newtonschulz as timm_newton_schulz
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz as torch_newton_schulz

from benchmarks.lars.shapes import RESNET_50, Shape
from benchmarks.lars.step import time_calls
from benchmarks.tables import RESULTS
from largebatch.lars import (
    LARS,
    NS_COEFFICIENTS,
    Muon,
    hidden_weights,
    newton_schulz,
    split_parameters,
)
from largebatch.lars.muon import newton_schulz as module
from largebatch.lars.muon.newton_schulz import Runs, polynomials, runs, unit_roundoff
from largebatch.recipes.models.resnet9 import ResNet9
from largebatch.recipes.training.summary import processor, versions

CONDITIONS = (1.0, 10.0, 1e2, 1e4)
DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "bf16": torch.bfloat16}
FORMS = {"plain": (1, 1), "Gram": (1, 2)}  # rows and columns that make ``runs`` choose the form
OURS, PRODUCTS = "ours", "its matrix products alone"
BATCH = 256
_BY_OTHERS = 0.02
_MOST_TURNS = 400
_JORDAN = NS_COEFFICIENTS["original"][0]
Calls = dict[str, Callable[[], object]]


def matrices_of(shapes: Sequence[Shape]) -> list[tuple[int, int]]:
    """Return the matrices [out, in x positions] of convolutions and linear layers."""
    return [(shape[0], math.prod(shape[1:])) for shape in shapes]


RESNET_50_HIDDEN = matrices_of([shape for shape in RESNET_50 if len(shape) == 4][1:])


def resnet_9() -> nn.Module:
    """Return the network of the recipe cifar10-b256."""
    return ResNet9(width=16, stem_stride=2).to(memory_format=torch.channels_last)


def hidden(model: nn.Module) -> list[tuple[int, int]]:
    """Return the matrices of the hidden layers of a model."""
    groups = split_parameters(model, 0.0, orthogonal=hidden_weights(model), named=False)
    return matrices_of(
        [p.shape for group in groups if group["orthogonal"] for p in group["params"]]
    )


@contextmanager
def form(name: str) -> Iterator[None]:
    """Take the steps in one form whatever the shape."""

    def forced(steps: Any, rows: int, columns: int, unit: float) -> Runs:
        return runs(steps, *FORMS[name], unit)

    with patch.object(module, "runs", forced):
        yield


def errors(name: str, dtype: torch.dtype, how: str, condition: float) -> tuple[float, float]:
    """Return the errors against the exact polynomial and against U V^T, largest over shapes."""
    shapes = {*hidden(resnet_9()), *RESNET_50_HIDDEN}
    largest = (0.0, 0.0)
    for rows, columns in sorted(shape for shape in shapes if min(shape) <= 128):
        k = min(rows, columns)
        generator = torch.Generator().manual_seed(rows + columns)

        def orthogonal(size: int, k: int = k, generator: torch.Generator = generator) -> Tensor:
            gaussian = torch.randn(size, k, generator=generator)
            return torch.linalg.qr(gaussian).Q.double()

        u, v = orthogonal(rows), orthogonal(columns)
        s = torch.logspace(0, -math.log10(condition), k, dtype=torch.float64)
        with form(how):
            result = newton_schulz((u * s) @ v.mT, coefficients=name, dtype=dtype).double()
        s = s / s.norm()
        for a, b, c in polynomials(name, 5):
            s = a * s + b * s**3 + c * s**5
        found = [spectral_norm(result - (u * s) @ v.mT), spectral_norm(result - u @ v.mT)]
        largest = (max(largest[0], found[0]), max(largest[1], found[1]))
    return largest


def spectral_norm(x: Tensor) -> float:
    """Return the largest singular value, by the eigenvalues of the smaller Gram matrix."""
    x = x if x.shape[0] <= x.shape[1] else x.mT
    return math.sqrt(max(0.0, torch.linalg.eigvalsh(x @ x.mT)[-1].item()))


def products(batch: Tensor) -> Callable[[], None]:
    """Return what takes the matrix products of our form, with preallocated outputs."""
    x = batch if batch.shape[1] <= batch.shape[2] else batch.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    plan = runs(tuple(polynomials("original", 5)), *x.shape[1:], unit_roundoff(x.dtype))
    r, z, q, s = (x.new_empty(len(x), x.shape[1], x.shape[1]) for _ in range(4))
    y, w = torch.empty_like(x), torch.empty_like(x)

    def run() -> None:
        old, new = x, y
        for steps in plan:
            torch.bmm(old, old.mT, out=r)
            gram, spare, product, other = r, s, q, z
            for index, (a, b, c) in enumerate(steps):
                if index == 0:
                    torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=product)
                    power = product
                else:
                    torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=power)
                    torch.baddbmm(product, power, product, beta=a, out=spare)
                    product, spare = spare, product
                if index < len(steps) - 1:
                    torch.baddbmm(gram, power, gram, beta=a, out=spare)
                    torch.baddbmm(spare, power, spare, beta=a, out=gram)
                    power = other
            if len(steps) == 1:
                torch.baddbmm(old, product, old, beta=steps[0][0], out=new)
            else:
                torch.bmm(product, old, out=new)
            old, new = new, (w if new is y else y)

    return run


def orthogonalizations(shapes: Sequence[tuple[int, int]], *, halves: bool) -> Calls:
    """Return what is compared; ``halves``: with torch's, which computes in bfloat16 alone."""
    torch.manual_seed(0)
    one_by_one = [torch.randn(shape) for shape in shapes]
    wide = [x if x.shape[0] <= x.shape[1] else x.mT.contiguous() for x in one_by_one]
    batches = [
        torch.stack([x for x in wide if x.shape == shape]) for shape in {x.shape: 0 for x in wide}
    ]
    alone = [products(batch) for batch in batches]

    def in_form(how: str) -> None:
        with form(how):
            for batch in batches:
                newton_schulz(batch)

    calls: Calls = {
        OURS: lambda: [newton_schulz(batch) for batch in batches],
        PRODUCTS: lambda: [run() for run in alone],
        "ours, one by one": lambda: [newton_schulz(x) for x in one_by_one],
        "ours, plain steps": lambda: in_form("plain"),
        "ours, Gram steps": lambda: in_form("Gram"),
        "timm, FP32, one by one": lambda: [
            timm_newton_schulz(x, 5, [_JORDAN], dtype=torch.float32) for x in one_by_one
        ],
    }
    if halves:
        calls["torch, bf16, one by one"] = lambda: [
            torch_newton_schulz(x, _JORDAN, 5, 1e-7) for x in one_by_one
        ]
    return calls


def training_steps() -> Calls:
    """Return forward and backward, and the steps of Muon and of LARS on their gradients."""
    torch.manual_seed(0)
    model = resnet_9()
    images = torch.randn(BATCH, 3, 24, 24).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (BATCH,))

    def train() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1).backward()

    def groups() -> list[dict[str, Any]]:
        return split_parameters(model, 5e-4, orthogonal=hidden_weights(model))

    plain = split_parameters(model, 5e-4)
    muon = Muon(groups(), lr=1e-4, momentum=0.6, norm_projection=True)
    return {
        "forward and backward": train,
        "step of Muon": muon.step,
        "step of LARS": LARS(plain, lr=1e-4).step,
    }


def measure(calls: Calls, repeats: int, shared: bool) -> dict[str, list[float]]:
    """Return the milliseconds of each call, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_MOST_TURNS):
        for name, call in calls.items():
            if turn == 0:
                call()
                continue
            milliseconds, by_others = time_calls(call)
            if shared or by_others < _BY_OTHERS:
                times[name].append(milliseconds)
        if min(len(values) for values in times.values()) >= repeats:
            return times
    raise SystemExit("other processes use this machine too much; valid: --shared or an idle one")


def rows_of(times: dict[str, list[float]], unit: str) -> dict[str, dict[str, float]]:
    """Return medians, deciles and the median against that of ``unit``."""
    first = statistics.median(times[unit])
    found = {}
    for name, values in times.items():
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        found[name] = {
            "least_ms": round(min(values), 2),
            "median_ms": round(statistics.median(values), 2),
            "decile_1_ms": round(deciles[0], 2),
            "decile_9_ms": round(deciles[-1], 2),
            "ratio": round(statistics.median(values) / first, 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--shared", action="store_true", help="count all repeats")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "claim": "Newton-Schulz: 1.3 times its products at most, under 10 % of a training step",
        "date": date.today().isoformat(),
        "machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0)), "threads": 1},
        "shared_machine": arguments.shared,
        "versions": versions(),
        "repeats": arguments.repeats,
    }
    lines = [
        "| coefficients | dtype | steps | condition | error against the polynomial "
        "| error against U Vᵀ |",
        "|---|---|---|---:|---:|---:|",
    ]
    found: dict[str, list[float]] = {}
    for name in NS_COEFFICIENTS:
        for title, dtype in DTYPES.items():
            for how in FORMS:
                for condition in CONDITIONS:
                    found[f"{name}, {title}, {how}, {condition:g}"] = [
                        float(f"{error:.2g}") for error in errors(name, dtype, how, condition)
                    ]
                    exact, polar = found[f"{name}, {title}, {how}, {condition:g}"]
                    lines.append(
                        f"| {name} | {title} | {how} | {condition:,.0f} | {exact:g} | {polar:g} |"
                    )
                    print(lines[-1], flush=True)
    result["errors"] = found
    lines += [
        "",
        "| matrices | what | least, ms | median, ms | spread (10 to 90 %) | ratio |",
        "|---|---|---:|---:|---:|---:|",
    ]
    small = hidden(resnet_9())
    cases: dict[str, tuple[Calls, str, int]] = {
        "ResNet-9 of width 16, to the products": (
            orthogonalizations(small, halves=True),
            PRODUCTS,
            arguments.repeats,
        ),
        "ResNet-50, to the products": (
            orthogonalizations(RESNET_50_HIDDEN, halves=False),
            PRODUCTS,
            max(3, arguments.repeats // 5),
        ),
        "ResNet-9 of width 16, to forward and backward": (
            training_steps() | {OURS: orthogonalizations(small, halves=False)[OURS]},
            "forward and backward",
            arguments.repeats,
        ),
    }
    for title, (calls, unit, repeats) in cases.items():
        result[title] = rows_of(measure(calls, repeats, arguments.shared), unit)
        for name, row in result[title].items():
            lines.append(
                f"| {title} | {name} | {row['least_ms']:.1f} | {row['median_ms']:.1f} "
                f"| {row['decile_1_ms']:.1f} to {row['decile_9_ms']:.1f} | {row['ratio']:.2f} |"
            )
            print(lines[-1], flush=True)
    about = ", ".join(
        [
            f"{result['date']}, {processor()}, one thread of {os.cpu_count()} cores",
            f"{arguments.repeats} repeats (for ResNet-50 a fifth, and at least 3)",
            *(["on a shared machine"] if arguments.shared else []),
            *(f"{package} {number}" for package, number in versions().items()),
        ]
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "orthogonalization.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "orthogonalization.md").write_text("\n".join(lines) + f"\n\n{about}\n")


if __name__ == "__main__":
    main()
