"""DistributedDataParallel with the buckets and the all-reduce of a plan."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...comm import Plan, Topology, register
from ...pipeline import Loader
from ..ranks import Job
from .evaluate import buffers_kept
from .step import TrainingStep


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


def lay_out_buckets(ddp: DistributedDataParallel, step: TrainingStep, loader: Loader) -> None:
    """Train one micro-batch of zeros without an update, so that DDP fixes its buckets beforehand.

    DDP rebuilds its buckets after its first backward pass, in the order in which gradients became
    ready, which changes the order of summation. Without this, a resumed run would rebuild them at
    another step than the uninterrupted run. Weights and buffers stay as they are.

    The pass is that of training, on a batch of the same form, so that torch.compile compiles once
    and cuDNN tries its algorithms once.

    Args:
        ddp: The model, which has not been run yet.
        step: The training step of the model. Its gradients are cleared afterwards.
        loader: Loader of the training images.
    """
    images, labels = loader.empty_batch()
    last = loader.accumulation - 1  # the micro-batch whose backward pass reduces
    with buffers_kept(ddp.module):
        step.forward_backward(images.zero_(), labels.zero_(), last, loader.accumulation)
    step.optimizer.zero_grad(set_to_none=True)
    step.precision.abandon()
