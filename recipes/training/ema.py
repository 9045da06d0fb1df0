"""An exponential moving average of the weights (EMA), evaluated and exported beside them.

Averaging iterates is Polyak and Juditsky's (1992); that of a moving window, with a decay that rises
while there is little to average, is TensorFlow's ``ExponentialMovingAverage``. The arithmetic is
torch's ``swa_utils``; its ``AveragedModel`` is not used, as it waits for the device at each update
and would average half-precision weights in half precision.
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
    """The average of a model's parameters and floating-point buffers, in FP32 on its device.

    It starts as the weights are when it is made. In half precision it takes in the optimizer's FP32
    masters where there are any. Batch norm's running statistics are averaged with the weights: they
    then are, to first order, those of the averaged network, while the latest ones are of the latest
    weights. Each rank averages its own, and the mean over ranks, taken before each evaluation, is
    the average of the means. A step that was skipped since gradients overflowed counts as one.

    Args:
        model: as it is trained, converted to its precision, without DDP around it.
        optimizer: of its parameters.
        decay: how much the old average weighs in an update, between 0 and 1.
        warmup: at the n-th update, from 1, the decay is at most ``(1 + n) / (10 + n)``, so that the
            first weights, which are random, are soon forgotten.

    Attributes:
        updates: how often :meth:`update` was called.
        parameters: name -> average, FP32.
        buffers: of floating point, in the same way; of this rank.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, decay: float, *, warmup: bool = True
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._decay, self._warmup = decay, warmup
        self._held = dict(model.named_parameters())
        self._held_buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        self.restart()

    @classmethod
    def of(cls, recipe: Ema, model: nn.Module, optimizer: Optimizer) -> WeightAverage | None:
        """The average that a recipe asks for, if it does."""
        if recipe.decay is None:
            return None
        return cls(model, optimizer, recipe.decay, warmup=recipe.warmup)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the weights as they are."""
        self.updates = 0
        self.parameters = {n: self._exact(p).float().clone() for n, p in self._held.items()}
        self.buffers = {n: b.float().clone() for n, b in self._held_buffers.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights in; the host does not wait for the device."""
        self.updates += 1
        decay = self._decay
        if self._warmup:
            decay = min(decay, (1 + self.updates) / (10 + self.updates))
        now = [self._exact(p).float() for p in self._held.values()]
        now += [b.float() for b in self._held_buffers.values()]
        average = [*self.parameters.values(), *self.buffers.values()]
        get_ema_multi_avg_fn(decay)(average, now, self.updates)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run a body with the average in the model, in the model's dtypes."""
        held = [*self._held.values(), *self._held_buffers.values()]
        own = [tensor.detach().clone() for tensor in held]
        _copy(held, [*self.parameters.values(), *self.buffers.values()])
        try:
            yield
        finally:
            _copy(held, own)

    def evaluate(self, loader: Loader, precision: Precision, job: Job) -> dict[str, float]:
        """``ema_loss``, ``ema_top1`` and ``ema_top5``, as :func:`evaluate` gives those of the
        weights; a collective."""
        with self.applied(), averaged_buffers(self._model, job):
            values = evaluate(self._model, loader, precision, job)
        return {f"ema_{name}": value for name, value in values.items()}

    def state_dict(self, job: Job) -> dict[str, Tensor]:
        """What to export, as :func:`full_precision_state_dict` gives it of the weights: FP32 on the
        CPU, buffers averaged over the ranks; a collective."""
        with self.applied(), averaged_buffers(self._model, job):
            content = full_precision_state_dict(self._model)
        averages = {self._held[name]: average for name, average in self.parameters.items()}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            content[name] = averages[parameter].to("cpu", copy=True)  # not rounded to half
        return content

    def _exact(self, parameter: Tensor) -> Tensor:
        """A parameter's FP32 master, or itself."""
        master: Tensor = self._optimizer.state.get(parameter, {}).get("master", parameter)
        return master.detach()


@torch.no_grad()
def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value)
