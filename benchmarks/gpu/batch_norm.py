"""Batch norm over ranks: two ranks on one GPU, by gloo, against one process with all images."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.place import TRAINER, need
from benchmarks.gpu.ranks import on_ranks
from benchmarks.gpu.report import Case

#: Dtype and memory format of the images.
CASES = [
    (torch.float32, torch.channels_last),
    (torch.bfloat16, torch.channels_last),
]

_SHARES = (5, 3)  # number of images of each rank
_CHANNELS = 6


def cases() -> Iterator[Case]:
    """Yield the check."""
    yield Case("batch norm: two ranks are one process", two_ranks_are_one_process)


def two_ranks_are_one_process(device: torch.device) -> None:
    """Compare outputs, gradients and running statistics in training, and outputs in evaluation."""
    need(*TRAINER)
    found, problems = on_ranks(2, _rank, device, backend="gloo", device=device, seconds=90)
    if problems:
        raise RuntimeError("; ".join(problems))
    for number, case in enumerate(CASES):
        bound = 1e-4 if case[0] == torch.float32 else 3e-2
        for key, expected in _results(_layer(device), *_inputs(case, device)).items():
            parts = [torch.from_numpy(of_rank[f"{number} {key}"]) for of_rank in found]
            if key in ("output", "evaluated", "input_gradient"):
                parts = [torch.cat(parts)]
            elif "gradient" in key:  # each rank has its own share, which DDP would sum
                parts = [parts[0] + parts[1]]
            for part in parts:
                torch.testing.assert_close(part, expected.float().cpu(), rtol=bound, atol=bound)


def _rank(tell: Callable[[str, Any], None], device: torch.device) -> None:
    from largebatch.recipes.models.norm_layers import SharedBatchNorm, SharedBatchNormOfGpus

    group = dist.new_group([0, 1])
    assert group is not None
    kind = SharedBatchNorm if device.type == "cpu" else SharedBatchNormOfGpus
    for number, case in enumerate(CASES):
        layer = _layer(device)
        kind.put_in_place_of(layer, group)
        images, factors = (t.split(_SHARES)[dist.get_rank()] for t in _inputs(case, device))
        for key, value in _results(layer, images, factors).items():
            tell(f"{number} {key}", value.detach().float().cpu().numpy())
    dist.barrier()


def _layer(device: torch.device) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(_CHANNELS, momentum=0.3)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2)
        layer.bias.uniform_(-1, 1)
    return layer.to(device)


def _inputs(
    case: tuple[torch.dtype, torch.memory_format], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the images, and the weights of the outputs in the loss."""
    generator = torch.Generator().manual_seed(1)
    shape = (sum(_SHARES), _CHANNELS, 7, 7)
    images = 3 + 2 * torch.randn(shape, generator=generator)
    factors = torch.randn(shape, generator=generator)
    dtype, layout = case
    return images.to(device, dtype, memory_format=layout), factors.to(device)


def _results(layer: nn.BatchNorm2d, images: Tensor, factors: Tensor) -> dict[str, Tensor]:
    images = images.detach().requires_grad_()
    output = layer(images)
    (output.float() * factors).sum().backward()
    found: dict[str, Any] = {
        "output": output.detach(),
        "input_gradient": images.grad,
        "gamma_gradient": layer.weight.grad,
        "beta_gradient": layer.bias.grad,
        "running_mean": layer.running_mean,
        "running_var": layer.running_var,
        "evaluated": copy.deepcopy(layer).eval()(images).detach(),
    }
    return found
