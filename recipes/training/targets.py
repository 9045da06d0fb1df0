"""What is minimized: the loss of training, on labels or on the targets of Mixup and CutMix.

Binary cross entropy follows timm's ``BinaryCrossEntropy``, with which "ResNet strikes back"
(Wightman et al. 2021, arXiv:2110.00476) and DeiT III were trained; the sum over classes is
Composer's form.

Images are mixed on the device, as a function of the seed and the position in the stream alone. The
stream of training images (:mod:`largebatch.pipeline.order`) falls into consecutive groups.
In a group, image i of its first half is blended with image i of its second half, all with one
weight or one box, as in a batch of timm's ``Mixup`` (mode ``batch``, with ``correct_lam``), which
pairs the first image with the last. Where both are on, half of the groups are mixed by CutMix (Yun
et al. 2019, arXiv:1905.04899) in place of mixup (Zhang et al. 2017, arXiv:1710.09412). Partners are
half a group apart, so that repeats of an image, which follow each other, are not mixed with one
another. The draws of a group belong to its place in the stream, and a micro-batch holds whole
groups. So any number of ranks, any accumulation and a resumed run mix the same images.

The host draws, from raw bits of NumPy's Philox generator, and never waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...pipeline import Batch, Loader
from ..schema.data import Mixing

_PURPOSE = 2**64 - 1  # of the key; the order and the crops of epoch e have 2 e and 2 e + 1
_UNIFORMS = 8  # random numbers per group, of which 5 are used: two steps of the counter
_PHILOX_WORDS = 4  # 64-bit words per step of the generator's counter


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

    ``logits``, of any floating dtype, have shape ``[n, classes]``. ``targets`` are class numbers,
    int64, ``[n]``, or weights of classes, FP32, ``[n, classes]``, that sum to 1 for each image; a
    share of them, ``label_smoothing``, is spread evenly (Szegedy et al. 2016, section 7). With
    binary cross entropy, smoothed targets above ``threshold`` become 1 and others 0, and
    ``sum_classes`` sums over classes in place of their mean.
    """
    logits = logits.float()
    if name == "cross-entropy":
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    classes = logits.shape[1]
    if targets.dim() == 1:
        targets = one_hot(targets, torch.arange(classes, device=targets.device))
    if label_smoothing:
        targets = targets * (1 - label_smoothing) + label_smoothing / classes
    if threshold is not None:
        targets = (targets > threshold).float()
    loss = F.binary_cross_entropy_with_logits(logits, targets)
    return loss * classes if sum_classes else loss


def one_hot(labels: Tensor, classes: Tensor) -> Tensor:
    """Return labels, ``[n]``, as weights of ``classes``, FP32, ``[n, classes]``; no host sync."""
    return (labels[:, None] == classes).float()


# --- mixing -----------------------------------------------------------------------------------


class Mixer:
    """Mixes the micro-batches that a loader delivers, by the recipe's section ``mixing``."""

    def __init__(self, options: Mixing, seed: int, loader: Loader) -> None:
        self._options, self._seed, self._loader = options, seed, loader
        self._classes = torch.arange(len(loader.source.classes), device=loader.device)

    def __call__(self, images: Tensor, labels: Tensor) -> Batch:
        """Return the loader's last micro-batch, mixed, in new tensors."""
        group, (height, width) = self._options.group, images.shape[-2:]
        first = self._loader.batch_position // group
        drawn = draws(self._options, self._seed, first, len(images) // group, height, width)
        sent = torch.from_numpy(drawn)
        if images.is_cuda:
            sent = sent.pin_memory().to(images.device, non_blocking=True)
        top, bottom, left, right, inside, own = sent.T.reshape(6, -1, 1, 1, 1, 1)
        rows = torch.arange(height, device=images.device)[:, None]
        columns = torch.arange(width, device=images.device)
        boxed = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        weight = torch.where(boxed, inside, 1.0).to(images.dtype)
        targets = one_hot(labels, self._classes)
        return Batch(_blend(images, weight), _blend(targets, own[..., 0, 0]))


def _blend(values: Tensor, weight: Tensor) -> Tensor:
    """Blend each value with that of its partner; ``weight``, ``[groups, 1, ...]``, is its own."""
    groups: Tensor = values.unflatten(0, (len(weight), -1))
    partners: Tensor = groups.unflatten(1, (2, -1)).flip(1).flatten(1, 2)  # keeps the strides
    return partners.lerp(groups, weight).flatten(0, 1)


def draws(
    options: Mixing, seed: int, first: int, count: int, height: int, width: int
) -> NDArray[np.float32]:
    """Draw how ``count`` groups are mixed, after the ``first`` ones of the stream.

    Returns FP32, ``[count, 6]``: top, bottom, left and right of the box that is mixed, in pixels,
    which is the whole image for mixup; an image's own weight in it; and that of its label.
    """
    bits = np.random.Philox(key=np.array([seed, _PURPOSE], dtype=np.uint64))
    bits.advance(first * _UNIFORMS // _PHILOX_WORDS)
    words = np.asarray(bits.random_raw(count * _UNIFORMS), dtype=np.uint64)
    uniforms = ((words >> np.uint64(11)) * 2.0**-53).reshape(count, _UNIFORMS).T
    switched = uniforms[1] < 0.5 if options.mixup else options.cutmix > 0
    cut = np.broadcast_to(switched if options.cutmix else False, count)
    alpha = np.where(cut, options.cutmix or 1.0, options.mixup or 1.0)
    own = _beta(alpha, uniforms[2], uniforms[3])
    # As timm: a box of int(side x sqrt(1 - weight)) pixels around any pixel, within the image.
    edges = []
    for size, uniform in ((height, uniforms[4]), (width, uniforms[5])):
        side = np.where(cut, (size * np.sqrt(1 - own)).astype(int), 2 * size)
        centre = (uniform * size).astype(int)
        edges += [np.clip(centre + end, 0, size) for end in (-(side // 2), (side + 1) // 2)]
    top, bottom, left, right = edges
    area = (bottom - top) * (right - left) / (height * width)
    inside, own = np.where(cut, 0.0, own), np.where(cut, 1 - area, own)
    return np.stack([*edges, inside, own], axis=1).astype(np.float32)


def _beta(
    alpha: NDArray[np.float64], first: NDArray[np.float64], second: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Draws of Beta(alpha, alpha), each from two uniform numbers in [0, 1)."""
    # Student's t with 2 alpha degrees of freedom (Bailey 1994), transformed: Devroye 1996, "Random
    # variate generation in one line of code". NumPy's own may change with its version (NEP 19).
    angle = np.cos(2 * np.pi * second)
    with np.errstate(over="ignore", divide="ignore"):  # infinity gives a weight of 0 or 1
        squared = np.expm1(-np.log(first) / alpha) * angle**2
        return np.asarray((1 + np.copysign(1 / np.sqrt(1 + 1 / squared), angle)) / 2)
