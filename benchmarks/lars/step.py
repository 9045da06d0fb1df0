"""Claim: a LARS step on the CPU takes at most two thirds of the time of other LARS implementations
and needs no memory in proportion to the model. Goal: 1.4 times the time of its memory traffic.

    python -m benchmarks.lars.step [--repeats 25]

One step with momentum and weight decay over the shapes of ResNet-50, AlexNet-BN (Jia et al. 2018)
and ViT-B/16, and over 1,000 tensors of 16 x 16; of ViT-B/16 also with a loss scale as GradScaler
passes it, and in bfloat16 with FP32 masters. All optimizers of a case run in one process,
interleaved, each with the same weights and gradients.

The floor is the time of torch's SGD (fused) in FP32 over the same shapes, by the bytes moved per
parameter: SGD reads weight, gradient and momentum and writes weight and momentum, 20 bytes. LARS
first reads weight and gradient for the norms: 28 bytes. With masters, gradients of 2 bytes are read
twice and parameters of 2 bytes written: 26 bytes. Tensors that are still in the cache after the
norms make a step faster than the floor.

Repeats during which other processes used the CPU for 0.02 s or more do not count.

The memory is the largest number of bytes that the operators of one step have allocated at once.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_optimizer
import timm.optim
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from benchmarks import tables
from benchmarks.lars.allocations import peak_bytes
from benchmarks.lars.shapes import ALEXNET_BN, RESNET_50, TINY, VIT_B_16, Shape
from largebatch.amp import MasterWeights
from largebatch.lars import LARS

RESULTS = tables.RESULTS
SHARED = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
OURS = "largebatch LARS (auto: fused)"
FLOOR = "torch SGD (fused)"
_SGD_BYTES = 20
_LEAST_SECONDS = 0.05  # of a repeat; shorter steps are repeated
_BY_OTHERS = 0.02  # CPU seconds of other processes; /proc/stat counts in hundredths
_MOST_TURNS = 400
Make = Callable[[list[nn.Parameter]], Optimizer]


def ours(implementation: str, *, scale: float | None = None, masters: bool = False) -> Make:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim <= 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "adapt": False}]
        optimizer = LARS(groups, implementation=implementation, master_weights=masters, **SHARED)
        if scale is not None:
            # torch.amp.GradScaler.step sets these two attributes.
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
        return optimizer

    return make


class SGDWithMasters(SGD):
    """torch's SGD (fused) on FP32 masters, with copies of gradients and parameters around it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.halves = parameters
        super().__init__([p.detach().float() for p in parameters], fused=True, **SHARED)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            masters = self.param_groups[0]["params"]
            for master, half in zip(masters, self.halves, strict=True):
                master.grad = half.grad.float()
            super().step()
            torch._foreach_copy_(self.halves, masters)
            for master in masters:
                master.grad = None


FP32: dict[str, Make] = {
    OURS: ours("auto"),
    "largebatch LARS (foreach)": ours("foreach"),
    "timm Lars": lambda p: timm.optim.Lars(p, **SHARED),
    "pytorch_optimizer LARS": lambda p: pytorch_optimizer.LARS(p, **SHARED),
    "torch SGD (foreach)": lambda p: SGD(p, foreach=True, **SHARED),
    FLOOR: lambda p: SGD(p, fused=True, **SHARED),
}
SCALED: dict[str, Make] = {
    OURS: ours("auto", scale=2.0**16),
    "largebatch LARS (foreach)": ours("foreach", scale=2.0**16),
    FLOOR: FP32[FLOOR],
}
MASTERS: dict[str, Make] = {
    OURS: ours("auto", masters=True),
    "largebatch LARS (foreach)": ours("foreach", masters=True),
    "timm Lars in MasterWeights": lambda p: MasterWeights(timm.optim.Lars(p, **SHARED)),
    "torch SGD (fused) on masters, with copies": SGDWithMasters,
    FLOOR: FP32[FLOOR],
}


@dataclass(frozen=True)
class Case:
    """Optimizers over the same shapes; ``moved`` is the bytes of LARS's traffic per parameter.

    The floor's optimizer always has FP32 parameters.
    """

    shapes: list[Shape]
    optimizers: dict[str, Make]
    dtype: torch.dtype = torch.float32
    moved: int = 28


CASES = {
    "ResNet-50": Case(RESNET_50, FP32),
    "AlexNet-BN": Case(ALEXNET_BN, FP32),
    "ViT-B/16": Case(VIT_B_16, FP32),
    "ViT-B/16, loss scale": Case(VIT_B_16, SCALED),
    "ViT-B/16, bf16 with masters": Case(VIT_B_16, MASTERS, torch.bfloat16, 26),
    "1,000 x 256": Case(TINY, FP32),
}


def measure(case: Case, repeats: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the milliseconds of each repeat and the bytes allocated in a step, by optimizer."""
    inputs = {}
    for name in case.optimizers:  # each has its own: masters follow a parameter that others change
        dtype = torch.float32 if name == FLOOR else case.dtype
        torch.manual_seed(0)
        parameters = [nn.Parameter((0.05 * torch.randn(s)).to(dtype)) for s in case.shapes]
        gradients = [(1e-3 * torch.randn(s)).to(dtype) for s in case.shapes]
        inputs[name] = parameters, gradients
    optimizers = {name: make(inputs[name][0]) for name, make in case.optimizers.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    memory: dict[str, int] = {}
    for turn in range(_MOST_TURNS):
        for name, optimizer in optimizers.items():
            for parameter, gradient in zip(*inputs[name], strict=True):
                # Some optimizers modify the gradient, which would grow from step to step.
                parameter.grad = gradient if name.startswith(("large", "torch")) else gradient + 0
            if turn < 2:  # the first two create the state and touch its memory
                optimizer.step()
            elif turn == 2:
                memory[name] = peak_bytes(optimizer.step)
            else:
                milliseconds, by_others = time_calls(optimizer.step)
                if by_others < _BY_OTHERS:
                    times[name].append(milliseconds)
        if min(len(values) for values in times.values()) >= repeats:
            return times, memory
    raise SystemExit("other processes use this machine too much; valid: measure on an idle one")


def time_calls(call: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds per call, and the CPU seconds that other processes used meanwhile."""
    busy, own, start = _busy_seconds(), time.process_time(), time.perf_counter()
    calls = 0
    while time.perf_counter() - start < _LEAST_SECONDS:
        call()
        calls += 1
    seconds = time.perf_counter() - start
    by_others = _busy_seconds() - busy - (time.process_time() - own)
    return 1e3 * seconds / calls, by_others


def _busy_seconds() -> float:
    """Return the CPU seconds that all processes of this machine have used so far."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def row(values: list[float], memory: int, ours_ms: float, floor_ms: float) -> dict[str, float]:
    """Return what is stored of an optimizer: its milliseconds, and megabytes beyond its inputs."""
    deciles = statistics.quantiles(values, n=10)
    median = statistics.median(values)
    return {
        "least_ms": round(min(values), 2),
        "median_ms": round(median, 2),
        "decile_1_ms": round(deciles[0], 2),
        "decile_9_ms": round(deciles[-1], 2),
        "median_against_ours": round(median / ours_ms, 2),
        "median_against_floor": round(median / floor_ms, 2),
        "extra_megabytes": round(memory / 1e6, 2),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Tabulate the optimizers of all cases."""
    columns = {"tensors": "l", "optimizer": "l"}
    columns |= dict.fromkeys(("least, ms", "median, ms", "spread (10 to 90 %)"), "r")
    columns |= dict.fromkeys(("median against ours", "against the floor"), "r")
    cells = [
        [title, f"{name}, FP32" if name == FLOOR and CASES[title].dtype != torch.float32 else name,
         f"{of['least_ms']:.1f}", f"{of['median_ms']:.1f}",
         f"{of['decile_1_ms']:.1f} to {of['decile_9_ms']:.1f}",
         f"{of['median_against_ours']:.2f}", f"{of['median_against_floor']:.2f}",
         f"{of['extra_megabytes']:.1f}"]
        for title, case in found.items()
        for name, of in case["optimizers"].items()
    ]  # fmt: skip
    return tables.table(columns | {"extra memory, MB": "r"}, cells)


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=25)
    repeats: int = parser.parse_args().repeats
    found: dict[str, dict[str, Any]] = {}
    for title, case in CASES.items():
        times, memory = measure(case, repeats)
        ours_ms = statistics.median(times[OURS])
        floor = case.moved / _SGD_BYTES * statistics.median(times[FLOOR])
        found[title] = {
            "tensors": len(case.shapes),
            "parameters": sum(torch.Size(s).numel() for s in case.shapes),
            "floor_ms": round(floor, 2),
            "optimizers": {
                name: row(values, memory[name], ours_ms, floor) for name, values in times.items()
            },
        }
        print(table({title: found[title]}), flush=True)
    others = ("pytorch_optimizer",)
    origin = {"claim": tables.claim_of(__doc__), **tables.origin(*others), "repeats": repeats}
    tables.store(RESULTS / "lars_step.json", origin | found)
    about = tables.about(f"{repeats} repeats", more=others)
    (RESULTS / "lars_step.md").write_text(f"{table(found)}\n\n{about}\n")


if __name__ == "__main__":
    main()
