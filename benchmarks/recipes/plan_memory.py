"""Measure how well the memory that `largebatch plan` counts agrees with the growth of a process.

    python -m benchmarks.recipes.plan_memory

Each case trains a few steps of a recipe's model, precision and optimizer on the CPU, in a process
of its own, and compares the largest resident set (VmHWM of /proc/self/status) beyond that before
the model was made with the peak that is counted on tensors without numbers. It is no timing: other
programs on the machine do not matter. Linux only.

What the comparison needs:
- glibc must give freed tensors back at once. By itself it raises the size from which it does so up
  to 32 MiB, and keeps what is below. MALLOC_MMAP_THRESHOLD_ holds it at 64 KiB.
- oneDNN has taken its kernels and threads: a small network of the same kind is trained first.
- One thread, as oneDNN's workspaces grow with their number.
Results go to benchmarks/results/plan_memory.json and .md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import tables
from largebatch.amp import Precision
from largebatch.recipes.models.build import build_model
from largebatch.recipes.models.optimizers import build_optimizer
from largebatch.recipes.predict.memory import MemoryCounter
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.build import loss_of
from largebatch.recipes.training.evaluate import WeightAverage
from largebatch.recipes.training.step import TrainingStep

RESULTS = tables.RESULTS
#: How far the count may be off, as a share.
BOUND = 0.2

#: How glibc and the threads must behave, see above.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}

_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A training step to measure."""

    model: str
    image_size: int
    micro_batch_size: int
    precision: str = "fp32"
    optimizer: str = "lars"
    accumulation: int = 1
    ema: bool = False

    @property
    def keys(self) -> list[str]:
        """Overrides of the recipe that the step is taken from."""
        return [
            f"model.name={self.model}",
            *([f"model.args.img_size={self.image_size}"] if self.model in _FIXED_SIZE else []),
            f"data.image_size={self.image_size}",
            f"data.eval_resize={max(256, self.image_size)}",
            f"micro_batch_size={self.micro_batch_size}",
            f"batch_size={self.micro_batch_size * self.accumulation}",
            f"precision={self.precision}",
            f"optimizer.name={self.optimizer}",
            f"ema.decay={0.999 if self.ema else 'null'}",
            "optimizer.lr=0.01",
            "schedule.warmup=0",
            "schedule.decay=null",
            "device=cpu",
            "loss_scale=none",
        ]

    def __str__(self) -> str:
        more = [f"{self.micro_batch_size} x {self.image_size} px", self.precision, self.optimizer]
        more += [f"{self.accumulation} accumulated"] * (self.accumulation > 1)
        return ", ".join([self.model, *more, *["EMA"] * self.ema])


_FIXED_SIZE = ("alexnet_bn", "vit_small_patch16_224")

CASES = (
    Case("resnet18", 112, 32),
    Case("resnet18", 112, 32, "bf16"),
    Case("resnet50", 64, 16),
    Case("resnet50", 64, 16, "bf16"),
    Case("resnet50", 64, 16, "bf16-master"),
    Case("resnet50", 64, 8, accumulation=2),
    Case("resnet50", 64, 4, "bf16", optimizer="adamw", ema=True),
    Case("resnet50", 64, 4, "bf16-master", optimizer="sgd"),
    Case("alexnet_bn", 227, 8),
    Case("alexnet_bn", 227, 8, "bf16"),
    Case("vit_small_patch16_224", 112, 16),
    Case("efficientnet_b0", 96, 8),
)
SHORT = (Case("resnet18", 64, 16), Case("resnet18", 64, 16, "bf16"))


def predicted(case: Case) -> dict[str, Any]:
    """Count the memory of a case, in bytes by part."""
    recipe = load("resnet50-b65536", case.keys).recipe
    counted = MemoryCounter(recipe, 1000).count(
        case.precision, case.micro_batch_size, case.image_size, accumulation=case.accumulation
    )
    return asdict(counted)


def growth_bytes(case: Case) -> int:
    """Train a case in this process and return by how much its largest resident set grew."""
    torch.manual_seed(0)

    def train(recipe: Any, steps: int) -> None:
        precision = Precision(recipe.precision, loss_scale="none")
        model = build_model(recipe.model, 1000)
        model = precision.convert(model)
        optimizer = build_optimizer(recipe, model)
        step = TrainingStep(model, None, optimizer, precision, loss=loss_of(recipe))
        decay = recipe.ema.decay
        average = None if decay is None else WeightAverage(model, optimizer, decay)
        count, size = recipe.micro_batch_size, recipe.data.image_size
        accumulation = recipe.batch_size // count
        images, labels = torch.randn(count, 3, size, size), torch.zeros(count, dtype=torch.int64)
        for _ in range(steps):
            for place in range(accumulation):
                step.forward_backward(images, labels, place, accumulation)
            step.update()
            optimizer.zero_grad(set_to_none=True)
            if average is not None:
                average.update()

    small = Case("test_resnet", 32, 2, case.precision, case.optimizer, ema=case.ema)
    train(load("resnet50-b65536", small.keys).recipe, 2)
    recipe = load("resnet50-b65536", case.keys).recipe
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest so far is that of now
    train(recipe, _STEPS)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def measured(case: Case) -> int:
    """Measure a case in a process of its own, in bytes."""
    command = [sys.executable, "-m", "benchmarks.recipes.plan_memory", "--one"]
    done = subprocess.run(
        [*command, json.dumps(asdict(case))],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return int(done.stdout.split()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results in Markdown."""
    heads = ("counted (MB)", "measured (MB)", "counted / measured")
    ratios = [row["predicted"]["peak"] / row["measured"] for row in rows]
    cells = [
        (
            row["case"],
            *(f"{x / 1e6:.0f}" for x in (row["predicted"]["peak"], row["measured"])),
            f"{ratio:.2f}",
        )
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    within = sum(1 / (1 + BOUND) <= ratio <= 1 + BOUND for ratio in ratios)
    return "\n".join([
        tables.table({"training step": "l", **dict.fromkeys(heads, "r")}, cells),
        "",
        f"Within {BOUND:.0%}: {within} of {len(rows)}, from {min(ratios):.2f} to "
        f"{max(ratios):.2f}. Measured: growth of the largest resident set of a process with one "
        f"thread in {_STEPS} steps, with MALLOC_MMAP_THRESHOLD_=65536.",
    ])  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = tables.parser(__doc__)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(growth_bytes(Case(**json.loads(options.one))))
        return
    rows = []
    for case in CASES:
        counted, found = predicted(case), measured(case)
        rows.append({"case": str(case), "predicted": counted, "measured": found})
        print(table(rows[-1:]), flush=True)
    tables.store(RESULTS / "plan_memory.json", {**tables.origin(), "rows": rows})
    (RESULTS / "plan_memory.md").write_text(f"{table(rows)}\n\n{tables.about()}\n")


if __name__ == "__main__":
    main()
