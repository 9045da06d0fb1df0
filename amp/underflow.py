"""Which gradients and updates FP16 would flush to zero, and the loss scale that keeps them.

FP16 holds magnitudes from 2^-24 to 65504. Gradients are often smaller; a loss scale moves them up,
and is best when the largest stays finite (Micikevicius et al. 2018, arXiv 1710.03740, sections 3.2
and 4). Updates are not scaled: what is small there needs FP32 master weights (section 3.1).
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

from .precision import Precision

# FP16 rounds to zero what is at most half of its smallest number: 2^-25, a tie that goes to even.
_FLUSHED_EXPONENT = -25
_LARGEST = 65504.0

# Magnitudes are counted by binary exponent: bin i holds 2^(i - _SHIFT - 1) < x <= 2^(i - _SHIFT).
_SHIFT, _BINS = 150, 280

# 2^31: beyond, a scaled loss of FP32 is near its own end.
_MOST = 31

#: The share of a layer's gradients that a scale may flush and still count as keeping them.
TOLERATED = 1e-3

#: How far below FP16's largest number the largest gradient seen should stay: those to come may be
#: larger.
HEADROOM = 8.0


@dataclass
class LayerUnderflow:
    """What was seen of one layer: a module that holds parameters itself.

    Attributes:
        name: of the module.
        gradients: how many gradient values had which magnitude, without the loss scale: of the
            layer's parameters and of its output. Int64, by binary exponent. Zeros are left out.
        updates: the same of the changes that the optimizer made to the parameters.
        lost: how many changes would not have changed a weight held in FP16.
        changed: how many changes there were, zeros left out.
    """

    name: str
    gradients: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    updates: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    lost: int = 0
    changed: int = 0

    def gradients_flushed(self, loss_scale: float) -> float:
        """The share of gradient values, from 0 to 1, that FP16 flushes at a loss scale; of one
        that is not a power of two, at the power of two below it."""
        return _share_flushed(self.gradients, loss_scale)

    @property
    def updates_flushed(self) -> float:
        """The share of updates, from 0 to 1, that are zero as FP16 numbers."""
        return _share_flushed(self.updates, 1.0)

    @property
    def updates_lost(self) -> float:
        """The share of updates, from 0 to 1, that leave an FP16 weight as it is."""
        return self.lost / self.changed if self.changed else 0.0


@dataclass
class UnderflowReport:
    """What FP16 would flush over the steps that were watched.

    Attributes:
        layers: in the order of the model's modules.
        steps: optimizer steps that were watched.
        largest_gradient: the largest magnitude of any gradient value, without the loss scale.
    """

    layers: list[LayerUnderflow]
    steps: int = 0
    largest_gradient: float = 0.0

    @property
    def total(self) -> LayerUnderflow:
        """All layers as one."""
        total = LayerUnderflow("all layers")
        for layer in self.layers:
            total.gradients += layer.gradients
            total.updates += layer.updates
            total.lost += layer.lost
            total.changed += layer.changed
        return total

    @property
    def largest_loss_scale(self) -> float:
        """The largest power of two that keeps the largest gradient ``HEADROOM`` below overflow."""
        if not self.largest_gradient > 0:
            return 1.0
        most = _LARGEST / HEADROOM / self.largest_gradient
        return 2.0 ** min(_MOST, math.floor(math.log2(most)))

    @property
    def best_loss_scale(self) -> float:
        """The smallest power of two at which no layer has 0.1 % more of its gradients flushed than
        at ``largest_loss_scale``, and at least 1 unless that would overflow."""
        best = most = self.largest_loss_scale
        allowed = [layer.gradients_flushed(most) + TOLERATED for layer in self.layers]
        while best > 1 and all(
            layer.gradients_flushed(best / 2) <= share
            for layer, share in zip(self.layers, allowed, strict=True)
        ):
            best /= 2
        return best


@contextmanager
def underflow_report(
    model: nn.Module, optimizer: Optimizer, precision: Precision | None = None
) -> Iterator[UnderflowReport]:
    """Watch the gradients and updates of the optimizer steps made inside.

    Gradients are those that the optimizer gets, so after accumulation and all-reduce, and those of
    each layer's output, which the backward pass goes through. To see small values at all, train
    in FP32 or BF16: what FP16 has flushed already is not counted.

    Args:
        model: without DDP around it.
        optimizer: of its parameters, FP32 or half with masters.
        precision: of the training loop, if it scales the loss; values are counted unscaled.

    Yields:
        The report, which fills up step by step. Each step waits for the device; memory for a copy
        of the parameters is taken meanwhile.

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

    def see_gradient(layer: LayerUnderflow, gradient: Tensor, scaled: bool = True) -> None:
        scale = precision.loss_scale if scaled and precision is not None else 1.0
        values = gradient.detach().float() / scale
        if bool(values.isfinite().all()):  # else this step will be skipped
            layer.gradients += _count(values)
            largest = values.abs().max().item() if values.numel() else 0.0
            report.largest_gradient = max(report.largest_gradient, largest)

    def see_output(layer: LayerUnderflow, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(see_gradient, layer))

    def before_step(_: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, name in owners.items():
            if parameter.grad is not None:
                before[parameter] = _exact(optimizer, parameter).clone()
                # What cannot take the scale itself was given gradients without it.
                takes_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
                see_gradient(layers[name], parameter.grad, scaled=takes_scale)

    def after_step(_: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, old in before.items():
            layer = layers[owners[parameter]]
            new = _exact(optimizer, parameter)
            moved = new != old
            layer.updates += _count(new - old)
            layer.changed += int(moved.sum())
            half = old.to(torch.float16)
            update = (new - old).to(torch.float16)
            layer.lost += int((moved & (half + update == half)).sum())
        before.clear()
        report.steps += 1

    handles = [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(after_step),
        *(
            module.register_forward_hook(partial(see_output, layers[name]))
            for name, module in model.named_modules()
            if name in layers
        ),
    ]
    try:
        yield report
    finally:
        for handle in handles:
            handle.remove()


def _exact(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """The FP32 value that the optimizer updates."""
    master = optimizer.state.get(parameter, {}).get("master")
    value: Tensor = parameter.detach() if master is None else master
    return value.float()


def _count(values: Tensor) -> Tensor:
    """How many of ``values`` have which binary exponent; zeros are left out."""
    # FP64, in which the smallest numbers of FP32 have neighbours too.
    magnitudes = values.detach().double().abs().flatten()
    magnitudes = magnitudes[magnitudes > 0]
    # One step down, so that a power of two counts as the top of its bin.
    exponents = torch.frexp(
        torch.nextafter(magnitudes, torch.zeros_like(magnitudes))
    ).exponent.long()
    return torch.bincount(exponents + _SHIFT, minlength=_BINS)[:_BINS].cpu()


def _share_flushed(counts: Tensor, loss_scale: float) -> float:
    """The share of what ``counts`` holds that FP16 flushes when multiplied by ``loss_scale``."""
    total = int(counts.sum())
    # The bin that ends at 2^-25 divided by the scale.
    top = _FLUSHED_EXPONENT - math.floor(math.log2(loss_scale)) + _SHIFT
    return int(counts[: max(0, top + 1)].sum()) / total if total else 0.0
