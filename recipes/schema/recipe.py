"""The schema of a recipe: every key, its type, its default and its meaning.

pydantic checks what needs neither data nor machine; the trainer the rest, before the first step.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, model_validator

from ...amp import LOSS_SCALES, OPT_LEVELS, PRECISION_NAMES
from ...lars import Span
from .data import Data, Loss, Mixing
from .optimizers import entry_of
from .sections import (
    BatchNorm,
    Checkpoint,
    Comm,
    Ema,
    Init,
    Model,
    Optimizer,
    Profile,
    Resume,
    Schedule,
    Stage,
    UserCallback,
    expand_callbacks,
    expand_resume,
)
from .types import (
    Float,
    Int,
    Period,
    Positive,
    PositiveInt,
    Section,
    Switch,
    must_be,
    one_of,
    wrong,
)


def _own_name(value: Any) -> Any:
    """Translate apex's name of a precision into ours."""
    return OPT_LEVELS.get(value, value) if isinstance(value, str) else value


#: What these keys take in a file, for the JSON schema: short forms and other names too.
_PrecisionName = one_of("auto", *PRECISION_NAMES, *OPT_LEVELS)
_ResumeForm = Resume | bool | str | None
_CallbacksForm = str | UserCallback | tuple[str | UserCallback, ...]
Tracker = Literal["tensorboard", "wandb", "mlflow", "mlperf"]


def _listed(value: Any) -> Any:
    """One name as a list of one."""
    return [value] if isinstance(value, str) else value


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len({*names}) < len(names):
        raise ValueError(f"{', '.join(names)} repeats a name; valid: each once")
    return names


class Recipe(Section):
    """One training run."""

    model: Model
    data: Data
    batch_size: PositiveInt
    """Global batch size: images per update, over all ranks."""
    micro_batch_size: PositiveInt | None = None
    """Images per rank and forward pass, accumulated to batch_size. Default: batch_size / ranks."""
    batch_norm: BatchNorm = BatchNorm()
    scale: Literal["linear", "sqrt"] | None = None
    """Rule that derives optimizer.lr where batch_size differs from the recipe that is extended or
    overridden. Null again once the rate is derived."""
    stages: tuple[Stage, ...] = ()
    """Points of the run at which the image size or the batch size changes."""
    epochs: Positive
    """Length of the run in epochs."""
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the order and augmentation of images."""
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    label_smoothing: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that is spread evenly over all classes, in training."""
    mixing: Mixing = Mixing()
    loss: Loss = Loss()
    precision: Annotated[
        one_of("auto", *PRECISION_NAMES),  # type: ignore[valid-type]
        BeforeValidator(_own_name, json_schema_input_type=_PrecisionName),
    ] = "fp32"
    """Numeric precision. auto: bf16 where the GPU or CPU computes in it, else fp32; *-master:
    half-precision parameters and gradients with FP32 master weights. apex's O0 to O3 mean fp32,
    fp16, fp16-master and fp16-pure."""
    loss_scale: Annotated[
        Positive | one_of(*LOSS_SCALES),  # type: ignore[valid-type]
        must_be(f"a positive number or one of {', '.join(LOSS_SCALES)}"),
    ] = "auto"
    """Loss scale. A number: static; auto: dynamic for FP16, none otherwise."""
    max_skipped_steps: PositiveInt = 20
    """Number of consecutive steps skipped for gradient overflow before the run stops."""
    channels_last: Switch = "auto"
    """Keep images and weights in the channels-last (NHWC) memory format; auto: on CUDA, where
    tensor cores want it. A model that calls view() on feature maps needs false."""
    cudnn_benchmark: Switch = "auto"
    """CUDA only: time cuDNN's algorithms for each shape of convolution and keep the fastest; auto:
    true, as a stage has one shape. With false, and deterministic algorithms in torch, a resumed run
    repeats the same updates bit for bit."""
    tf32: bool = True
    """CUDA only: multiply matrices and convolve what stays FP32 in TF32, with 10 bits of mantissa,
    on tensor cores."""
    compile: Annotated[
        Literal["auto", "default", "reduce-overhead", "max-autotune"] | StrictBool,
        must_be("true, false, auto or one of default, reduce-overhead, max-autotune"),
    ] = "auto"
    """Compile forward pass, loss and backward pass with torch.compile, in one of its modes; true:
    default; auto: default on CUDA, in a run that is long enough to pay for it and whose batch norm
    does not communicate, else false."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on; auto: CUDA where there is a GPU."""
    comm: Comm = Comm()
    init: Init = Init()
    ema: Ema = Ema()
    evaluate_every: Period | None = Span(1, "ep")
    """Interval between evaluations; null: none."""
    log_every: Period = Span(10, "")
    """Interval between lines of metrics of the training loss."""
    trust_ratios_every: Period | None = None
    """For lars and muon: interval between histograms of each layer's trust ratio; null: none."""
    gradient_noise_every: Period | None = None
    """Interval between steps that measure the gradient noise scale, noise_scale in the metrics;
    null: none. Needs accumulation or several ranks."""
    checkpoint: Checkpoint = Checkpoint()
    profile: Profile = Profile()
    track: Annotated[
        tuple[Tracker, ...],
        BeforeValidator(_listed, json_schema_input_type=Tracker | tuple[Tracker, ...]),
        AfterValidator(_distinct),
    ] = ("tensorboard",)
    """Experiment trackers that get the metrics; mlperf writes the log of MLPerf Training's closed
    division, result_0.txt; []: none."""
    callbacks: Annotated[
        tuple[UserCallback, ...],
        BeforeValidator(expand_callbacks, json_schema_input_type=_CallbacksForm),
    ] = ()
    """Callbacks of your own: dotted paths such as mypkg.module:MyCallback, or {name:
    mypkg.module:MyCallback, args: {...}}."""
    run_dir: str | None = None
    """Folder of the run. Default: runs/RECIPE/DATE-AND-TIME."""
    resume: Annotated[
        Resume, BeforeValidator(expand_resume, json_schema_input_type=_ResumeForm)
    ] = Resume()
    target_accuracy: Annotated[Float, Field(gt=0, le=100)] | None = None
    """Top-1 in percent at which the run stops; of the weights, not of their moving average."""
    stop_after: Period | None = None
    """Where to stop early, on the schedule of the whole run."""

    @property
    def eval_size(self) -> int:
        """Height and width of evaluated images, in pixels."""
        sizes = [stage.image_size for stage in self.stages if stage.image_size]
        return self.data.eval_size or [self.data.image_size, *sizes][-1]

    @property
    def compile_mode(self) -> str | None:
        """Mode of torch.compile; None: nothing is compiled, or ``auto`` is not settled yet."""
        if isinstance(self.compile, bool):
            return "default" if self.compile else None
        return None if self.compile == "auto" else self.compile

    @property
    def micro_batch_unit(self) -> int:
        """Images in what micro-batches hold whole: slices of batch norm and groups of mixing."""
        mixed = self.mixing.group if self.mixing.is_on else 1
        return math.lcm(self.batch_norm.images or 1, mixed)

    def reached(self, top1: float | None) -> bool:
        """Whether the run stops at a top-1 accuracy, in percent."""
        target = self.target_accuracy
        return target is not None and top1 is not None and top1 >= target

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.data.eval_resize < self.eval_size:
            what = "is smaller than the size of evaluated images; valid: at least"
            raise wrong("data.eval_resize", f"{self.data.eval_resize} {what} {self.eval_size}")
        smallest = min([self.data.image_size, *(s.image_size for s in self.stages if s.image_size)])
        if self.data.translate >= smallest:
            what = f"{self.data.translate} would move images out of view"
            raise wrong("data.translate", f"{what}; valid: below image_size, {smallest}")
        micro = self.micro_batch_size
        stages = {f"stages.{i}.batch_size": s.batch_size for i, s in enumerate(self.stages)}
        for key, batch in {"batch_size": self.batch_size, **stages}.items():
            if batch and micro and batch % micro:
                most = next(n for n in range(min(micro, batch), 0, -1) if batch % n == 0)
                what = f"{micro} does not divide {key} {batch}; valid: a divisor, such as"
                raise wrong("micro_batch_size", f"{what} {most}")
            if batch and self.mixing.is_on and (micro or batch) % self.mixing.group:
                what = f"{self.mixing.group} does not divide a micro-batch of {micro or batch}"
                raise wrong("mixing.group", f"{what}; valid: an even divisor of it")
        if self.target_accuracy is not None and self.evaluate_every is None:
            raise wrong("target_accuracy", "needs evaluate_every; valid without it: null")
        entry = entry_of(self.optimizer.name)
        ratios = entry.trust_ratios and entry.trust_ratios(self.optimizer.args)
        if self.trust_ratios_every is not None and not ratios:
            why = " with its args" * bool(entry.trust_ratios)
            what = f"{self.optimizer.name} has no trust ratios{why}; valid: null"
            raise wrong("trust_ratios_every", what)
        if self.schedule.warmup_shape == "exponential" and self.optimizer.lr == 0:
            raise wrong("optimizer.lr", "an exponential warm-up needs a peak; valid: above 0")
        return self
