"""The loss of training: cross entropy with label smoothing (Szegedy et al. 2016, section 7)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def training_loss(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Return the mean loss of a micro-batch, in FP32, 0-d.

    Inside a function that torch.compile compiles, its operators are fused; eager, each is a kernel.

    Args:
        logits: Outputs of the model, any floating dtype, shape ``[n, classes]``.
        labels: Class numbers, int64, shape ``[n]``.
        label_smoothing: Share of the target that is spread evenly over all classes, in [0, 1).
    """
    return F.cross_entropy(logits.float(), labels, label_smoothing=label_smoothing)
