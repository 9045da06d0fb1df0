"""Batch norm layers whose statistics do not cover exactly the images of one forward pass.

Each replaces a ``torch.nn.BatchNorm`` in a model that is already built by changing the class of the
layer, which keeps its parameters, buffers, hooks and options. So checkpoints and weights are those
of plain batch norm, and references to its parameters stay valid. They differ from plain layers in
training only: in evaluation, all use running statistics.

timm's layers with an activation inside (``BatchNormAct2d``) apply it as before.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm


class GhostBatchNorm(_BatchNorm):
    """Batch norm over slices of consecutive images (Hoffer et al. 2017, arXiv:1705.08741).

    Running statistics are updated once per forward pass, with the mean over the slices. Ranks that
    have one slice each and average their running statistics arrive at the same values, so a large
    machine that is emulated on a small one evaluates the same.
    """

    images: int  # per slice

    @classmethod
    def put_in_place_of(cls, layer: _BatchNorm, images: int) -> None:
        """Change the class of ``layer`` to this one."""
        layer.__class__ = cls
        layer.images = images  # type: ignore[assignment]

    def _check_input_dim(self, input: Tensor) -> None:
        """Any input with channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``[n, channels, ...]``, where ``n`` is a multiple of ``images`` in training."""
        if not self.training:
            return _activated(self, super().forward(input))
        if len(input) % self.images:
            raise ValueError(f"{len(input)} images do not divide into slices of {self.images}")
        slices = input.split(self.images)
        factor = _update_factor(self)
        # A copy for each slice, to update as if it were a rank's; None where nothing is tracked.
        means, variances = (
            [None if running is None else running.clone() for _ in slices]
            for running in (self.running_mean, self.running_var)
        )
        output = torch.cat(
            [
                F.batch_norm(piece, mean, var, self.weight, self.bias, True, factor, self.eps)
                for piece, mean, var in zip(slices, means, variances, strict=True)
            ]
        )
        with torch.no_grad():
            for running, moved in ((self.running_mean, means), (self.running_var, variances)):
                if running is not None:
                    running.copy_(torch.stack(moved).mean(0))  # type: ignore[arg-type]
        return _activated(self, output)


class SharedBatchNorm(_BatchNorm):
    """Batch norm over the micro-batches of several ranks, in plain PyTorch.

    It is for CPUs, where ``torch.nn.SyncBatchNorm`` does not run. In training, forward and backward
    are collectives of the group. A deep copy has the same group.
    """

    process_group: Any  # as in torch.nn.SyncBatchNorm

    @classmethod
    def put_in_place_of(cls, layer: _BatchNorm, group: ProcessGroup) -> None:
        """Change the class of ``layer`` to this one, over the ranks of ``group``."""
        layer.__class__ = cls
        layer.process_group = group  # type: ignore[assignment]

    def _check_input_dim(self, input: Tensor) -> None:
        """Any input with channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``[n, channels, ...]``; ``n`` may differ between ranks, but must not be 0."""
        output = self._of_all_ranks(input) if self.training else super().forward(input)
        return _activated(self, output)

    # Not compiled: it has collectives, and a shape that depends on the data.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _of_all_ranks(self, input: Tensor) -> Tensor:
        # In FP32 or more. The squares are of differences from the mean of all ranks: the mean of
        # the squares minus the squared mean would cancel. Gradients of gamma and beta are those of
        # each rank, which DDP averages.
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [0, *range(2, input.dim())]
        own = values.new_tensor([values.numel() // values.shape[1]])
        sums = _SumOverRanks.apply(torch.cat([values.sum(dims), own]), self.process_group)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = values - _along(mean, input)
        squares = _SumOverRanks.apply(centred.square().sum(dims), self.process_group)
        variance = squares / count
        output = centred * _along((variance + self.eps).rsqrt(), input)
        if self.weight is not None:
            output = output * _along(self.weight, input)
        if self.bias is not None:
            output = output + _along(self.bias, input)
        factor = _update_factor(self)
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            for running, of_all in ((self.running_mean, mean), (self.running_var, unbiased)):
                if running is not None:
                    running.lerp_(of_all.to(running.dtype), factor)
        return output.to(input.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedBatchNorm:
        memo[id(self.process_group)] = self.process_group  # which cannot be copied
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


class SharedBatchNormOfGpus(SharedBatchNorm, nn.SyncBatchNorm):
    """:class:`SharedBatchNorm` with torch's kernels, for GPUs. DDP refuses it on CPUs.

    In torch's forward pass, the host waits for the device in each layer
    (https://github.com/pytorch/pytorch/issues/78549).
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _of_all_ranks(self, input: Tensor) -> Tensor:
        return nn.SyncBatchNorm.forward(self, input)


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks of a group; its gradient is summed in the same way."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_over_ranks(own, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _sum_over_ranks(grads[0], ctx.group), None


def _sum_over_ranks(own: Tensor, group: ProcessGroup) -> Tensor:
    """Gather and add, so that all ranks arrive at the same bits."""
    own = own.contiguous()
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group)
    return torch.stack(gathered).sum(0)


def _update_factor(layer: _BatchNorm) -> float:
    """Count a batch, and return its weight in the running statistics."""
    if layer.num_batches_tracked is None:
        return 0.0
    layer.num_batches_tracked.add_(1)
    if layer.momentum is None:  # the plain mean over all batches
        return 1.0 / float(layer.num_batches_tracked)
    return layer.momentum


def _activated(layer: nn.Module, output: Tensor) -> Tensor:
    """Apply what timm's layers do after normalization."""
    for name in ("drop", "act"):
        if hasattr(layer, name):
            output = getattr(layer, name)(output)
    return output


def _along(per_channel: Tensor, x: Tensor) -> Tensor:
    """``per_channel`` in a shape that broadcasts over ``x``."""
    return per_channel.view(-1, *[1] * (x.dim() - 2))
