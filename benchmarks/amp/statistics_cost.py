"""What it costs a ResNet-50 step to be able to put back running statistics.

    python -m benchmarks.amp.statistics_cost [--device cuda --images 256]

Steps of a model that is watched and of one that is not take turns. Their difference drowns in the
noise of a shared machine, so the host's time inside the watching is printed too.
"""

import argparse
import copy
import statistics
import time
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
    plain, spent = torchvision.models.resnet50().to(args.device), [0.0]

    def timed(function):
        def call(*arguments):
            start = time.perf_counter()
            function(*arguments)
            spent[0] += time.perf_counter() - start

        return call

    for owner, name in (
        (watching, "_before_forward"),  # before convert registers it
        (watching.Statistics, "remember"),
        (watching.Statistics, "end"),
    ):
        mock.patch.object(owner, name, timed(getattr(owner, name))).start()
    models, seconds, loops = [copy.deepcopy(plain), plain], ([], []), []
    for model in models:
        precision = Precision(form, args.device, loss_scale="dynamic")
        loops.append((precision, model, LARS(model.parameters(), 0.1)))
    loops[0][0].convert(models[0])
    for step in range(args.steps + 2):
        if step == 2:  # both are warm
            seconds, spent[0] = ([], []), 0.0
        for (precision, model, optimizer), times in zip(loops, seconds, strict=True):
            start = time.perf_counter()
            with precision.forward():
                loss = cross_entropy(model(x), labels)
            precision.backward(loss)
            precision.step(optimizer)
            optimizer.zero_grad()
            if args.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    (watched, unwatched), inside = map(statistics.median, seconds), spent[0] / args.steps
    print(f"ResNet-50, {args.images} images, {args.device}, torch {torch.__version__}")
    print(f"step: {watched:.3f} s watched, {unwatched:.3f} s unwatched, medians of {args.steps}")
    print(f"inside the watching: {1e3 * inside:.2f} ms, {inside / unwatched:.2%} of a step")
    print(f"goal of at most {GOAL:.0%}: {'held' if inside <= GOAL * unwatched else 'missed'}")


if __name__ == "__main__":
    main()
