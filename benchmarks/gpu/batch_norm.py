"""Batch norm over ranks: two ranks against plain batch norm on all their images.

Both ranks share the GPU and communicate by gloo, because NCCL needs one GPU per rank.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.contender import end_with_parent
from benchmarks.gpu.place import TRAINER, need

#: Dtype and memory format of the images.
CASES = [
    (torch.float32, torch.contiguous_format),
    (torch.float32, torch.channels_last),
    (torch.bfloat16, torch.channels_last),
]

_SHARES = (5, 3)  # number of images of each rank
_CHANNELS = 6
_TIMEOUT_SECONDS = 120


def two_ranks_are_one_process(device: torch.device) -> None:
    """Compare outputs, gradients and running statistics in training, and outputs in evaluation."""
    need(*TRAINER)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"),
    ):
        spawn = multiprocessing.get_context("spawn")
        other = spawn.Process(target=_other_rank, args=(folder, device))
        other.start()
        try:
            _rank(0, folder, device)
            other.join(_TIMEOUT_SECONDS)
        finally:
            if other.is_alive():
                other.kill()
            other.join()
        assert other.exitcode == 0, f"rank 1 ended with exit code {other.exitcode}"
        found = [torch.load(Path(folder) / str(rank)) for rank in range(2)]
    for number, case in enumerate(CASES):
        ranks = [by_case[number] for by_case in found]
        plain = _results(_layer(device), *_inputs(case, device))
        bound = 1e-4 if case[0] == torch.float32 else 3e-2
        for key, expected in plain.items():
            parts = [rank[key].to(device) for rank in ranks]
            if key in ("output", "evaluated", "input_gradient"):
                parts = [torch.cat(parts)]
            elif "gradient" in key:  # each rank has its own share, which DDP would sum
                parts = [parts[0] + parts[1]]
            for part in parts:
                torch.testing.assert_close(part, expected, rtol=bound, atol=bound)


def _other_rank(folder: str, device: torch.device) -> None:
    end_with_parent()
    _rank(1, folder, device)


def _rank(rank: int, folder: str, device: torch.device) -> None:
    from largebatch.recipes.models.norm_layers import SharedBatchNorm, SharedBatchNormOfGpus

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_TIMEOUT_SECONDS),
    )
    try:
        group = dist.new_group([0, 1])
        assert group is not None
        kind = SharedBatchNorm if device.type == "cpu" else SharedBatchNormOfGpus
        found = []
        for case in CASES:
            layer = _layer(device)
            kind.put_in_place_of(layer, group)
            images, factors = (t.split(_SHARES)[rank] for t in _inputs(case, device))
            found.append(_results(layer, images, factors))
        torch.save(found, Path(folder) / str(rank))
        dist.barrier()
    finally:
        dist.destroy_process_group()


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
    assert images.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return {
        "output": output.detach(),
        "input_gradient": images.grad,
        "gamma_gradient": layer.weight.grad,
        "beta_gradient": layer.bias.grad,
        "running_mean": layer.running_mean,
        "running_var": layer.running_var,
        "evaluated": copy.deepcopy(layer).eval()(images).detach(),
    }
