"""Evaluation of the weights and of their exponential moving average (EMA).

Loss and accuracy are summed on the device and over all ranks.

Averaging of iterates goes back to Polyak and Juditsky (1992); the exponential form, with a decay
that rises over the first updates, follows TensorFlow's ``ExponentialMovingAverage``. The arithmetic
is torch's ``swa_utils``; its ``AveragedModel`` is not used, as it synchronizes with the device at
each update and would average half-precision weights in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.profiler import record_function

from ...amp import Precision, full_precision_state_dict
from ...pipeline import Loader
from ..errors import AgreedError
from ..ranks import Job
from .watch.clocks import METERS


class Meter:
    """The mean loss of many batches, and the accuracy of some of them."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._hits = torch.zeros(2, dtype=torch.int64, device=device)  # first, first five
        self._norms: Tensor | None = None  # sum and number of finite norms
        self._images = self._judged = 0
        self._measures_accuracy = True

    def begin_step(self, *, measures_accuracy: bool) -> None:
        """Begin a step of training: from here on accuracy is that of this step, or not measured."""
        self._measures_accuracy = measures_accuracy
        if self._judged:
            self._hits.zero_()
            self._judged = 0

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: its mean loss, 0-d, logits ``[n, classes]`` and labels ``[n]``, int64."""
        count = len(labels)
        self._loss.add_(loss, alpha=count)
        self._images += count
        if self._measures_accuracy:
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices
            classes = labels if labels.dim() == 1 else labels.argmax(1)
            right = best == classes[:, None]
            self._hits += torch.stack([right[:, 0].sum(), right.sum()])
            self._judged += count

    @torch.no_grad()
    def add_gradient_norm(self, norm: Tensor) -> None:
        """Add the gradient norm of a step, 0-d; one that is not finite, of a skipped step, not."""
        finite = norm.isfinite()
        counted = torch.stack([torch.where(finite, norm, 0.0), finite.to(norm.dtype)]).double()
        self._norms = counted if self._norms is None else self._norms + counted

    def sums(self) -> list[float]:
        """Return loss, images, and sum and number of the gradient norms since the last reading."""
        norms = [0.0, 0.0] if self._norms is None else self._norms.tolist()
        return [self._loss.item(), float(self._images), *norms]

    def go_on_from(self, sums: list[float]) -> None:
        """Take over what :meth:`sums` returned."""
        loss, images, *norms = sums
        self._loss.fill_(loss)
        self._images = round(images)
        if norms[1]:
            self._norms = torch.tensor(norms, dtype=torch.float64, device=self._loss.device)

    def read(self, job: Job) -> tuple[dict[str, float], int]:
        """Return the means over all ranks and reset the sums; a collective and a host sync."""
        counts = torch.tensor([self._images, self._judged], dtype=torch.float64)
        with record_function(METERS):
            sums = [self._loss[None], self._hits.double(), counts.to(self._loss.device)]
            norm = [] if self._norms is None else [self._norms]
            summed = job.sum(torch.cat([*sums, *norm]))
            loss, top1, top5, images, judged, *norms = summed.tolist()
        self._loss.zero_()
        self._hits.zero_()
        self._norms = None
        self._images = self._judged = 0
        means = {"loss": loss / images}
        if judged:
            means |= {"top1": 100 * top1 / judged, "top5": 100 * top5 / judged}
        if norms:
            means["gradient_norm"] = norms[0] / norms[1] if norms[1] else math.nan
        return means, round(images)


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, precision: Precision, job: Job) -> dict[str, float]:
    """Evaluate a model on each usable image of a loader's source exactly once; a collective."""
    # Batches are always full, so that torch.compile and cuDNN's benchmark see one shape: what is
    # missing is padded with zeros, whose outputs are dropped.
    meter = Meter(job.device)
    model.eval()
    for images, labels in loader:
        with precision.forward():
            logits = model(_padded(images, loader))[: len(labels)]
            loss = F.cross_entropy(logits, labels)
        meter.add(loss, logits, labels)
    model.train()
    skipped = sum(job.gather(loader.left_out))
    if skipped == len(loader.source):
        raise AgreedError(
            f"data.path: none of {skipped} images can be used; valid: images that can be decoded "
            "(with data.on_error=stop, the first that cannot is named)"
        )
    values, count = meter.read(job)
    if count + skipped != len(loader.source):
        raise RuntimeError(
            f"{count} images were evaluated instead of {len(loader.source) - skipped}"
        )
    return values


def _padded(images: Tensor, loader: Loader) -> Tensor:
    """Return a full batch that begins with ``images`` and goes on with zeros."""
    if len(images) == loader.full_batch:
        return images
    full = loader.empty_batch().images
    full[: len(images)].copy_(images)
    full[len(images) :].zero_()
    return full


@contextmanager
def averaged_buffers(model: nn.Module, job: Job) -> Iterator[None]:
    """Context manager that averages buffers over ranks, and restores each rank's own at the end."""
    with kept(model.buffers()):
        average_buffers(model, job)
        yield


@contextmanager
def kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Context manager that restores the values of tensors at its end."""
    tensors = [*tensors]
    own = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        _copy(tensors, own)


@torch.no_grad()
def average_buffers(model: nn.Module, job: Job) -> None:
    """Average floating-point buffers (batch norm's running statistics) over all ranks, in place."""
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if job.world_size == 1 or not buffers:
        return
    flat = torch.cat([b.detach().double().flatten() for b in buffers])
    flat = job.sum(flat) / job.world_size
    for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


# --- the moving average of the weights --------------------------------------------------------


class WeightAverage:
    """Moving average of a model's parameters and floating-point buffers, in FP32 on its device."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, decay: float) -> None:
        self._model, self._optimizer, self._decay = model, optimizer, decay
        self._held = dict(model.named_parameters())
        self._held_buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        self.restart()

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
        # Lower at first, so that it soon forgets the random initial weights.
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        now = [self._exact(p).float() for p in self._held.values()]
        now += [b.float() for b in self._held_buffers.values()]
        averages = [*self.parameters.values(), *self.buffers.values()]
        get_ema_multi_avg_fn(decay)(averages, now, self.updates)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager that puts the average into the model, cast to the model's dtypes."""
        held = [*self._held.values(), *self._held_buffers.values()]
        with kept(held):
            _copy(held, [*self.parameters.values(), *self.buffers.values()])
            yield

    def evaluate(self, loader: Loader, precision: Precision, job: Job) -> dict[str, float]:
        """Return what :func:`evaluate` does of the average, as ``ema_loss`` and so on."""
        with self.applied(), averaged_buffers(self._model, job):
            values = evaluate(self._model, loader, precision, job)
        return {f"ema_{name}": value for name, value in values.items()}

    def state_dict(self, job: Job) -> dict[str, Tensor]:
        """Return the average in FP32 on the CPU, with buffers averaged over ranks; a collective."""
        with self.applied(), averaged_buffers(self._model, job):
            content = full_precision_state_dict(self._model)
        # Without rounding to half precision.
        return content | {name: p.to("cpu", copy=True) for name, p in self.parameters.items()}

    def _exact(self, parameter: Tensor) -> Tensor:
        """The FP32 master of a parameter if there is one, else the parameter itself."""
        master: Tensor = self._optimizer.state.get(parameter, {}).get("master", parameter)
        return master.detach()


@torch.no_grad()
def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value)
