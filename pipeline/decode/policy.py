"""Automatic augmentation of 8-bit images: RandAugment of timm, TrivialAugmentWide, 3-Augment.

RandAugment (Cubuk et al. 2019, arXiv:1909.13719) is written as for timm's training script:
``rand-m7-mstd0.5-inc1`` applies two operations, each with probability 0.5, at level 7 of 10.
TrivialAugmentWide (Müller and Hutter 2021, arXiv:2103.10158), ``ta_wide`` as for torchvision's
script, applies one. 3-Augment (Touvron et al. 2022, arXiv:2204.07118), ``3_augment``, turns an
image grey, solarizes or blurs it, then changes its brightness, contrast and saturation. The
operations are Pillow's, as in all of them, so that the pixels are theirs. Which are applied, at
which levels, follows from random numbers that are given: no global generator is read, and threads
share nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..order import UNIFORMS

if TYPE_CHECKING:
    from PIL import Image

#: The name of TrivialAugmentWide.
TRIVIAL = "ta_wide"
#: The name of 3-Augment.
THREE = "3_augment"
_PER_OPERATION = 4  # random numbers: which operation, whether, its level and its sign
_MOST_OPERATIONS = 6
#: Number of random numbers that an image needs.
NUMBERS = _PER_OPERATION * _MOST_OPERATIONS

_COLOUR = ("AutoContrast", "Equalize", "Posterize", "Solarize")
_ENHANCE = ("Color", "Contrast", "Brightness", "Sharpness")
#: The greatest argument of geometric operations: a slope, degrees, or a share of the side.
_REACH = {
    "ShearX": 0.3,
    "ShearY": 0.3,
    "Rotate": 30.0,
    "TranslateXRel": 0.45,
    "TranslateYRel": 0.45,
}
#: The same of TrivialAugmentWide, where translations are in pixels.
_WIDE_REACH = {"ShearX": 0.99, "ShearY": 0.99, "Rotate": 135.0, "TranslateX": 32, "TranslateY": 32}
_RAND = (*_COLOUR, "Invert", "SolarizeAdd", *_ENHANCE, *_REACH)
_WIDE = (*_COLOUR, "Identity", *_ENHANCE, *_WIDE_REACH)

#: An operation's name and its argument, such as ``("Rotate", -21.0)``.
Step = tuple[str, float]


@dataclass(frozen=True)
class RandAugment:
    """RandAugment, with the fields of timm's notation."""

    m: int = 10  #: Level of the operations.
    n: int = 2  #: Number of operations, drawn with replacement.
    p: float = 0.5  #: Probability that each is applied.
    mstd: float = 0.0  #: Standard deviation of the level; above 100, it is uniform from 0 to m.
    mmax: int = 10  #: Greatest level.
    inc: int = 0  #: 1 to have all operations change more at a higher level.

    #: Whether what a geometric operation leaves empty gets the mean colour; else it is black.
    fills_mean = True

    def steps(self, numbers: list[float]) -> list[Step]:
        """Return the operations that the random numbers of an image stand for."""
        found = []
        for place in range(self.n):
            which, applied, level, sign = numbers[_PER_OPERATION * place :][:_PER_OPERATION]
            if applied < self.p:
                name = _RAND[int(which * len(_RAND))]
                found.append((name, self.argument(name, self._level(level), sign < 0.5)))
        return found

    def _level(self, uniform: float) -> float:
        level = float(self.m)
        if self.mstd > 100:
            level *= uniform
        elif self.mstd > 0:
            level = NormalDist(self.m, self.mstd).inv_cdf(max(uniform, 2.0**-54))
        return max(0.0, min(level, self.mmax))

    def argument(self, name: str, level: float, negative: bool) -> float:
        """Return the argument of an operation at ``level``, as timm's ``LEVEL_TO_ARG`` has it."""
        x = level / 10
        sign = -1 if negative else 1
        if name in _ENHANCE:
            return max(0.1, 1 + sign * 0.9 * x) if self.inc else 0.1 + 1.8 * x
        if name == "Posterize":
            return 4 - int(4 * x) if self.inc else int(4 * x)
        if name == "Solarize":
            threshold = min(256, int(256 * x))
            return 256 - threshold if self.inc else threshold
        if name == "SolarizeAdd":
            return min(128, int(110 * x))
        return sign * x * _REACH.get(name, 0)


class TrivialAugmentWide:
    """TrivialAugmentWide, with the operations and levels of torchvision."""

    fills_mean = False

    def steps(self, numbers: list[float]) -> list[Step]:
        which, _, level, sign = numbers[:_PER_OPERATION]
        name = _WIDE[int(which * len(_WIDE))]
        return [(name, self.argument(name, int(level * 31), sign < 0.5))]

    def argument(self, name: str, level: int, negative: bool) -> float:
        """Return the argument of an operation at ``level``, from 0 to 30."""
        x = level / 30
        sign = -1 if negative else 1
        if name in _ENHANCE:
            return 1 + sign * 0.99 * x
        if name == "Posterize":
            return 8 - round(level / 5)
        if name == "Solarize":
            return 255 * (1 - x)
        reach = x * _WIDE_REACH.get(name, 0)
        return sign * (int(reach) if name.startswith("Translate") else reach)


class ThreeAugment:
    """3-Augment of DeiT III, with colour jitter of 0.3, in torchvision's random order."""

    fills_mean = False

    def steps(self, numbers: list[float]) -> list[Step]:
        which, radius, order, *factors = numbers[:6]
        first = (("Grey", 0.0), ("Solarize", 128.0), ("Blur", 0.1 + 1.9 * radius))[int(which * 3)]
        jitter = [*permutations(("Brightness", "Contrast", "Color"))][int(order * 6)]
        return [first, *((name, 0.7 + 0.6 * u) for name, u in zip(jitter, factors, strict=True))]


def policy_of(name: str) -> RandAugment | TrivialAugmentWide | ThreeAugment:
    """Return what an ``auto_augment`` stands for."""
    if name == TRIVIAL:
        return TrivialAugmentWide()
    if name == THREE:
        return ThreeAugment()
    fields: dict[str, Any] = {}
    valid = re.fullmatch(r"rand(-((mstd|p)\d+(\.\d*)?|(m|n|mmax|inc)\d+))*", name)
    for key, value in re.findall(r"-([a-z]+)([\d.]+)", name) if valid else ():
        fields[key] = float(value) if key in ("mstd", "p") else int(value)
    policy = RandAugment(**fields)
    if not (valid and 1 <= policy.n <= _MOST_OPERATIONS and policy.p <= 1 and policy.inc <= 1):
        raise ValueError(
            f"{name!r} is no augmentation; valid: {TRIVIAL}, {THREE}, or rand with m, n (1 to "
            f"{_MOST_OPERATIONS}), p, mstd, mmax and inc (0, 1), such as rand-m7-mstd0.5-inc1"
        )
    return policy


def check_auto_augment(name: str) -> str:
    """Return a name that :func:`policy_of` takes; ValueError says what is valid."""
    policy_of(name)
    return name


class AutoAugment:
    """Augments images; may be called by several threads at once."""

    def __init__(self, name: str, mean: tuple[float, ...], interpolation: str) -> None:
        from PIL import Image

        self._policy = policy_of(name)
        colour = tuple(min(255, round(255 * value)) for value in mean)
        self._look: dict[str, Any] = {
            "resample": Image.Resampling[interpolation.upper()],
            "fillcolor": colour if self._policy.fills_mean else (0, 0, 0),
        }

    def __call__(
        self, levels: NDArray[np.uint8], numbers: NDArray[np.float64]
    ) -> NDArray[np.uint8]:
        """Return the augmented form of an image, uint8, ``[height, width, 3]``.

        ``numbers`` are those of the image from :meth:`~largebatch.pipeline.order.Stream.take`.
        """
        from PIL import Image

        steps = self._policy.steps(numbers[UNIFORMS : UNIFORMS + NUMBERS].tolist())
        if not steps:
            return levels
        image = Image.fromarray(levels)
        for name, argument in steps:
            image = self.apply(image, name, argument)
        return np.asarray(image)

    def apply(self, image: Image.Image, name: str, argument: float) -> Image.Image:
        """Apply one operation to an RGB image."""
        from PIL import Image, ImageEnhance, ImageFilter, ImageOps

        match name:
            case "Grey":
                return image.convert("L").convert("RGB")
            case "Blur":
                return image.filter(ImageFilter.GaussianBlur(argument))
            case "AutoContrast" | "Equalize" | "Invert":
                change: Callable[[Image.Image], Image.Image] = getattr(ImageOps, name.lower())
                return change(image)
            case "Color" | "Contrast" | "Brightness" | "Sharpness":
                enhanced: Image.Image = getattr(ImageEnhance, name)(image).enhance(argument)
                return enhanced
            case "Posterize":
                kept = 256 - 2 ** (8 - int(argument))  # with 0 bits, which Pillow refuses, black
                return image.point(3 * [value & kept for value in range(256)])
            case "Solarize":
                return ImageOps.solarize(image, argument)  # type: ignore[arg-type]
            case "SolarizeAdd":
                brighter = [min(255, v + int(argument)) if v < 128 else v for v in range(256)]
                return image.point(3 * brighter)
            case "Rotate":
                return image.rotate(argument, **self._look)
            case "Identity":
                return image
        width, height = image.size
        matrices = {
            "ShearX": (1, argument, 0, 0, 1, 0),
            "ShearY": (1, 0, 0, argument, 1, 0),
            "TranslateX": (1, 0, argument, 0, 1, 0),
            "TranslateY": (1, 0, 0, 0, 1, argument),
            "TranslateXRel": (1, 0, argument * width, 0, 1, 0),
            "TranslateYRel": (1, 0, 0, 0, 1, argument * height),
        }
        return image.transform(image.size, Image.Transform.AFFINE, matrices[name], **self._look)
