"""Claim: measuring the gradient noise scale in every tenth step costs less than 0.5 % of training.

    python -m benchmarks.lars.gradient_noise [--steps 10]

A training step of ResNet-50 in FP32 on the CPU, in two micro-batches of 8 images. The cost of a
measured step is the time in the hooks of its backward passes and in GradientNoise.step(), as a
share of the median step that is not measured; between measured steps there are no hooks. Steps
take turns.

The table of operators and bytes is counted, not measured. Each operator is one launch on a GPU, or
a few for a multi-tensor one. Bytes are those of the gradients, which are read once more per
backward pass and once per step; the floor is their time at 4.8 TB/s, the bandwidth of an H200 SXM
by NVIDIA's datasheet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lars.muon_cost import BANDWIDTH
from benchmarks.tables import RESULTS
from largebatch.lars import LARS, GradientNoise
from largebatch.recipes.training.summary import processor, versions

EVERY = 10
GOAL = 0.005
PASSES, IMAGES = 2, 8


class TimedNoise(GradientNoise):
    """Adds up the seconds that the host spends in hooks and in step()."""

    seconds = 0.0

    def _see(self, index: int, gradient: Tensor) -> None:
        start = time.perf_counter()
        super()._see(index, gradient)
        self.seconds += time.perf_counter() - start

    def step(self, scale: Tensor | float = 1.0) -> None:
        """Measure the step."""
        start = time.perf_counter()
        super().step(scale)
        self.seconds += time.perf_counter() - start


class Operators(TorchDispatchMode):
    """Counts operators, without views, and the bytes of the gradients that norms read."""

    _VIEWS = ("detach", "select", "slice", "view", "alias", "t", "transpose", "expand")

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in self._VIEWS:
            self.operators += 1
        if "norm" in name:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return function(*args, **(kwargs or {}))


class Cost(NamedTuple):
    """What a measured step adds.

    Attributes:
        of_pass: operators per backward pass.
        of_step: operators per step.
        bytes: of gradients that are read in a step.
    """

    of_pass: int
    of_step: int
    bytes: int


def counted(gradients: list[Tensor], passes: int) -> Cost:
    """Count what a step with gradients of these shapes and dtypes adds."""
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    noise = GradientNoise(parameters, 1)
    counts = []
    for _ in range(passes):
        with Operators() as counter:
            for index, gradient in enumerate(gradients):
                noise._see(index, gradient)
        counts.append(counter)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    with Operators() as of_step:
        noise.step()
    return Cost(
        counts[0].operators, of_step.operators, sum(c.bytes for c in counts) + of_step.bytes
    )


class Times(NamedTuple):
    """Seconds of steps.

    Attributes:
        plain: of steps that are not measured.
        measuring: in hooks and step() of those that are.
    """

    plain: list[float]
    measuring: list[float]


def timed(
    model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]], steps: int, passes: int
) -> Times:
    """Take steps that are measured and steps that are not, in turns."""
    optimizer = LARS(model.parameters(), lr=0.1)
    noise = TimedNoise(model.parameters(), len(batch()[1]))
    times = Times([], [])
    for number in range(2 * steps + 2):
        noise.seconds = 0.0
        noise.watch(number % 2 == 1)
        start = time.perf_counter()
        for _ in range(passes):
            images, labels = batch()
            (F.cross_entropy(model(images), labels) / passes).backward()
        noise.step()
        optimizer.step()
        optimizer.zero_grad()
        took = time.perf_counter() - start
        if number >= 2 and number % 2:  # after one of each
            times.measuring.append(noise.seconds)
        elif number >= 2:
            times.plain.append(took)
    found = noise.estimate()
    assert found.steps == steps + 1
    return times


def table(cost: Cost, times: Times, passes: int) -> str:
    """Return the tables in Markdown."""
    step, measuring = statistics.median(times.plain), statistics.median(times.measuring)
    total = passes * cost.of_pass + cost.of_step
    return "\n".join(
        [
            f"| training step, ms | measuring, ms | share of a measured step | every {EVERY} "
            "steps |",
            "|---:|---:|---:|---:|",
            f"| {1e3 * step:.0f} | {1e3 * measuring:.2f} | {measuring / step:.2%} | "
            f"{measuring / step / EVERY:.3%} |",
            "",
            "| operators of a backward pass | of a step beside | in all | gradients read, MB "
            "| at 4.8 TB/s, ms |",
            "|---:|---:|---:|---:|---:|",
            f"| {cost.of_pass} | {cost.of_step} | {total} | {cost.bytes / 1e6:.0f} | "
            f"{1e3 * cost.bytes / BANDWIDTH:.3f} |",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    steps = parser.parse_args().steps
    import timm

    torch.manual_seed(0)
    model = timm.create_model("resnet50")
    images, labels = torch.randn(IMAGES, 3, 224, 224), torch.randint(1000, (IMAGES,))
    cost = counted([torch.zeros_like(p) for p in model.parameters()], PASSES)
    times = timed(model, lambda: (images, labels), steps, PASSES)
    share = statistics.median(times.measuring) / statistics.median(times.plain) / EVERY
    lines = table(cost, times, PASSES)
    about = f"{date.today().isoformat()}, {processor()}, {len(os.sched_getaffinity(0))} cores, "
    about += f"{PASSES} micro-batches of {IMAGES} images, medians of {steps} steps, "
    about += f"torch {versions()['torch']}; goal {GOAL:.1%}: {'met' if share < GOAL else 'not met'}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gradient_noise.md").write_text(f"{lines}\n\n{about}\n")
    print(f"{lines}\n\n{about}")


if __name__ == "__main__":
    main()
