"""The sections of a recipe: their keys, with type, default and meaning.

The sections ``data``, ``mixing`` and ``loss`` are in :mod:`.data`.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ...comm import ALGORITHM_NAMES
from ...lars import DECAY_FROM, DIALECT_NAMES, WARMUP_SHAPES, Span
from .dotted_path import DottedPath, NameOrPath
from .optimizers import OPTIMIZERS, known, set_elsewhere
from .types import (
    Float,
    Int,
    Length,
    NotNegative,
    Period,
    Positive,
    PositiveInt,
    Section,
    must_be,
    one_of,
    wrong,
)


class Model(Section):
    """The network."""

    name: NameOrPath
    """Model of timm, airbench, alexnet_bn, resnet50_blurpool, resnet9, or the dotted path of a
    factory, such as mypkg.module:factory, which is called with num_classes and args."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of the model. ResNets of timm, and ours, initialize the weight (gamma) of
    the last norm layer in each residual block to zero unless zero_init_last is false."""

    @model_validator(mode="after")
    def _check(self) -> Model:
        for key in ("in_chans", "num_classes", "pretrained"):
            if key in self.args:
                raise wrong(f"args.{key}", "set by the trainer; valid: leave it out")
        return self


class BatchNorm(Section):
    """Which images share the statistics of batch norm; by default those of a micro-batch."""

    images: PositiveInt | None = None
    """Ghost batch norm: statistics of slices of this many images, a divisor of the micro-batch."""
    ranks: Annotated[PositiveInt | Literal["all"] | None, must_be("a number, or all")] = None
    """Synchronized batch norm: statistics over the micro-batches of this many consecutive ranks, a
    divisor of the number of ranks, or of all ranks."""

    def group(self, world_size: int) -> int:
        """Number of ranks that share statistics, of ``world_size``."""
        return world_size if self.ranks == "all" else self.ranks or 1

    @model_validator(mode="after")
    def _check(self) -> BatchNorm:
        if self.images and self.ranks:
            raise wrong("images", "cannot be combined with batch_norm.ranks; valid with it: null")
        return self


class Optimizer(Section):
    """The optimizer and its hyper-parameters."""

    name: Annotated[NameOrPath, AfterValidator(known)] = Field(
        "lars",
        description=f"Optimizer: {', '.join(OPTIMIZERS)}, a class of torch.optim such as "
        "Adafactor, or the dotted path of a factory, such as mypkg.module:factory, which is "
        "called with parameter groups, lr and args.",
    )
    lr: NotNegative
    """Peak learning rate, for the global batch."""
    body_lr_scale: NotNegative = 1.0
    """Factor of the learning rate of all parameters but the classifier's, over the whole schedule:
    below 1 to fine-tune the weights of init.from."""
    bias_lr_scale: NotNegative = 1.0
    """Factor of the learning rate of biases and norm layers, over the whole schedule. Barlow Twins
    uses 0.024 (0.0048 and 0.2)."""
    momentum: Annotated[Float, Field(ge=0, lt=1)] = 0.9
    """For {users}: momentum coefficient. Others take it in args, as betas for example."""
    weight_decay: NotNegative = 0.0
    """Weight decay: with lars and sgd the coefficient of an L2 penalty that is added to gradients,
    else what the optimizer makes of it (lamb, adamw and, for hidden weights, muon decouple it from
    the gradients)."""
    nesterov: bool = False
    """For {users}: use Nesterov momentum."""
    clip_grad_norm: Positive | None = None
    """Norm of all gradients of a step, to which a larger one is scaled down; null: no clipping."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of the optimizer without a key of their own: betas of adamw; eps,
    denominator and trust_clip of lars. A recipe or override that names another optimizer drops
    them."""
    trust_coefficient: Positive = 1e-3
    """For {users}: factor of the trust ratio (eta in You et al. 2017); with muon only where
    adjust_lr_fn is trust_ratio, or rule is lars."""
    dialect: one_of(*DIALECT_NAMES) = "mlperf"  # type: ignore[valid-type]
    """For {users}: where the learning rate is applied. mlperf: inside the momentum buffer;
    mlperf-corrected: the same with momentum correction (Goyal et al. 2017, remark 2); torch, larc
    and simclr-popular: outside the buffer, as in SGD, where no correction is needed; in
    simclr-popular the trust ratio is that of the momentum."""
    decay_bias_and_norm: bool = False
    """Apply weight decay to biases and norm layers too."""
    adapt_bias_and_norm: bool = False
    """For {users}: apply the trust ratio to biases and norm layers too; with muon only where rule
    is lars."""

    @model_validator(mode="after")
    def _check(self) -> Optimizer:
        if self.nesterov and self.momentum == 0:
            raise wrong("nesterov", "needs momentum > 0; valid with momentum 0: false")
        for key in self.args:
            if by := set_elsewhere(self.name, key):
                raise wrong(f"args.{key}", f"set by {by}; valid: leave it out")
        return self


#: The schedules that a key applies to; the other keys apply to all.
_APPLIES_TO = {
    "decay": ("polynomial", "cosine"),
    "decay_from": ("polynomial", "cosine"),
    "power": ("polynomial",),
    "end": ("polynomial", "cosine"),
    "milestones": ("step",),
}


class Schedule(Section):
    """The learning-rate schedule."""

    name: Literal["polynomial", "cosine", "step", "constant"] = "polynomial"
    """Shape of the decay after warm-up."""
    warmup: Length = Span(0, "")
    """Length of the warm-up."""
    warmup_shape: one_of(*WARMUP_SHAPES) = "linear"  # type: ignore[valid-type]
    """Shape of the warm-up."""
    start: NotNegative = 0.0
    """Learning rate at the start of the warm-up."""
    decay: Length | None = None
    """Polynomial and cosine: length of the decay. Default: until the end."""
    decay_from: one_of(*DECAY_FROM) = "warmup"  # type: ignore[valid-type]
    """Polynomial and cosine: count the decay from the end of warm-up, or from the run's start."""
    power: Positive = 2.0
    """Polynomial only: exponent of the decay."""
    end: NotNegative = 0.0
    """Polynomial and cosine: learning rate at the end of the decay."""
    milestones: tuple[Length, ...] = ()
    """Step only: where the learning rate falls to a tenth, counted from the start of the run."""

    @model_validator(mode="after")
    def _check(self) -> Schedule:
        for key, names in _APPLIES_TO.items():
            default = type(self).model_fields[key].default
            if self.name not in names and getattr(self, key) != default:
                what = f"only for name {' or '.join(names)}; valid with name {self.name}"
                raise wrong(key, f"{what}: {json.dumps(default)}")
        if self.name == "step" and not self.milestones:
            raise wrong("milestones", "needed for name step; valid: such as [30ep, 60ep, 80ep]")
        if self.warmup_shape == "exponential" and self.start == 0:
            raise wrong("start", "an exponential warm-up cannot start at 0; valid: above 0")
        return self


class Stage(Section):
    """A part of the run with another image size or batch size."""

    from_: Period = Field(alias="from")
    """Where the stage begins."""
    image_size: PositiveInt | None = None
    """Height and width of training images, in pixels. Default: unchanged."""
    batch_size: PositiveInt | None = None
    """Global batch size; needs lr. Default: unchanged."""
    lr: Literal["keep", "linear", "sqrt"] | None = None
    """What multiplies the scheduled learning rate from here on. keep: 1; linear: new / old
    batch_size; sqrt: the square root of that."""

    @model_validator(mode="after")
    def _check(self) -> Stage:
        if self.batch_size and self.lr is None:
            raise wrong("lr", "needed with batch_size; valid: keep, linear, sqrt")
        if self.lr and self.batch_size is None:
            raise wrong("lr", "only with batch_size; valid without it: null")
        if not (self.image_size or self.batch_size):
            raise wrong("from", "nothing changes there; valid: add image_size, batch_size or both")
        return self


class Comm(Section):
    """The all-reduce of gradients."""

    algorithm: one_of("auto", *ALGORITHM_NAMES) | None = None  # type: ignore[valid-type]
    """All-reduce algorithm for every message size. auto: that of the plan, if one is given; else
    ring on one node or with one rank on each, hierarchical on several nodes of equal size, leader
    where sizes differ. Default: ring."""
    plan: str | None = None
    """File with a plan from `largebatch comm tune`, in place of algorithm."""
    ranks_per_node: PositiveInt | None = None
    """Number of ranks that are treated as one node. Default: those of a machine, by torchrun."""
    timeout_seconds: PositiveInt = 600
    """Time in seconds after which a collective fails although all ranks answer. A rank that does
    not answer ends the run sooner: after 30 s and ten usual steps."""

    @model_validator(mode="after")
    def _check(self) -> Comm:
        if self.algorithm not in (None, "auto") and self.plan:
            what = f"cannot be combined with algorithm {self.algorithm}"
            raise wrong("plan", f"{what}; valid with it: null")
        return self


class Checkpoint(Section):
    """When checkpoints are written."""

    every: Period | None = Span(1, "ep")
    """Interval between checkpoints; null: only at the end."""
    keep: PositiveInt = 2
    """Number of latest checkpoints to keep."""
    keep_best: bool = False
    """Also write and keep a checkpoint of the best top-1 accuracy so far."""


def _steps(value: Any) -> Any:
    """Check a range of steps; return ``FIRST..LAST``, or the only one."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*([1-9]\d*)\s*(?:\.\.\s*(\d+)\s*)?", str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a range of steps from 1 on; valid: 10..15, or 10")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"{value} runs backwards; valid: such as {last}..{first}")
    return str(first) if first == last else f"{first}..{last}"


class Profile(Section):
    """A trace of some steps by torch.profiler, and a table of what costs most."""

    steps: Annotated[
        str | None, BeforeValidator(_steps, json_schema_input_type=str | int | None)
    ] = None
    """Steps to record, from the first to the last: 10..15, or 10 for one; null: none. Steps count
    from 1. The files are in the run's folder profile."""
    ranks: (
        Literal["all"] | Annotated[tuple[Annotated[Int, Field(ge=0)], ...], Field(min_length=1)]
    ) = (0,)
    """Ranks that record; all: every rank."""

    @property
    def first_and_last(self) -> tuple[int, int] | None:
        """First and last step to record; None: none."""
        if self.steps is None:
            return None
        first, _, last = self.steps.partition("..")
        return int(first), int(last or first)

    def records(self, rank: int) -> bool:
        """Whether a rank records."""
        return self.ranks == "all" or rank in self.ranks


class Init(Section):
    """Weights to start from."""

    from_: str | None = Field(None, alias="from")
    """Initial weights: timm:NAME, published ones with their data.mean and data.std where the recipe
    sets none, a file of timm, a weights.pt, or the folder of a run or checkpoint; of the same model
    or a shallower one of its family."""
    images: PositiveInt | None = None
    """Number of training images, as in evaluation, that the model is initialized from: for
    airbench, which whitens with its first layer, and models of your own with a method
    init_from_images."""

    @model_validator(mode="after")
    def _check(self) -> Init:
        if self.from_ and self.images:
            raise wrong("images", "init.from has all weights already; valid with it: null")
        return self


class Ema(Section):
    """The exponential moving average (EMA) of the weights."""

    decay: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """Weight of the old average at each step, at most (1 + n) / (10 + n) at step n; null: no
    average."""


class UserCallback(Section):
    """A callback of your own."""

    name: DottedPath
    """Dotted path of a subclass of largebatch.recipes.training.callbacks.Callback, or of a function
    that makes one."""
    args: dict[str, Any] = Field({})
    """Its keyword arguments."""


def expand_callbacks(value: Any) -> Any:
    """Expand the short forms of ``callbacks``: one for a list of one, and a path for its name."""
    listed = [value] if isinstance(value, str | dict) else value
    if not isinstance(listed, list | tuple):
        return listed
    return [{"name": each} if isinstance(each, str) else each for each in listed]


class Resume(Section):
    """Continuing a stopped run."""

    from_: str | None = Field(None, alias="from")
    """latest: the newest checkpoint in run_dir; or the folder of a checkpoint."""
    reshard: bool = False
    """Accept a checkpoint from another number of ranks or size of micro-batches. The global batch
    stays; a micro-batch that the recipe leaves open does not grow."""


def expand_resume(value: Any) -> Any:
    """Expand the short forms ``resume: true`` (the newest checkpoint) and ``resume: PATH``."""
    if isinstance(value, bool) or value is None:
        return {"from": "latest" if value else None}
    return {"from": value} if isinstance(value, str) else value
