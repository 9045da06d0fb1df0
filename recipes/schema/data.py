"""The sections ``data``, ``mixing`` and ``loss``: images, their labels, and what is minimized.

The keys of ``mixing`` and ``loss`` are those of timm, under shorter names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_serializer, model_validator

from ...pipeline import (
    BACKENDS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    INTERPOLATIONS,
    ON_ERROR,
    SHARD_FORMATS,
    VERIFY,
    DataError,
    check_auto_augment,
    check_secrets,
    without_secrets,
)
from .types import (
    Float,
    Int,
    NotNegative,
    Positive,
    PositiveInt,
    Range,
    Section,
    Share,
    must_be,
    one_of,
    wrong,
)


class Data(Section):
    """The images, and how they are read and augmented."""

    source: one_of("folder", *SHARD_FORMATS, "synthetic") = "folder"  # type: ignore[valid-type]
    """Where images come from: class folders, shards in one of three formats, or random images
    generated on the device."""
    path: str | None = None
    """Folder with train/CLASS/ and val/CLASS/, with CLASS/ alone where holdout is set, or with the
    shards in train/ and val/. Indexed shards may also be at an http, https or s3 URL. The query of
    a signed URL is not stored: a resume needs it again."""
    train_shards: str | None = None
    """Shards only: the training shards in path, as a pattern such as 'train-*.tar'. Default: those
    in train/."""
    val_shards: str | None = None
    """Shards only: the shards to evaluate, as a pattern. Default: those in val/."""
    label_offset: Annotated[Int, Field(ge=0)] = 0
    """Shards without an index only: the label of the first class."""
    train_images: PositiveInt = 1_281_167
    """Number of training images, for synthetic data. With other sources it is used only to plan
    where the data is not available."""
    val_images: Annotated[Int, Field(ge=0)] = 0
    """Synthetic data only: number of images to evaluate; 0: no evaluation."""
    classes: PositiveInt = 1000
    """Synthetic data only: number of classes."""
    holdout: PositiveInt | None = None
    """Number of training images that are held out and evaluated in place of val, for tuning."""
    backend: one_of("auto", *BACKENDS) = "auto"  # type: ignore[valid-type]
    """Image decoder; auto: the fastest that is installed, which is DALI on a GPU and for images of
    less than 192 pixels, else nvImageCodec."""
    threads: PositiveInt | None = None
    """Number of decoding threads per rank. Default: the machine's cores divided by its ranks."""
    prefetch: PositiveInt | None = None
    """Number of micro-batches decoded ahead of use. Default: 2, or 4 with DALI on a GPU of compute
    capability 9.0 or higher."""
    on_error: one_of(*ON_ERROR) = "stop"  # type: ignore[valid-type]
    """What to do about an unusable image: stop, or skip it, name it in one warning and count it in
    summary.json. One that cannot be read now is read again in the next epoch."""
    verify: one_of(*VERIFY) = "decode"  # type: ignore[valid-type]
    """Which images are unreadable, for on_error. decode: those that the backend cannot decode; of a
    damaged one it may use a part. strict: also damaged ones, the same with every backend, found by
    libjpeg's warnings and PNG's checksums when an image is first read."""
    image_size: PositiveInt = 224
    """Height and width of training images, in pixels."""
    eval_size: PositiveInt | None = None
    """Height and width of evaluated images, in pixels. Default: as at the end of training."""
    eval_resize: PositiveInt = 256
    """Pixels that the shorter side of an evaluated image is resized to before the central crop."""
    eval_interpolation: one_of(*INTERPOLATIONS) = "bilinear"  # type: ignore[valid-type]
    """How evaluated images are resized, antialiased."""
    train_interpolation: one_of(*INTERPOLATIONS) = "bilinear"  # type: ignore[valid-type]
    """How training images are resized, antialiased, and moved by auto_augment."""
    crop_area: Range = (0.08, 1.0)
    """Random crop of training images: smallest and largest share of the image's area."""
    crop_aspect: Range = (3 / 4, 4 / 3)
    """Random crop of training images: smallest and largest ratio of width to height."""
    flip: Annotated[
        Share | Literal["alternating"], must_be("a probability from 0 to 1, or alternating")
    ] = 0.5
    """Probability of a horizontal flip in training. alternating: half of the images in even epochs,
    the others in odd ones."""
    translate: Annotated[Int, Field(ge=0)] = 0
    """Pixels by which a training image is shifted at most, to any side, after cropping and
    resizing. What comes into view is black."""
    auto_augment: Annotated[str, AfterValidator(check_auto_augment)] | None = Field(
        None, examples=["rand-m7-mstd0.5-inc1", "ta_wide", "3_augment"]
    )
    """Operations on training images, not with DALI: RandAugment in timm's notation, such as
    rand-m7-mstd0.5-inc1; ta_wide, TrivialAugmentWide; 3_augment, that of DeiT III."""
    erasing: Share = 0.0
    """Probability that a rectangle of a training image is erased: set to the mean colour."""
    repeats: PositiveInt = 1
    """Times that an image is shown in a row, each augmented on its own. An epoch keeps its length,
    and so shows 1 / repeats of the images, others in each epoch."""
    mean: tuple[Float, Float, Float] = IMAGENET_MEAN
    """Mean of each channel (red, green, blue), subtracted from pixels in [0, 1]."""
    std: tuple[Positive, Positive, Positive] = IMAGENET_STD
    """Standard deviation of each channel, which pixels are divided by."""

    @field_serializer("path", when_used="json")
    def _stored(self, path: str | None) -> str | None:
        """Leave out of recipe.yaml, checkpoints and trackers what opens a server."""
        return path and without_secrets(path)

    @model_validator(mode="after")
    def _check(self) -> Data:
        try:
            check_secrets(self.path or "")
        except DataError as error:
            raise wrong("path", str(error)) from None
        if self.source == "folder" and "://" in (self.path or ""):
            what = f"{without_secrets(self.path or '')} is a URL, not a folder; valid there: source"
            raise wrong("path", f"{what} {', '.join(SHARD_FORMATS)}")
        if self.source != "synthetic" and self.path is None:
            raise wrong("path", f"needed for source {self.source}; valid: a folder or URL")
        if self.source == "synthetic" and self.holdout:
            raise wrong("holdout", "not for synthetic images; valid: null, or another source")
        for key in ("train_shards", "val_shards", "label_offset"):
            if self.source not in SHARD_FORMATS and getattr(self, key):
                raise wrong(key, f"only for shards; valid with source {', '.join(SHARD_FORMATS)}")
        for key in ("crop_area", "crop_aspect"):
            least, most = getattr(self, key)
            if least > most:
                raise wrong(key, f"{least:g} is above {most:g}; valid: [smallest, largest]")
        if self.crop_area[1] > 1:
            raise wrong("crop_area", "a crop cannot exceed the image; valid: at most 1")
        return self


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
