"""DistributedDataParallel as the trainer has it: the plan's buckets and all-reduce."""

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
    """The model on all ranks of a job, its gradients reduced as the plan says."""
    # Buffers are averaged before each evaluation, not copied from rank 0 at each forward.
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
    """Have DDP settle its buckets before the first step.

    It lays them out anew after its first backward, in the order in which gradients came, and
    so sums in another order. A resumed run must not have its first backward in between.
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
