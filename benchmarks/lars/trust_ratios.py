"""Claim: recording trust ratios costs less than 1 % of the optimizer's step, and nothing when off.

    python -m benchmarks.lars.trust_ratios [--steps 400]

A LARS step over ResNet-50's tensors on the CPU, with and without recording, interleaved in blocks
of 20 steps; the ratios are read at the end of each block, as trust_ratios_every=20 would.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from datetime import date

import torch
from torch import nn

from benchmarks.lars.shapes import RESNET_50
from benchmarks.lars.step import ours
from benchmarks.tables import RESULTS
from largebatch.lars import TrustRatioHistory
from largebatch.recipes.training.summary import processor, versions

BLOCK = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    blocks = parser.parse_args().steps // BLOCK
    torch.manual_seed(0)
    parameters = [nn.Parameter(0.05 * torch.randn(shape)) for shape in RESNET_50]
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    optimizer = ours("auto")(parameters)
    history = TrustRatioHistory(optimizer)  # type: ignore[arg-type]
    steps, watching = [], []
    for _ in range(blocks):
        start = time.perf_counter()
        for _ in range(BLOCK):
            optimizer.step()
        steps.append((time.perf_counter() - start) / BLOCK)
        spent = 0.0
        for _ in range(BLOCK):
            optimizer.step()
            start = time.perf_counter()
            history.record()
            spent += time.perf_counter() - start
        start = time.perf_counter()
        assert len(history.read()) == 54
        watching.append((spent + time.perf_counter() - start) / BLOCK)
    step, watch = statistics.median(steps), statistics.median(watching)
    lines = [
        "| LARS step, ms | recording and reading, ms per step | share |",
        "|---:|---:|---:|",
        f"| {1e3 * step:.2f} | {1e3 * watch:.4f} | {watch / step:.2%} |",
    ]
    about = f"{date.today().isoformat()}, {processor()}, {len(os.sched_getaffinity(0))} cores, "
    about += f"medians of {blocks} blocks, torch {versions()['torch']}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "trust_ratios.md").write_text("\n".join(lines) + f"\n\n{about}\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
