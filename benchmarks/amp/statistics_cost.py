"""What it costs a ResNet-50 step to be able to put back running statistics.

    python -m benchmarks.amp.statistics_cost [--device cuda --images 256]

Steps of a model that is watched and of one that is not take turns. Their difference drowns in the
noise of a shared machine, so the time inside the watching, on the host, is printed too.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torchvision
from torch.nn.functional import cross_entropy

from largebatch.amp import Precision
from largebatch.amp import statistics as watching
from largebatch.lars import LARS

GOAL = 0.02  # of a step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    form = "fp16" if args.device == "cuda" else "fp32"  # CPUs are slow in FP16
    x = torch.randn(args.images, 3, 224, 224, device=args.device)
    labels = torch.randint(0, 1000, (args.images,), device=args.device)
    plain = torchvision.models.resnet50().to(args.device)
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            spent[0] += time.perf_counter() - start
            return result

        return call

    precisions = [Precision(form, args.device, loss_scale="dynamic") for _ in range(2)]
    models = [precisions[0].convert(copy.deepcopy(plain)), plain]
    optimizers = [LARS(model.parameters(), 0.1) for model in models]
    seconds: list[list[float]] = [[], []]
    for name in ("remember", "end"):
        method = timed(getattr(watching.Statistics, name))
        mock.patch.object(watching.Statistics, name, method).start()
    hook = timed(watching._before_forward)
    for module in models[0].modules():
        for key, value in module._forward_pre_hooks.items():
            if value is watching._before_forward:
                module._forward_pre_hooks[key] = hook
    for step in range(args.steps + 2):
        for which, (precision, model, optimizer) in enumerate(
            zip(precisions, models, optimizers, strict=True)
        ):
            start = time.perf_counter()
            with precision.forward():
                loss = cross_entropy(model(x), labels)
            precision.backward(loss)
            precision.step(optimizer)
            optimizer.zero_grad()
            if args.device == "cuda":
                torch.cuda.synchronize()
            seconds[which].append(time.perf_counter() - start)
        if step == 1:  # both are warm
            seconds, spent[0] = [[], []], 0.0
    watched, unwatched = map(statistics.median, seconds)
    inside = spent[0] / args.steps
    print(f"ResNet-50, {args.images} images, {args.device}, torch {torch.__version__}")
    print(f"step: {watched:.3f} s watched, {unwatched:.3f} s unwatched, medians of {args.steps}")
    print(f"inside the watching: {1e3 * inside:.2f} ms, {inside / unwatched:.2%} of a step")
    print(f"goal of at most {GOAL:.0%}: {'held' if inside <= GOAL * unwatched else 'missed'}")


if __name__ == "__main__":
    main()
