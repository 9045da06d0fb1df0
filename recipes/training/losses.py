"""The losses of training: cross entropy and binary cross entropy, on hard or on mixed targets.

Binary cross entropy follows timm's ``BinaryCrossEntropy``, with which "ResNet strikes back"
(Wightman et al. 2021, arXiv:2110.00476) and DeiT III were trained; the sum over classes is
Composer's form.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def training_loss(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    *,
    name: str = "cross-entropy",
    threshold: float | None = None,
    sum_classes: bool = False,
) -> Tensor:
    """Return the mean loss of a micro-batch over its images, in FP32, 0-d.

    Inside a function that torch.compile compiles, its operators are fused; eager, each is a kernel.

    Args:
        logits: Outputs of the model, any floating dtype, shape ``[n, classes]``.
        targets: Class numbers, int64, shape ``[n]``; or the weight of each class, FP32, shape
            ``[n, classes]``, summing to 1 for each image.
        label_smoothing: Share of the target that is spread evenly over all classes, in [0, 1)
            (Szegedy et al. 2016, section 7).
        name: ``cross-entropy`` or ``binary-cross-entropy``.
        threshold: Binary cross entropy only: smoothed targets above it become 1, others 0.
        sum_classes: Binary cross entropy only: sum over classes; by default, their mean.
    """
    logits = logits.float()
    if name == "cross-entropy":
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    classes = logits.shape[1]
    dense = one_hot(targets, torch.arange(classes, device=targets.device))
    dense = dense * (1 - label_smoothing) + label_smoothing / classes
    if threshold is not None:
        dense = (dense > threshold).float()
    loss = F.binary_cross_entropy_with_logits(logits, dense)
    return loss * classes if sum_classes else loss


def one_hot(targets: Tensor, classes: Tensor) -> Tensor:
    """Return targets as weights of classes, FP32, ``[n, classes]``, without a wait for the device.

    Args:
        targets: As in :func:`training_loss`.
        classes: The numbers of all classes, int64, shape ``[classes]``, on the same device.
    """
    return targets if targets.dim() == 2 else (targets[:, None] == classes).float()
