"""The sections ``mixing`` and ``loss``: what becomes of labels in training, and what is minimized.

The keys are those of timm, under shorter names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .types import Float, NotNegative, PositiveInt, Section, wrong


class Mixing(Section):
    """Mixup and CutMix: training images blended with others of their group."""

    mixup: NotNegative = 0.0
    """Alpha of the Beta(alpha, alpha) distribution from which mixup draws an image's own weight
    (Zhang et al. 2017); 0: no mixup."""
    cutmix: NotNegative = 0.0
    """Alpha of the Beta(alpha, alpha) distribution from which CutMix draws the share of an image
    outside of the box that it takes from another (Yun et al. 2019); 0: no CutMix. With mixup, half
    of the groups have either."""
    group: PositiveInt = 32
    """Number of consecutive images, even, whose halves are mixed with one another, with one weight
    or one box; a divisor of every micro-batch. Every number of ranks then mixes the same images.
    From twice data.repeats on, no image is mixed with itself."""

    @property
    def is_on(self) -> bool:
        """Whether any image can be mixed."""
        return self.mixup > 0 or self.cutmix > 0

    @model_validator(mode="after")
    def _check(self) -> Mixing:
        if self.group % 2:
            raise wrong("group", f"{self.group} images do not pair up; valid: an even number")
        return self


class Loss(Section):
    """The loss of training."""

    name: Literal["cross-entropy", "binary-cross-entropy"] = "cross-entropy"
    """What is minimized. cross-entropy: that of the softmax over classes; binary-cross-entropy:
    that of a sigmoid for each class."""
    threshold: Annotated[Float, Field(ge=0, lt=1)] | None = None
    """Binary cross-entropy only: targets above it, after mixing and smoothing, count as 1 and
    others as 0; null: as they are."""
    sum_classes: bool = False
    """Binary cross-entropy only: add up the classes, in place of their mean."""

    @model_validator(mode="after")
    def _check(self) -> Loss:
        for key, default in (("threshold", "null"), ("sum_classes", "false")):
            if self.name == "cross-entropy" and getattr(self, key) not in (None, False):
                what = "only for name binary-cross-entropy; valid with name"
                raise wrong(key, f"{what} {self.name}: {default}")
        return self
