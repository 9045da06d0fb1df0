"""Claim: a LARS step on the CPU takes at most half the time of timm's Lars, pytorch_optimizer's
LARS and torch's SGD (foreach), and at most 1.4 times the time that its memory traffic needs.

    python -m benchmarks.lars.step [--repeats 25]

One step over the shapes of ResNet-50 and of AlexNet-BN (Jia et al. 2018), FP32, with momentum and
weight decay, all optimizers in one process, interleaved. A LARS step reads or writes 7 values per
parameter (weight and gradient for the norms; weight, gradient and momentum read, weight and
momentum written), SGD 5: the floor is 7/5 of the time of torch's SGD (fused).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version

import pytorch_optimizer
import timm.optim
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from benchmarks.lars.shapes import ALEXNET_BN, RESNET_50
from benchmarks.tables import RESULTS
from largebatch.lars import LARS
from largebatch.recipes.training.summary import processor, versions

SHARED = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}


def ours(implementation: str) -> Callable[[list[nn.Parameter]], Optimizer]:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim <= 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "adapt": False}]
        return LARS(groups, implementation=implementation, **SHARED)

    return make


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "largebatch LARS (auto: fused)": ours("auto"),
    "largebatch LARS (foreach)": ours("foreach"),
    "timm Lars": lambda p: timm.optim.Lars(p, **SHARED),
    "pytorch_optimizer LARS": lambda p: pytorch_optimizer.LARS(p, **SHARED),
    "torch SGD (foreach)": lambda p: SGD(p, foreach=True, **SHARED),
    "torch SGD (fused)": lambda p: SGD(p, fused=True, **SHARED),
}


def measure(shapes: list[tuple[int, ...]], repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each repeat by optimizer, all on the same tensors."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(0.05 * torch.randn(shape)) for shape in shapes]
    gradients = [1e-3 * torch.randn(shape) for shape in shapes]
    optimizers = {name: make(parameters) for name, make in OPTIMIZERS.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for repeat in range(repeats + 2):
        for name, optimizer in optimizers.items():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                # Some optimizers modify the gradient, which would grow from step to step.
                parameter.grad = gradient if name.startswith(("large", "torch")) else gradient + 0
            start = time.perf_counter()
            optimizer.step()
            if repeat >= 2:  # the first two create the state and touch its memory
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=25)
    repeats = parser.parse_args().repeats
    result: dict[str, object] = {
        "claim": "LARS step on the CPU: at most half the time of each rival, 1.4 of the floor",
        "date": date.today().isoformat(),
        "machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0))},
        "versions": versions() | {"pytorch_optimizer": version("pytorch_optimizer")},
        "repeats": repeats,
    }
    lines = [
        "| shapes | optimizer | least, ms | median, ms | spread (10 to 90 %) "
        "| median against ours | against the floor |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for title, shapes in (("ResNet-50", RESNET_50), ("AlexNet-BN", ALEXNET_BN)):
        times = measure(shapes, repeats)
        first, *_, fused_sgd = (statistics.median(t) for t in times.values())
        floor = 7 / 5 * fused_sgd
        rows = {}
        for name, values in times.items():
            deciles = statistics.quantiles(values, n=10)
            median = statistics.median(values)
            rows[name] = {
                "least_ms": round(min(values), 2),
                "median_ms": round(median, 2),
                "decile_1_ms": round(deciles[0], 2),
                "decile_9_ms": round(deciles[-1], 2),
                "median_against_ours": round(median / first, 2),
                "median_against_floor": round(median / floor, 2),
            }
            lines.append(
                f"| {title} | {name} | {min(values):.1f} | {median:.1f} | {deciles[0]:.1f} to "
                f"{deciles[-1]:.1f} | {median / first:.2f} | {median / floor:.2f} |"
            )
            print(lines[-1], flush=True)
        numbers = sum(torch.Size(s).numel() for s in shapes)
        result[title] = {"tensors": len(shapes), "parameters": numbers, "optimizers": rows}
    about = (
        f"{result['date']}, {processor()}, {os.cpu_count()} cores, {repeats} repeats, "
        + ", ".join(
            f"{package} {number}"
            for package, number in result["versions"].items()  # type: ignore[attr-defined]
        )
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "lars_step.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "lars_step.md").write_text("\n".join(lines) + f"\n\n{about}\n")


if __name__ == "__main__":
    main()
