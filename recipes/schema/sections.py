"""The sections of a recipe: their keys, with type, default and meaning.

What can be known without the data and the machine is checked here, the rest by the trainer before
the first step.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ...comm import ALGORITHMS
from ...lars import Span
from ...lars.reference import DIALECTS
from ...lars.schedules import DECAY_FROM, WARMUP_SHAPES
from ...pipeline import BACKENDS, IMAGENET_MEAN, IMAGENET_STD, ON_ERROR, SHARD_FORMATS
from ..errors import but_valid
from .dotted_path import DottedPath, NameOrPath, is_dotted_path
from .types import (
    Float,
    Int,
    Length,
    NotNegative,
    Period,
    Positive,
    PositiveInt,
    Range,
    Section,
    Share,
    one_of,
    wrong,
)

OWN_OPTIMIZERS = ("lars", "sgd")

#: Classes of torch.optim that cannot take a step of the trainer.
_UNUSABLE = {
    "LBFGS": "evaluates the loss several times in a step",
    "SparseAdam": "takes sparse gradients only",
}


def _known_optimizer(name: str) -> str:
    if name in OWN_OPTIMIZERS or is_dotted_path(name):
        return name
    import torch.optim

    def usable(attribute: str) -> bool:
        found = getattr(torch.optim, attribute)
        is_optimizer = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
        return is_optimizer and found is not torch.optim.Optimizer and attribute not in _UNUSABLE

    known = [*OWN_OPTIMIZERS, *filter(usable, dir(torch.optim))]
    if name in known:
        return name
    near = next((k for k in known if k.casefold() == name.casefold()), name)
    reason = f"{name} {_UNUSABLE[name]}" if name in _UNUSABLE else f"no optimizer {name!r}"
    raise ValueError(
        f"{reason}{but_valid(near, known)}: {', '.join(known)}, or a dotted path such as "
        "mypkg.module:factory"
    )


class Model(Section):
    name: NameOrPath = Field(
        description="Model of timm, alexnet_bn, resnet9, or the dotted path of a factory, such as "
        "mypkg.module:factory, which is called with num_classes and args."
    )
    args: dict[str, Any] = Field({}, description="Keyword arguments of the model.")
    zero_init_last_norm: bool = Field(
        True, description="gamma of the last norm layer of each residual block starts at zero"
    )

    @model_validator(mode="after")
    def _check(self) -> Model:
        for key in ("in_chans", "num_classes", "pretrained"):
            if key in self.args:
                raise wrong(f"args.{key}", "is set by the data and the recipe: leave it out")
        return self


class BatchNorm(Section):
    over: Literal["micro-batch", "ghost", "rank", "group", "global"] = Field(
        "micro-batch",
        description="what shares batch statistics: what a rank forwards at once, slices of that, "
        "all of a rank in a step, or the micro-batches of a group of ranks or of all",
    )
    images: PositiveInt | None = Field(
        None, description="ghost only: images in a slice; divides the micro-batch"
    )
    ranks: PositiveInt | None = Field(
        None, description="group only: ranks in a row that make a group; divides their number"
    )

    @model_validator(mode="after")
    def _check(self) -> BatchNorm:
        for key, over in (("images", "ghost"), ("ranks", "group")):
            given = getattr(self, key) is not None
            if given and self.over != over:
                raise wrong(key, f"goes with over {over}; valid with {self.over}: null")
            if not given and self.over == over:
                raise wrong(key, f"over {over} needs it: a number of {key}, such as 8")
        return self


class Data(Section):
    source: one_of("folder", *SHARD_FORMATS, "synthetic") = Field(  # type: ignore[valid-type]
        "folder", description="image folders, shards, or random images on the device"
    )
    path: str | None = Field(
        None,
        description="folder with train/<class>/ and val/<class>/, or with the shards in train/ "
        "and val/; shards may also lie at an http, https or s3 URL, with their index",
    )
    train_shards: str | None = Field(
        None,
        description="shards only: which files of path they are, as 'train-*.tar'; "
        "default: those in train/",
    )
    val_shards: str | None = Field(
        None, description="shards only: those to evaluate; default: those in val/"
    )
    label_offset: Annotated[Int, Field(ge=0)] = Field(
        0, description="shards without an index only: what their labels count from"
    )
    train_images: PositiveInt = Field(
        1_281_167, description="synthetic; of folders, only for plans made where they are not"
    )
    val_images: Annotated[Int, Field(ge=0)] = Field(
        0, description="synthetic only; 0: no evaluation"
    )
    classes: PositiveInt = Field(1000, description="synthetic only")
    holdout: PositiveInt | None = Field(
        None,
        description="so many of the training images are evaluated in place of val, and not "
        "trained on: for tuning",
    )
    backend: one_of("auto", *BACKENDS) = Field("auto", description="what decodes")  # type: ignore[valid-type]
    threads: PositiveInt | None = Field(
        None, description="decoding threads per rank; default: its share of the cores"
    )
    prefetch: PositiveInt | None = Field(None, description="micro-batches made ahead; default: 2")
    on_error: one_of(*ON_ERROR) = Field(  # type: ignore[valid-type]
        "stop",
        description="at an image that cannot be used: stop, or skip it (listed in the run folder)",
    )
    image_size: PositiveInt = Field(224, description="pixels on each side")
    eval_size: PositiveInt | None = Field(
        None, description="of evaluated images; default: image_size, or that of the last stage"
    )
    eval_resize: PositiveInt = Field(256, description="shorter side before the central crop")
    crop_area: Range = Field((0.08, 1.0), description="share of the image that a crop covers")
    crop_aspect: Range = Field((3 / 4, 4 / 3), description="width by height of a crop")
    flip: Share = Field(0.5, description="probability of a mirrored image")
    mean: tuple[Float, Float, Float] = IMAGENET_MEAN
    std: tuple[Positive, Positive, Positive] = IMAGENET_STD

    @model_validator(mode="after")
    def _check(self) -> Data:
        if self.source != "synthetic" and self.path is None:
            raise wrong("path", f"source {self.source} needs a path")
        if self.source == "synthetic" and self.holdout:
            raise wrong("holdout", "goes with images that are read, not synthetic ones")
        for key in ("train_shards", "val_shards", "label_offset"):
            if self.source not in SHARD_FORMATS and getattr(self, key):
                raise wrong(key, f"goes with source {', '.join(SHARD_FORMATS)}")
        for key in ("crop_area", "crop_aspect"):
            least, most = getattr(self, key)
            if least > most:
                raise wrong(key, "least and most, in this order")
        if self.crop_area[1] > 1:
            raise wrong("crop_area", "a crop covers at most 1 of the image")
        return self


class Optimizer(Section):
    name: Annotated[NameOrPath, AfterValidator(_known_optimizer)] = Field(
        "lars",
        description="lars, sgd, a class of torch.optim such as AdamW, or the dotted path of a "
        "factory, such as mypkg.module:factory, which is called with parameter groups, lr and "
        "args.",
    )
    lr: NotNegative = Field(description="peak learning rate, of the global batch")
    momentum: Annotated[Float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NotNegative = 0.0
    nesterov: bool = False
    args: dict[str, Any] = Field(
        {}, description="Not for lars and sgd: keyword arguments of the optimizer, such as betas."
    )
    trust_coefficient: Positive = Field(1e-3, description="LARS only")
    eps: NotNegative = Field(0.0, description="LARS only")
    dialect: one_of(*DIALECTS) = Field(  # type: ignore[valid-type]
        "mlperf",
        description="LARS only: where the rate stands. mlperf: inside the momentum buffer; "
        "mlperf-corrected: so too, with momentum correction (Goyal et al. 2017, remark 2); "
        "torch, larc: outside, as in sgd, where none is needed",
    )
    decay_bias_and_norm: bool = Field(False, description="weight decay on them too")
    adapt_bias_and_norm: bool = Field(False, description="LARS only: trust ratio on them too")

    @model_validator(mode="after")
    def _check(self) -> Optimizer:
        if self.nesterov and self.momentum == 0:
            raise wrong("nesterov", "needs momentum > 0")
        if self.args and self.name in OWN_OPTIMIZERS:
            raise wrong("args", f"{self.name} takes none; valid: {{}}")
        for key in ("params", "lr", "weight_decay"):
            if key in self.args:
                raise wrong(f"args.{key}", "set by the trainer; valid: leave it out")
        return self


#: The schedules that a key of a schedule is for; the other keys are for all.
_GOES_WITH = {
    "decay": ("polynomial", "cosine"),
    "decay_from": ("polynomial", "cosine"),
    "power": ("polynomial",),
    "end": ("polynomial", "cosine"),
    "milestones": ("step",),
    "factor": ("step",),
}


class Schedule(Section):
    name: Literal["polynomial", "cosine", "step", "constant"] = Field(
        "polynomial", description="what follows the warm-up"
    )
    warmup: Length = Field(Span(0, ""), description="length of the warm-up")
    warmup_shape: one_of(*WARMUP_SHAPES) = "linear"  # type: ignore[valid-type]
    start: NotNegative = Field(0.0, description="learning rate it starts from")
    decay: Length | None = Field(
        None, description="length of a polynomial or cosine decay; default: to the end"
    )
    decay_from: one_of(*DECAY_FROM) = Field(  # type: ignore[valid-type]
        "warmup", description="decay is counted from the end of warm-up or the start of the run"
    )
    power: Positive = Field(2.0, description="polynomial only")
    end: NotNegative = Field(
        0.0, description="learning rate that a polynomial or cosine decay ends at"
    )
    milestones: tuple[Length, ...] = Field(
        (), description="step only: where the rate falls, from the start of the run"
    )
    factor: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="step only: what it is multiplied by there"
    )

    @model_validator(mode="after")
    def _check(self) -> Schedule:
        for key, names in _GOES_WITH.items():
            default = type(self).model_fields[key].default
            if self.name not in names and getattr(self, key) != default:
                raise wrong(
                    key,
                    f"goes with name {' or '.join(names)}; valid with {self.name}: "
                    f"{json.dumps(default)}",
                )
        if self.name == "step" and not self.milestones:
            raise wrong("milestones", "name step needs them, such as [30ep, 60ep, 80ep]")
        if self.warmup_shape == "exponential" and self.start == 0:
            raise wrong("start", "must be above 0, as an exponential warm-up cannot leave 0")
        return self


class Stage(Section):
    from_: Period = Field(alias="from", description="where it begins")
    image_size: PositiveInt | None = Field(None, description="pixels on each side, in training")
    batch_size: PositiveInt | None = Field(None, description="global; goes with lr")
    micro_batch_size: PositiveInt | None = Field(None, description="default: unchanged")
    lr: Literal["keep", "linear", "sqrt"] | None = Field(
        None,
        description="what the scheduled rate is multiplied by from there on: keep: by 1; linear: "
        "by new / old batch_size; sqrt: by the root of that",
    )

    @model_validator(mode="after")
    def _check(self) -> Stage:
        if self.batch_size and self.lr is None:
            raise wrong("lr", "batch_size needs it; valid: keep, linear, sqrt")
        if self.lr and self.batch_size is None:
            raise wrong("lr", "goes with batch_size")
        if not (self.image_size or self.batch_size or self.micro_batch_size):
            raise wrong("from", "nothing changes there: add image_size, batch_size or both")
        return self


class Comm(Section):
    algorithm: one_of(*ALGORITHMS) | None = Field(  # type: ignore[valid-type]
        None, description="for every message; default: ring"
    )
    plan: str | None = Field(None, description="plan file, in place of algorithm")
    ranks_per_node: PositiveInt | None = Field(
        None, description="ranks taken as one node; default: the machines torchrun reports"
    )
    timeout_seconds: PositiveInt = Field(600, description="after which a collective fails")

    @model_validator(mode="after")
    def _check(self) -> Comm:
        if self.algorithm and self.plan:
            raise wrong("plan", "give either a plan or an algorithm")
        return self


class Checkpoint(Section):
    every: Period | None = Field(Span(1, "ep"), description="null: at the end only")
    keep: PositiveInt = Field(2, description="the newest that are kept")


class Init(Section):
    from_: str | None = Field(
        None,
        alias="from",
        description="weights to start from: a timm checkpoint file, a weights.pt, or the folder of "
        "a run or checkpoint; of the same model, or of a shallower one of its family",
    )


class Ema(Section):
    decay: Annotated[Float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="weights are averaged, the old average weighing this much; null: they are not",
    )
    every: Period = Field(Span(1, ""), description="how often the average takes the weights in")
    warmup: bool = Field(
        True, description="at the n-th time the decay is at most (1 + n) / (10 + n)"
    )


class MLPerf(Section):
    log: str | None = Field(
        None, description="closed-division log to write; a relative path is in the run folder"
    )
    org: str = Field("unstated", min_length=1, description="who submits")
    platform: str | None = Field(None, min_length=1, description="default: the machines found")
    status: Literal["cloud", "onprem", "preview", "research"] = "research"
    cache_cleared: bool = Field(
        False, description="that the machines' caches were cleared before the start, not by us"
    )


class UserCallback(Section):
    """A callback of the user."""

    name: DottedPath = Field(
        description="Dotted path of a subclass of largebatch.recipes.training.callbacks.Callback, "
        "or of a function that makes one."
    )
    args: dict[str, Any] = Field({}, description="Its keyword arguments.")


def expand_callbacks(value: Any) -> Any:
    """Expand the short forms of ``callbacks``: one for a list of one, and a path for its name."""
    listed = [value] if isinstance(value, str | dict) else value
    if not isinstance(listed, list | tuple):
        return listed
    return [{"name": each} if isinstance(each, str) else each for each in listed]


class Resume(Section):
    from_: str | None = Field(
        None, alias="from", description="latest (of run_dir), or a checkpoint's folder"
    )
    reshard: bool = Field(False, description="take a checkpoint of other ranks or micro-batches")


def expand_resume(value: Any) -> Any:
    """``resume: true`` (the newest checkpoint) and ``resume: PATH`` are short for ``from``."""
    if isinstance(value, bool) or value is None:
        return {"from": "latest" if value else None}
    return {"from": value} if isinstance(value, str) else value
