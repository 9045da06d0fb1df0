"""Report the gradients and updates that FP16 flushes to zero, and the loss scale that keeps them.

FP16 represents magnitudes from 2^-24 to 65504. Gradients are often smaller; a loss scale shifts
them up, as far as the largest one stays finite (Micikevicius et al. 2018, arXiv 1710.03740,
sections 3.2 and 4). Updates are not scaled: small ones need FP32 master weights (section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .masters import current_master
from .precision import Precision

# FP16 rounds magnitudes up to half of its smallest number, 2^-25, to zero (a tie goes to even).
_FLUSHED_EXPONENT = -25
_LARGEST = 65504.0

# Magnitudes are counted by binary exponent: bin i holds 2^(i - _SHIFT - 1) < x <= 2^(i - _SHIFT).
_SHIFT, _BINS = 150, 280

# Exponent of the largest loss scale considered; beyond it a scaled FP32 loss nears its own limit.
_MAX_EXPONENT = 31

#: The fraction of a layer's gradients that a scale may flush in addition and still be chosen.
TOLERATED_FLUSHED = 1e-3

#: Factor by which the largest gradient seen should stay below FP16's largest number, since later
#: gradients may be larger.
LOSS_SCALE_HEADROOM = 8.0


@dataclass
class LayerUnderflow:
    """The gradients and updates of one layer, a module that holds parameters directly.

    Attributes:
        name: name of the module.
        gradients: histogram of the magnitudes of unscaled gradient values, of the layer's
            parameters and of its output: counts by binary exponent, int64, without zeros.
        updates: histogram of the magnitudes of the optimizer's changes to the parameters.
        lost: number of changes that would not have changed a weight stored in FP16.
        changed: number of changes, without zeros.
    """

    name: str
    gradients: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    updates: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    lost: int = 0
    changed: int = 0

    def gradients_flushed(self, loss_scale: float) -> float:
        """Return the fraction of gradient values that FP16 flushes to zero at a loss scale.

        A scale that is not a power of two counts as the power of two below it.
        """
        return _fraction_flushed(self.gradients, loss_scale)

    @property
    def updates_flushed(self) -> float:
        """The fraction of updates that are zero when cast to FP16."""
        return _fraction_flushed(self.updates, 1.0)

    @property
    def updates_lost(self) -> float:
        """The fraction of updates that would not change an FP16 weight."""
        return self.lost / self.changed if self.changed else 0.0


@dataclass
class UnderflowReport:
    """The values that FP16 would flush to zero over the observed steps.

    Attributes:
        layers: one entry per layer, in the order of the model's modules.
        steps: number of observed optimizer steps.
        largest_gradient: the largest magnitude of any unscaled gradient value.
    """

    layers: list[LayerUnderflow]
    steps: int = 0
    largest_gradient: float = 0.0

    @property
    def total(self) -> LayerUnderflow:
        """The sum over all layers."""
        total = LayerUnderflow("all layers")
        for layer in self.layers:
            total.gradients += layer.gradients
            total.updates += layer.updates
            total.lost += layer.lost
            total.changed += layer.changed
        return total

    @property
    def largest_loss_scale(self) -> float:
        """The largest power of two that keeps gradients ``LOSS_SCALE_HEADROOM`` below overflow."""
        if not self.largest_gradient > 0:
            return 1.0
        largest = _LARGEST / LOSS_SCALE_HEADROOM / self.largest_gradient
        return 2.0 ** min(_MAX_EXPONENT, math.floor(math.log2(largest)))

    @property
    def best_loss_scale(self) -> float:
        """The smallest power of two that flushes hardly more than ``largest_loss_scale``.

        In no layer is the fraction of flushed gradients more than 0.1 percentage points larger.
        The scale is at least 1 unless 1 would overflow.
        """
        best = largest = self.largest_loss_scale
        allowed = [layer.gradients_flushed(largest) + TOLERATED_FLUSHED for layer in self.layers]
        while best > 1 and all(
            layer.gradients_flushed(best / 2) <= fraction
            for layer, fraction in zip(self.layers, allowed, strict=True)
        ):
            best /= 2
        return best


@contextmanager
def underflow_report(
    model: nn.Module, optimizer: Optimizer, precision: Precision | None = None
) -> Iterator[UnderflowReport]:
    """Observe the gradients and updates of the optimizer steps inside a ``with`` block.

    The gradients are those that the optimizer receives, after accumulation and all-reduce, and
    those of each layer's output, which backward computes on the way. Train in FP32 or BF16 to see
    small values: those that FP16 has already flushed are not counted.

    Args:
        model: the model, not wrapped in DDP.
        optimizer: the optimizer of its parameters, which are in FP32 or have FP32 masters.
        precision: the precision of the training loop, if it scales the loss or clips gradients;
            values are counted as they are without either.

    Yields:
        The report, which is updated in each step. Each step waits for the device and needs memory
        for a copy of the parameters.

    Example::

        with underflow_report(model, optimizer) as report:
            train(steps=50)
        print(report.best_loss_scale, report.total.updates_lost)
    """
    owners = {
        parameter: name
        for name, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
    }
    layers = {name: LayerUnderflow(name) for name in dict.fromkeys(owners.values())}
    report = UnderflowReport(list(layers.values()))
    before: dict[Tensor, Tensor] = {}

    def count_gradient(
        layer: LayerUnderflow, gradient: Tensor, scale: float | Tensor | None = None
    ) -> None:
        if scale is None:
            scale = 1.0 if precision is None else precision.loss_scale
        values = gradient.detach().float() / scale
        if bool(values.isfinite().all()):  # otherwise this step will be skipped
            layer.gradients += _count(values)
            largest = values.abs().max().item() if values.numel() else 0.0
            report.largest_gradient = max(report.largest_gradient, largest)

    def watch_output(layer: LayerUnderflow, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(count_gradient, layer))

    def before_step(_: Optimizer, args: Any, kwargs: Any) -> None:
        scale = 1.0
        if precision is not None:
            scale = precision._scaler.gradient_scale_in_step(optimizer)
        for parameter, name in owners.items():
            if parameter.grad is not None:
                before[parameter] = current_master(optimizer, parameter).float().clone()
                count_gradient(layers[name], parameter.grad, scale)

    def after_step(_: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, old in before.items():
            layer = layers[owners[parameter]]
            new = current_master(optimizer, parameter).float()
            changed = new != old
            layer.updates += _count(new - old)
            layer.changed += int(changed.sum())
            half = old.to(torch.float16)
            update = (new - old).to(torch.float16)
            layer.lost += int((changed & (half + update == half)).sum())
        before.clear()
        report.steps += 1

    handles = [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(after_step),
        *(
            module.register_forward_hook(partial(watch_output, layers[name]))
            for name, module in model.named_modules()
            if name in layers
        ),
    ]
    try:
        yield report
    finally:
        for handle in handles:
            handle.remove()


def _count(values: Tensor) -> Tensor:
    """Count ``values`` by binary exponent, without zeros: int64, shape ``[_BINS]``, on the CPU."""
    # In FP64, where even the smallest FP32 number has a smaller neighbour above zero.
    magnitudes = values.detach().double().abs().flatten()
    magnitudes = magnitudes[magnitudes > 0]
    # The next smaller number, so that a power of two falls at the top of its bin.
    exponents = torch.frexp(
        torch.nextafter(magnitudes, torch.zeros_like(magnitudes))
    ).exponent.long()
    return torch.bincount(exponents + _SHIFT, minlength=_BINS)[:_BINS].cpu()


def _fraction_flushed(counts: Tensor, loss_scale: float) -> float:
    """Return the fraction of counted values that FP16 flushes at ``loss_scale``."""
    total = int(counts.sum())
    # The bin whose upper end is 2^-25 divided by the scale.
    top = _FLUSHED_EXPONENT - math.floor(math.log2(loss_scale)) + _SHIFT
    return int(counts[: max(0, top + 1)].sum()) / total if total else 0.0
