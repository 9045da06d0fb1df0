"""Evaluation: loss and accuracy, summed on the device and over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...amp import Precision
from ...pipeline import Loader
from ..ranks import Job


class Meter:
    """Sums of loss, correct predictions and gradient norms, kept on the device until read."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._norms: Tensor | None = None  # sum and number of finite norms

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            loss: Mean loss of the batch, 0-d.
            logits: Outputs of the model, shape ``[n, classes]``.
            labels: Class numbers, int64, shape ``[n]``.
        """
        count = labels.numel()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = best == labels[:, None]
        sums = (loss * count, hits[:, 0].sum(), hits.sum(), torch.full_like(loss, count))
        self._sums += torch.stack([value.double() for value in sums])

    @torch.no_grad()
    def add_gradient_norm(self, norm: Tensor) -> None:
        """Add the gradient norm of a step, 0-d; one that is not finite, of a skipped step, not."""
        finite = norm.isfinite()
        counted = torch.stack([torch.where(finite, norm, 0.0), finite.to(norm.dtype)]).double()
        self._norms = counted if self._norms is None else self._norms + counted

    def read(self, job: Job) -> tuple[dict[str, float], int]:
        """Return the means over all ranks and reset the sums; a collective and a host sync.

        Returns:
            The mean ``loss``, with ``top1`` and ``top5`` in percent, and the mean
            ``gradient_norm`` if any has been added (NaN if none was finite); and the number of
            images.
        """
        sums = self._sums if self._norms is None else torch.cat([self._sums, self._norms])
        loss, top1, top5, count, *norms = job.sum(sums).tolist()
        self._sums.zero_()
        self._norms = None
        means = {"loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}
        if norms:
            means["gradient_norm"] = norms[0] / norms[1] if norms[1] else math.nan
        return means, round(count)


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, precision: Precision, job: Job) -> dict[str, float]:
    """Evaluate a model on every usable image of a loader's source, each exactly once; a collective.

    Returns:
        ``loss`` (without label smoothing), with ``top1`` and ``top5`` in percent.

    Raises:
        RuntimeError: the ranks together did not see each image once.
    """
    meter = Meter(job.device)
    model.eval()
    for images, labels in loader:
        with precision.forward():
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        meter.add(loss, logits, labels)
    model.train()
    values, count = meter.read(job)
    skipped = sum(job.gather(len(loader.skipped)))
    if count + skipped != len(loader.source):
        raise RuntimeError(
            f"{count} images were evaluated instead of {len(loader.source) - skipped}"
        )
    return values


@contextmanager
def averaged_buffers(model: nn.Module, job: Job) -> Iterator[None]:
    """Context manager that averages buffers over ranks, and restores each rank's own at the end."""
    own = [buffer.clone() for buffer in model.buffers()]
    average_buffers(model, job)
    try:
        yield
    finally:
        for buffer, value in zip(model.buffers(), own, strict=True):
            buffer.copy_(value)


@torch.no_grad()
def average_buffers(model: nn.Module, job: Job) -> None:
    """Average floating-point buffers (batch norm's running statistics) over all ranks, in place.

    In training, each rank updates them from its own micro-batches only. A collective.
    """
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if job.world_size == 1 or not buffers:
        return
    flat = torch.cat([b.detach().double().flatten() for b in buffers])
    flat = job.sum(flat) / job.world_size
    for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))
