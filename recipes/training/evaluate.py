"""Loss and accuracy, summed on the device and over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...amp import Precision
from ...pipeline import Loader
from ..ranks import Job


class Meter:
    """Sums loss and hits without reading them, until :meth:`read` does."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            loss: its mean, 0-d.
            logits: shape ``[n, classes]``.
            labels: shape ``[n]``.
        """
        count = labels.numel()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = best == labels[:, None]
        sums = (loss * count, hits[:, 0].sum(), hits.sum(), torch.full_like(loss, count))
        self._sums += torch.stack([value.double() for value in sums])

    def read(self, job: Job) -> tuple[dict[str, float], int]:
        """Start over, and give what was added on all ranks: a collective, and a host sync.

        Returns:
            ``loss``, ``top1`` and ``top5`` in percent; and the number of images.
        """
        loss, top1, top5, count = job.sum(self._sums).tolist()
        self._sums.zero_()
        means = {"loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}
        return means, round(count)


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, precision: Precision, job: Job) -> dict[str, float]:
    """Loss (without smoothing), top-1 and top-5 over all images of the source that can be used,
    each once.

    Raises:
        RuntimeError: the ranks together did not see as many images as there are.
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
        raise RuntimeError(f"{count} images were evaluated, of {len(loader.source) - skipped}")
    return values


@contextmanager
def averaged_buffers(model: nn.Module, job: Job) -> Iterator[None]:
    """Run a body with :func:`average_buffers`, and give each rank its own buffers back."""
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

    Each rank gathers them from its own micro-batches only.
    """
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if job.world_size == 1 or not buffers:
        return
    flat = torch.cat([b.detach().double().flatten() for b in buffers])
    flat = job.sum(flat) / job.world_size
    for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))
