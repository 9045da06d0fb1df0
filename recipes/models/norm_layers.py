"""Batch norm layers whose statistics are of other images than those of one forward pass.

Both take the place of a ``torch.nn.BatchNorm`` in a model that is already built: the layer becomes
one of another class, with the parameters, buffers, hooks and options that it has. So checkpoints
and weights are those of plain batch norm, and what holds its parameters need not know. They are
told from plain layers while the model trains only: to evaluate, all use running statistics.

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

    Running statistics move once per forward pass, by the mean over the slices. That is what as
    many ranks would have with a slice each, when theirs are averaged: a large machine that is
    emulated on a small one evaluates the same.

    Attributes:
        images: in a slice.
    """

    images: int

    @classmethod
    def put_in_place_of(cls, layer: _BatchNorm, images: int) -> None:
        """Make ``layer`` one of this kind."""
        layer.__class__ = cls
        layer.images = images  # type: ignore[assignment]

    def _check_input_dim(self, input: Tensor) -> None:
        """Any input with channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise.

        Args:
            input: shape ``[n, channels, ...]``; in training ``n`` is a multiple of ``images``.

        Raises:
            ValueError: it is not.
        """
        if not self.training:
            return _activated(self, super().forward(input))
        if len(input) % self.images:
            raise ValueError(f"{len(input)} images are not in slices of {self.images}")
        slices = input.split(self.images)
        factor = _update_factor(self)
        means = _copies(self.running_mean, len(slices))
        variances = _copies(self.running_var, len(slices))
        output = torch.cat(
            [
                F.batch_norm(piece, mean, var, self.weight, self.bias, True, factor, self.eps)
                for piece, mean, var in zip(slices, means, variances, strict=True)
            ]
        )
        with torch.no_grad():
            for running, moved in ((self.running_mean, means), (self.running_var, variances)):
                if running is not None:
                    running.copy_(torch.stack(moved).mean(0))
        return _activated(self, output)


class SharedBatchNorm(_BatchNorm):
    """Batch norm over the micro-batches of several ranks, in plain PyTorch: for processors, where
    ``torch.nn.SyncBatchNorm`` does not run.

    In training, forward and backward are collectives of the group. A deep copy has the same group.
    """

    process_group: Any  # as torch's has it

    @classmethod
    def put_in_place_of(cls, layer: _BatchNorm, group: ProcessGroup) -> None:
        """Make ``layer`` one of this kind, over the ranks of ``group``."""
        layer.__class__ = cls
        layer.process_group = group  # type: ignore[assignment]

    def _check_input_dim(self, input: Tensor) -> None:
        """Any input with channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise.

        Args:
            input: shape ``[n, channels, ...]``; ``n`` may differ between ranks, but not be 0.
        """
        output = self._of_all_ranks(input) if self.training else super().forward(input)
        return _activated(self, output)

    # Compilers go round it: they would trace collectives, and a shape that depends on the data.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _of_all_ranks(self, input: Tensor) -> Tensor:
        output: Tensor
        output, mean, variance = _Shared.apply(
            input, self.weight, self.bias, self.eps, self.process_group
        )
        factor = _update_factor(self)
        with torch.no_grad():
            for running, of_all in ((self.running_mean, mean), (self.running_var, variance)):
                if running is not None:
                    running.lerp_(of_all.to(running.dtype), factor)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedBatchNorm:
        memo[id(self.process_group)] = self.process_group  # which cannot be copied
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


class SharedBatchNormOfGpus(SharedBatchNorm, nn.SyncBatchNorm):
    """The same by torch's kernels, for GPUs. DDP refuses it on processors.

    Torch's forward pass waits for the device in each layer
    (https://github.com/pytorch/pytorch/issues/78549).
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _of_all_ranks(self, input: Tensor) -> Tensor:
        return nn.SyncBatchNorm.forward(self, input)


class _Shared(torch.autograd.Function):
    """Batch norm over all ranks of a group, as ``torch.nn.SyncBatchNorm`` has it on GPUs.

    Ranks exchange mean, biased variance and number of their values, and put them together by the
    law of total variance, which does not cancel as a mean of squares does (Chan et al. 1979).
    They are gathered, not reduced, so that all ranks come to the same bits. Gradients of gamma and
    beta are each rank's own: DDP averages them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output in the dtype of ``x``; and of all ranks' values, per channel, in FP32 or
        more, their mean and unbiased variance."""
        channels, dims = x.shape[1], _all_but_channels(x)
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = torch.var_mean(values, dims, correction=0)
        own = torch.cat([mean, variance, mean.new_tensor([values.numel() // channels])])
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, own, group)
        means, variances, counts = torch.stack(gathered).split([channels, channels, 1], 1)
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        variance = ((variances + (means - mean).square()) * counts).sum(0) / count
        deviation_inverse = (variance + eps).rsqrt()
        ctx.group = group
        ctx.save_for_backward(x, weight, mean, deviation_inverse, count)
        output = (values - _along(mean, x)) * _along(deviation_inverse, x)
        if weight is not None:
            output = output * _along(weight, x)
        if bias is not None:
            output = output + _along(bias, x)
        unbiased = variance * (count / (count - 1))
        ctx.mark_non_differentiable(mean, unbiased)
        return output.to(x.dtype), mean, unbiased

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, mean, deviation_inverse, count = ctx.saved_tensors
        dims = _all_but_channels(x)
        normalised = (x.to(mean.dtype) - _along(mean, x)) * _along(deviation_inverse, x)
        dy = grad.to(mean.dtype)
        sums = torch.stack([dy.sum(dims), (dy * normalised).sum(dims)])
        of_bias, of_weight = sums.clone()
        dx = None
        if ctx.needs_input_grad[0]:
            dist.all_reduce(sums, group=ctx.group)
            dy_mean, dy_normalised_mean = sums / count
            dx = dy - _along(dy_mean, x) - normalised * _along(dy_normalised_mean, x)
            scale = deviation_inverse if weight is None else deviation_inverse * weight
            dx = (dx * _along(scale, x)).to(x.dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        return (
            dx,
            of_weight.to(weight.dtype) if needs_weight else None,
            of_bias.to(weight.dtype if weight is not None else mean.dtype) if needs_bias else None,
            None,
            None,
        )


def _update_factor(layer: _BatchNorm) -> float:
    """Count a batch, and give the share that it has in running statistics."""
    if layer.num_batches_tracked is None:
        return 0.0
    layer.num_batches_tracked.add_(1)
    if layer.momentum is None:  # their plain mean over all batches
        return 1.0 / float(layer.num_batches_tracked)
    return layer.momentum


def _copies(running: Tensor | None, count: int) -> list[Any]:
    """One for each slice, to move as if it were a rank's; None where nothing is tracked."""
    return [None if running is None else running.clone() for _ in range(count)]


def _activated(layer: nn.Module, output: Tensor) -> Tensor:
    """What timm's layers do after they have normalised."""
    for name in ("drop", "act"):
        if hasattr(layer, name):
            output = getattr(layer, name)(output)
    return output


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(per_channel: Tensor, x: Tensor) -> Tensor:
    """``per_channel`` in a shape that broadcasts over ``x``."""
    return per_channel.view(-1, *[1] * (x.dim() - 2))
