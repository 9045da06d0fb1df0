"""The exponential moving average (EMA) of the weights, evaluated and exported beside them.

Averaging of iterates goes back to Polyak and Juditsky (1992); the exponential form, with a decay
that rises over the first updates, follows TensorFlow's ``ExponentialMovingAverage``. The arithmetic
is torch's ``swa_utils``; its ``AveragedModel`` is not used, as it synchronizes with the device at
each update and would average half-precision weights in half precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ...amp import Precision, full_precision_state_dict
from ...pipeline import Loader
from ..ranks import Job
from ..schema.sections import Ema
from .evaluate import averaged_buffers, evaluate


class WeightAverage:
    """Moving average of a model's parameters and floating-point buffers, in FP32 on its device.

    It starts from the current weights. In half precision it averages the optimizer's FP32 masters
    if there are any. Batch norm's running statistics are averaged with the weights, so that they
    are, to first order, those of the averaged network. Each rank averages its own statistics; their
    mean over ranks, taken before each evaluation, is the average of the means. A step skipped
    because of a gradient overflow still counts as an update.

    Args:
        model: The model as it is trained, converted to its precision, without its DDP wrapper.
        optimizer: Optimizer of its parameters.
        decay: Weight of the old average in an update, between 0 and 1; in the n-th update (from 1)
            at most ``(1 + n) / (10 + n)``, so that it soon forgets the random initial weights.

    Attributes:
        updates: Number of updates so far.
        parameters: Averaged parameters by name, FP32.
        buffers: Averaged floating-point buffers of this rank by name, FP32.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, decay: float) -> None:
        self._model, self._optimizer, self._decay = model, optimizer, decay
        self._held = dict(model.named_parameters())
        self._held_buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        self.restart()

    @classmethod
    def of(cls, section: Ema, model: nn.Module, optimizer: Optimizer) -> WeightAverage | None:
        """Return the average that a recipe's section ``ema`` asks for; None without a decay."""
        if section.decay is None:
            return None
        return cls(model, optimizer, section.decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the current weights."""
        self.updates = 0
        self.parameters = {n: self._exact(p).float().clone() for n, p in self._held.items()}
        self.buffers = {n: b.float().clone() for n, b in self._held_buffers.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average, without synchronizing with the device."""
        self.updates += 1
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        now = [self._exact(p).float() for p in self._held.values()]
        now += [b.float() for b in self._held_buffers.values()]
        averages = [*self.parameters.values(), *self.buffers.values()]
        get_ema_multi_avg_fn(decay)(averages, now, self.updates)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager that puts the average into the model, cast to the model's dtypes."""
        held = [*self._held.values(), *self._held_buffers.values()]
        own = [tensor.detach().clone() for tensor in held]
        _copy(held, [*self.parameters.values(), *self.buffers.values()])
        try:
            yield
        finally:
            _copy(held, own)

    def evaluate(self, loader: Loader, precision: Precision, job: Job) -> dict[str, float]:
        """Evaluate the averaged weights; a collective.

        Returns:
            ``ema_loss``, ``ema_top1`` and ``ema_top5``, in the units of :func:`evaluate`.
        """
        with self.applied(), averaged_buffers(self._model, job):
            values = evaluate(self._model, loader, precision, job)
        return {f"ema_{name}": value for name, value in values.items()}

    def state_dict(self, job: Job) -> dict[str, Tensor]:
        """Return the averaged weights for export; a collective.

        Like :func:`full_precision_state_dict`, in FP32 on the CPU, with buffers averaged over the
        ranks.
        """
        with self.applied(), averaged_buffers(self._model, job):
            content = full_precision_state_dict(self._model)
        averages = {self._held[name]: average for name, average in self.parameters.items()}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            content[name] = averages[parameter].to(
                "cpu", copy=True
            )  # without rounding to half precision
        return content

    def _exact(self, parameter: Tensor) -> Tensor:
        """The FP32 master of a parameter if there is one, else the parameter itself."""
        master: Tensor = self._optimizer.state.get(parameter, {}).get("master", parameter)
        return master.detach()


@torch.no_grad()
def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value)
