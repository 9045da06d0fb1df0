"""Claim: where gradients move between steps, as with zero_grad(set_to_none=True), the Triton step
spends less than a third of the host time on its tables that building them anew takes.

    python -m benchmarks.lars.host_time [--repeats 50] [--out DIR]

The host's part of a step over the 161 tensors of ResNet-50, on any machine: the kernels are left
out, all else runs, on the CPU. Compared are the tables of :mod:`largebatch.lars.triton.tables` for
gradients at new addresses, and one table with a row per tensor and a list of programs, built in
Python, as the step made them before. Both are measured in turns in one process, in CPU time of the
thread, so that other processes hardly count. It also prints the operators that a step launches,
with a new learning rate and gradients at old addresses; each is a kernel on a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lars.shapes import RESNET_50
from benchmarks.tables import RESULTS
from largebatch.lars import LARS
from largebatch.lars.triton import kernels
from largebatch.lars.triton.tables import CHUNK, address_table, addresses_on, programs_on
from largebatch.recipes.training.summary import processor, versions

#: Operators that launch no kernel.
_FREE = {"_record_function_enter_new", "_record_function_exit", "empty", "empty_like"}
_CPU = torch.device("cpu")


class LeftOut:
    """Stands in for a kernel; counts its launches."""

    launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *_: Any, **__: Any) -> None:
        LeftOut.launches += 1


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def built_anew(columns: Sequence[Sequence[int]], elements: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the tables as one step made them that knew nothing of the step before."""
    rows: list[list[int]] = []
    programs: list[list[int]] = []
    for i, number in enumerate(elements):
        rows.append([*(column[i] if column else 0 for column in columns), number, len(programs)])
        programs += [[i, chunk] for chunk in range(-(-number // CHUNK))]
    return torch.tensor(rows), torch.tensor(programs, dtype=torch.int32)


def moving(arena: Tensor, step: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return addresses of weights, gradients and buffers, of matrices and of vectors."""
    first = arena.data_ptr()
    groups = []
    for shapes in ([s for s in RESNET_50 if len(s) > 1], [s for s in RESNET_50 if len(s) < 2]):
        fixed = tuple(first + 512 * i for i in range(len(shapes)))
        groups.append((fixed, tuple(a + 16 * step for a in fixed), fixed, ()))
    return groups


def tables(repeats: int) -> tuple[list[float], list[float]]:
    """Return the seconds of both ways for the tables of one step."""
    elements = [
        tuple(torch.Size(s).numel() for s in RESNET_50 if (len(s) > 1) == matrices)
        for matrices in (True, False)
    ]
    arena, anew, cached = torch.empty(1), [], []
    for step in range(repeats):
        groups = list(zip(moving(arena, step), elements, strict=True))
        start = time.thread_time()
        for columns, sizes in groups:
            built_anew(columns, sizes)
        between = time.thread_time()
        for columns, sizes in groups:
            addresses_on(columns, _CPU)
            programs_on(sizes, _CPU)
        cached.append(time.thread_time() - between)
        anew.append(between - start)
    return anew, cached


def launches(scaled: bool, dialect: str, lr: float) -> Counter[str]:
    """Return what a step launches, with a learning rate that no step had before."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in RESNET_50]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == big] for big in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "adapt": False, "weight_decay": 0.0}]
    optimizer = LARS(groups, 1.0, weight_decay=5e-5, dialect=dialect, implementation="triton")
    if scaled:  # as torch.amp.GradScaler does
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.zeros(())  # type: ignore[attr-defined]
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = lr
    LeftOut.launches = 0
    with Operators() as operators:
        optimizer.step()
    found = Counter({name: n for name, n in operators.seen.items() if name not in _FREE})
    found["Triton"] = LeftOut.launches
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    address_table(((16,), (16,), (), ()), _CPU)
    anew, cached = tables(options.repeats)
    lines = [
        "| tables of a step | host ms, median | quartiles | of built anew |",
        "|---|---:|---:|---:|",
    ]
    for name, seconds in (("built anew", anew), ("addresses alone", cached)):
        low, middle, high = (1e3 * q for q in statistics.quantiles(seconds, n=4))
        ratio = statistics.median(seconds) / statistics.median(anew)
        lines.append(f"| {name} | {middle:.2f} | {low:.2f} to {high:.2f} | {ratio:.2f} |")
    lines += ["", "| step with a new learning rate | launches | of which |", "|---|---:|---|"]
    rates = count()
    with (
        mock.patch.object(kernels, "sums_of_squares", LeftOut()),
        mock.patch.object(kernels, "update", LeftOut()),
    ):
        for scaled in (False, True):
            for dialect in ("mlperf", "mlperf-corrected"):
                found = launches(scaled, dialect, 2.0 + next(rates))
                title = f"{dialect}{', with a loss scale' if scaled else ''}"
                parts = ", ".join(f"{number} {name}" for name, number in sorted(found.items()))
                lines.append(f"| {title} | {found.total()} | {parts} |")
    about = f"{date.today().isoformat()}, {processor()}, {len(os.sched_getaffinity(0))} cores, "
    about += (
        f"{options.repeats} repeats in turns, CPU time of the thread, torch {versions()['torch']}"
    )
    lines += ["", about]
    text = "\n".join(lines)
    print(text)
    (options.out / "lars_host_time.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
