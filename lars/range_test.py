"""The learning-rate range test: a few updates in which the rate rises until training diverges.

Smith 2015 (arXiv 1506.01186, section 3.3) raises the rate over a short run to find which rates
train. Here it rises by the same factor in each update. Training has diverged where the loss,
averaged over recent updates, is 1.5 times that of the first ones; the suggested peak is a tenth of
the rate of that update. docs/results/tune-lr.md compares such peaks with rates that were tuned.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_REACH, _TOLERANCE, _MARGIN = 100.0, 1.5, 10.0


@dataclass(frozen=True)
class RangeTest:
    """Result of :func:`lr_range_test`.

    Attributes:
        lrs: learning rate of each update until training diverged.
        losses: loss that ``step`` returned in it; the last may not be finite.
        diverged: whether training diverged in the last of them.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: bool

    @property
    def suggested_lr(self) -> float | None:
        """A peak to start tuning from; None if training did not diverge."""
        return self.lrs[-1] / _MARGIN if self.diverged else None


def lr_range_test(
    model: nn.Module,
    optimizer: Optimizer,
    step: Callable[[], Tensor | float],
    *,
    low: float | None = None,
    high: float | None = None,
    steps: int = 100,
) -> RangeTest:
    """Train a few updates at a rising learning rate, and put everything back as it was.

    Restored, bit for bit and also if ``step`` raises: parameters with their gradients, buffers, the
    mode of each module, state and groups of the optimizer, and torch's random numbers on the CPU
    and the model's devices. Learning rates and other tensors of the groups stay the same objects.
    What ``step`` reads its images from moves on, and so does a gradient scaler. Groups with
    different rates, or with timm's ``lr_scale``, keep the ratios that
    :func:`~largebatch.lars.as_scheduler` would give them. The host reads the loss of each update.

    Args:
        model: the model.
        optimizer: any torch optimizer; also one that has taken steps.
        step: makes one update on the next batch, from ``zero_grad`` to ``optimizer.step``, and
            returns its loss. On several ranks it has to return the same number on all of them.
        low: first rate; default: the optimizer's own over 100.
        high: the rate after the last update; default: the optimizer's own times 100.
        steps: number of updates, at least 20.

    Raises:
        ValueError: the range is empty, or ``steps`` is too small.
    """
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    own = float(optimizer.defaults.get("lr", 0.0))
    own = own if own > 0 and own in rates else max(rates)
    low, high = own / _REACH if low is None else low, own * _REACH if high is None else high
    if not 0 < low < high < math.inf:
        raise ValueError(f"low, high: {low:g}, {high:g} is no range; valid: 0 < low < high")
    if steps < 20:
        raise ValueError(f"steps: {steps} updates give no curve; valid: at least 20")
    window = max(3, steps // 20)
    lrs: list[float] = []
    losses: list[float] = []
    diverged = False
    with _restored(model, optimizer):
        while len(lrs) < steps and not diverged:
            lrs.append(low * (high / low) ** (len(lrs) / steps))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                lr = lrs[-1] * (rate / own if own else 1.0) * group.get("lr_scale", 1.0)
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
            loss = step()
            losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))
            recent, first = sum(losses[-window:]), sum(losses[:window])
            diverged = not math.isfinite(recent) or recent > _TOLERANCE * first > 0
    return RangeTest(tuple(lrs), tuple(losses), diverged)


@contextmanager
def _restored(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Restore model, optimizer and torch's random numbers at the end of the block."""
    in_groups = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = {p: p.grad for p in [*model.parameters(), *in_groups]}
    tensors = [*gradients, *(g for g in gradients.values() if g is not None), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    modules = [(m, m.training, dict(m.named_buffers(recurse=False))) for m in model.modules()]
    groups = [_tensors(group) for group in optimizer.param_groups]
    state = copy.deepcopy(optimizer.state_dict())
    devices = {p.device for p in gradients if p.device.type != "cpu"}
    of_type = next(iter(devices), torch.device("cuda")).type
    try:
        with torch.random.fork_rng([d.index for d in devices], device_type=of_type):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            for module, training, buffers in modules:
                module.training = training
                for name, buffer in buffers.items():
                    setattr(module, name, buffer)
            optimizer.load_state_dict(state)
            for number, saved in state["state"].items():  # loading may have cast it
                ours = optimizer.state.get(in_groups[number], {})
                for name in _tensors(saved).keys() & ours.keys():
                    if ours[name].dtype != saved[name].dtype:
                        ours[name] = saved[name]
            for group, of_group in zip(optimizer.param_groups, groups, strict=True):
                for name, tensor in of_group.items():  # loading has replaced them by copies
                    group[name] = tensor.copy_(group[name])


def _tensors(group: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in group.items() if isinstance(value, Tensor)}
