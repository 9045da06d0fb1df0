"""DistributedDataParallel with the buckets and the all-reduce of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

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
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    loader: Loader,
    forward_backward: Callable[[Tensor, Tensor, int], object],
) -> None:
    """Train one micro-batch of zeros without a step, so that DDP fixes its buckets beforehand.

    DDP rebuilds its buckets after its first backward pass, in the order in which gradients became
    ready, which changes the order of summation. Without this, a resumed run would rebuild them at
    another step than the uninterrupted run. Weights and buffers stay as they are.

    The pass is that of training, on a batch of the same form, so that torch.compile compiles once
    and cuDNN tries its algorithms once.

    Args:
        ddp: The model, which has not been run yet.
        optimizer: Optimizer of its parameters, whose gradients are cleared afterwards.
        loader: Loader of the training images.
        forward_backward: The forward and backward pass of training; takes images, labels and the
            number of micro-batches of this rank in a global batch.
    """
    model: nn.Module = ddp.module
    buffers = [buffer.clone() for buffer in model.buffers()]
    images, labels = loader.empty_batch()
    forward_backward(images.zero_(), labels.zero_(), loader.accumulation)
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)
