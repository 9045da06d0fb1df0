"""Claim: on an H200, the orthogonalisation of a Muon step takes at most 5 % of the training step of
ResNet-50 with 256 images, by FLOPs and bytes.

    python -m benchmarks.lars.muon_cost

Counts and formulas, without a measurement. FLOPs of forward and backward are those that
torch.utils.flop_counter counts on the meta device; FLOPs and bytes of the orthogonalisation are
those of largebatch.lars.muon.cost, with Jordan's five steps for the hidden layers. The rest of a
Muon step moves 20 bytes per FP32 parameter, as SGD with momentum does.

Times are of a roofline: for each batch of equal matrices, the larger of its FLOPs at 989 TFLOP/s
and its bytes at 4.8 TB/s, the dense BF16 (and FP16) rate and the bandwidth of an H200 SXM by
NVIDIA's datasheet. Those of forward and backward count only FLOPs, so that the share is too large
where the step is bound by its bytes, as that of ResNet-50 is in part.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence

import timm
import timm.layers
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.tables import RESULTS
from largebatch.lars import hidden_weights, split_parameters
from largebatch.lars.muon.cost import (
    ELEMENTWISE_BYTES,
    Cost,
    matrices_of,
    model_cost,
    newton_schulz_cost,
)
from largebatch.recipes.models.alexnet import AlexNetBN
from largebatch.recipes.training.summary import versions

IMAGES = 256
TENSOR_FLOPS = 989e12  # per second, dense BF16 and FP16: NVIDIA H200 datasheet
BANDWIDTH = 4.8e12  # bytes per second, the same
GOAL = 0.05
DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ResNet-50": (lambda: timm.create_model("resnet50"), 224),
    "AlexNet-BN": (lambda: AlexNetBN(1000), 227),
    "ViT-B/16": (lambda: timm.create_model("vit_base_patch16_224"), 224),
}


def training_flops(model: nn.Module, pixels: int) -> int:
    """Return the FLOPs of forward and backward of ``IMAGES`` images."""
    images = torch.empty(IMAGES, 3, pixels, pixels, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return int(counter.get_total_flops())


def hidden_shapes(model: nn.Module) -> list[Sequence[int]]:
    """Return the shapes of the weights that are orthogonalised."""
    groups = split_parameters(model, 0.0, orthogonal=hidden_weights(model), named=False)
    return [p.shape for group in groups if group["orthogonal"] for p in group["params"]]


def roofline_seconds(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> float:
    """Return the least time of the orthogonalisation, batch by batch."""
    batches: Counter[tuple[int, ...]] = Counter()
    for shape in shapes:
        count, *matrix = matrices_of(shape)
        batches[tuple(sorted(matrix))] += count
    costs = [
        newton_schulz_cost(*matrix, matrices=count, dtype=dtype)
        for matrix, count in batches.items()
    ]
    return sum(max(cost.flops / TENSOR_FLOPS, cost.bytes_moved / BANDWIDTH) for cost in costs)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    timm.layers.set_fused_attn(False)  # its products are counted one by one
    lines = [
        "| model | matrices, parameters | dtype | GFLOP plain | GFLOP Gram | GFLOP taken "
        "| of forward and backward | GB moved | GB of the rest | extra memory, MB "
        "| roofline, ms | of forward and backward |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    shares = {}
    for title, (make, pixels) in MODELS.items():
        with torch.device("meta"):
            model = make()
        flops = training_flops(model, pixels)
        shapes = hidden_shapes(model)
        numbers = sum(torch.Size(shape).numel() for shape in shapes)
        for name, dtype in DTYPES.items():
            cost: Cost = model_cost(shapes, dtype=dtype)
            least = roofline_seconds(shapes, dtype)
            share = least / (flops / TENSOR_FLOPS)
            shares[title, name] = max(cost.flops / flops, share)
            lines.append(
                f"| {title} | {len(shapes)}, {numbers / 1e6:.1f} M | {name} "
                f"| {cost.plain_flops / 1e9:.0f} | {cost.gram_flops / 1e9:.0f} "
                f"| {cost.flops / 1e9:.0f} | {100 * cost.flops / flops:.1f} % "
                f"| {cost.bytes_moved / 1e9:.2f} | {ELEMENTWISE_BYTES * numbers / 1e9:.2f} "
                f"| {cost.peak_bytes / 1e6:.0f} | {1e3 * least:.2f} | {100 * share:.1f} % |"
            )
            print(lines[-1], flush=True)
        lines.append(
            f"| {title} | forward and backward of {IMAGES} images | | | | {flops / 1e9:,.0f} "
            f"| | | | | {1e3 * flops / TENSOR_FLOPS:.2f} | |"
        )
        print(lines[-1], flush=True)
    reached = shares["ResNet-50", "BF16"]
    verdict = "met" if reached <= GOAL else "missed"
    about = ", ".join(f"{package} {number}" for package, number in versions().items())
    goal = f"Goal, at most {100 * GOAL:.0f} % for ResNet-50 in BF16: {100 * reached:.1f} %"
    lines += ["", f"{goal}, {verdict}.", "", about]
    print(lines[-3])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "muon_cost.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
