"""Crops and flips as pure functions of image sizes, the same for every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..order import UNIFORMS
from .policy import check_auto_augment

_TRIES = 10
_AREA, _ASPECT = slice(0, _TRIES), slice(_TRIES, 2 * _TRIES)
_X, _Y, FLIP, _SHIFT = range(2 * _TRIES, 2 * _TRIES + 4)
assert _SHIFT < UNIFORMS

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

#: How pixels are interpolated when images are resized; both are antialiased, as in Pillow.
INTERPOLATIONS = ("bilinear", "bicubic")


@dataclass(frozen=True)
class Transform:
    """The transform of images in training and in evaluation.

    Raises:
        ValueError: A value is out of range.
    """

    image_size: int = 224  #: Pixels on each side of the model's input.
    crop_area: tuple[float, float] = (0.08, 1.0)  #: Least and most of the image in training crops.
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)  #: Their least and greatest width / height.
    #: Probability that a training image is flipped horizontally. ``"alternating"`` flips half of
    #: the images, drawn once, in even epochs, and the others in odd ones (Keller Jordan 2024,
    #: arXiv:2404.00498).
    flip: float | Literal["alternating"] = 0.5
    #: Greatest number of pixels by which a training image is shifted, to each side alike, after it
    #: was cropped and resized. What comes into view is black.
    translate: int = 0
    eval_resize: int = 256  #: Pixels of the shorter side before the central crop of evaluation.
    interpolation: str = "bilinear"  #: How images are resized, one of :data:`INTERPOLATIONS`.
    #: Operations on training images after the flip (:mod:`.policy`), by name. ``"ta_wide"``,
    #: ``"3_augment"``, or RandAugment in timm's notation, such as ``"rand-m7-mstd0.5-inc1"``.
    auto_augment: str | None = None
    #: Probability that a part of a training image is erased (:mod:`.erasing`).
    erasing: float = 0.0
    mean: tuple[float, float, float] = IMAGENET_MEAN  #: Of the RGB channels, in 0..1.
    std: tuple[float, float, float] = IMAGENET_STD  #: Of the RGB channels, in 0..1.

    def __post_init__(self) -> None:
        size, flip = self.image_size, self.flip
        for name, is_valid, valid in (
            ("image_size", size > 0, "at least 1"),
            ("flip", flip == "alternating" or 0 <= flip <= 1, "0 to 1, or alternating"),
            ("eval_resize", self.eval_resize >= size, f"at least image_size ({size})"),
            ("translate", 0 <= self.translate < size, f"at least 0, below image_size ({size})"),
            ("interpolation", self.interpolation in INTERPOLATIONS, ", ".join(INTERPOLATIONS)),
            ("erasing", 0 <= self.erasing <= 1, "0 to 1"),
        ):
            if not is_valid:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not valid; valid: {valid}")
        if self.auto_augment is not None:
            check_auto_augment(self.auto_augment)

    @property
    def needs_further(self) -> bool:
        """Whether images need random numbers beside those of crops and flips."""
        return self.auto_augment is not None or self.erasing > 0


@dataclass(frozen=True)
class Crop:
    """Crops of n images: a region is resized (antialiased), cropped on black and mirrored."""

    region: NDArray[np.int64]  # x, y, width and height in the image, [n, 4]
    resized: NDArray[np.int64]  # width and height of the resized region, [n, 2]
    corner: NDArray[np.int64]  # x and y of the crop in the resized region, [n, 2]
    mirrored: NDArray[np.bool_]  # [n]


def training_crop(
    sizes: NDArray[np.int64],
    uniforms: NDArray[np.float64],
    transform: Transform,
    image_size: int | None = None,
) -> Crop:
    """Return random crops and flips, following torchvision's ``RandomResizedCrop``.

    (Szegedy et al. 2015, arXiv:1409.4842.) The area is uniform and the aspect ratio log-uniform.
    The first of ten tries that fits into the image is placed uniformly; if none fits, the largest
    central crop within the aspect ratios is used. ``uniforms`` are FP64, in [0, 1), a row an image.
    """
    width, height = sizes[:, 0], sizes[:, 1]
    least, most = transform.crop_aspect
    area = _between(uniforms[:, _AREA], *transform.crop_area) * (width * height)[:, None]
    aspect = np.exp(_between(uniforms[:, _ASPECT], math.log(least), math.log(most)))
    tried = np.stack([_round(np.sqrt(area * aspect)), _round(np.sqrt(area / aspect))], axis=-1)
    fits = np.all((tried >= 1) & (tried <= sizes[:, None, :]), axis=-1)
    found = np.any(fits, axis=1)[:, None]
    chosen = tried[np.arange(len(sizes)), fits.argmax(axis=1)]

    largest = np.stack(
        [np.minimum(width, _round(height * most)), np.minimum(height, _round(width / least))],
        axis=1,
    )
    shape = np.where(found, chosen, np.maximum(largest, 1))
    room = sizes - shape
    anywhere = np.floor(uniforms[:, [_X, _Y]] * (room + 1)).astype(np.int64)
    # One number gives both coordinates of the shift.
    places = 2 * transform.translate + 1
    shift = np.floor(uniforms[:, _SHIFT] * places**2).astype(np.int64)
    probability = 0.5 if transform.flip == "alternating" else transform.flip
    return Crop(
        region=np.concatenate([np.where(found, anywhere, room // 2), shape], axis=1),
        resized=np.full_like(sizes, image_size or transform.image_size),
        corner=np.stack(np.divmod(shift, places), axis=1) - transform.translate,
        mirrored=uniforms[:, FLIP] < probability,
    )


def evaluation_crop(sizes: NDArray[np.int64], transform: Transform) -> Crop:
    """Return the crops of torchvision's ``Resize`` of the shorter side and ``CenterCrop``.

    ``sizes`` are the width and height of each image in pixels, int64, shape ``[n, 2]``.
    """
    resized = transform.eval_resize * sizes // sizes.min(axis=1, keepdims=True)
    return Crop(
        region=np.concatenate([np.zeros_like(sizes), sizes], axis=1),
        resized=resized,
        # torchvision rounds half to even, as rint does
        corner=np.rint((resized - transform.image_size) / 2).astype(np.int64),
        mirrored=np.zeros(len(sizes), dtype=np.bool_),
    )


def _between(uniform: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    return low + (high - low) * uniform


def _round(values: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    return np.asarray(np.floor(values + 0.5), dtype=np.int64)
