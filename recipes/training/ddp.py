"""DistributedDataParallel with the buckets and the all-reduce of a plan."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...amp import Precision
from ...comm import Plan, Topology, register
from ...pipeline import Loader
from ..ranks import Job


def data_parallel(
    model: nn.Module, job: Job, plan: Plan, topology: Topology
) -> DistributedDataParallel:
    """Wrap a model in DistributedDataParallel that reduces gradients by a plan.

    Args:
        model: The model on this rank's device.
        job: The ranks.
        plan: Bucket sizes, and the algorithm and wire dtype for each message size.
        topology: The node of each rank.
    """
    # Buffers are averaged before each evaluation instead of broadcast at each forward pass.
    # torch 2.15 renamed the option.
    names = inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    ddp = DistributedDataParallel(
        model,
        device_ids=[job.device] if job.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **plan.ddp_options(),
        **{option: False},  # type: ignore[arg-type]
    )
    register(ddp, plan, topology)
    return ddp


def lay_out_buckets(
    ddp: DistributedDataParallel, optimizer: Optimizer, precision: Precision, loader: Loader
) -> None:
    """Run one backward pass on zeros, so that DDP fixes its buckets before the first step.

    DDP rebuilds its buckets after its first backward pass, in the order in which gradients became
    ready, which changes the order of summation. Without this, a resumed run would rebuild them at
    another step than the uninterrupted run. Weights and buffers stay as they are.
    """
    model: nn.Module = ddp.module
    buffers = [buffer.clone() for buffer in model.buffers()]
    size, device = loader.image_size, next(model.parameters()).device
    images = torch.zeros(loader.micro_batch_size, 3, size, size, device=device)
    with precision.forward():
        logits = ddp(images)
    logits.float().sum().backward()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)
