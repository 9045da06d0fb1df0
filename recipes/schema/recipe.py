"""The schema of a recipe: every key, its type, its default and what it means.

Checked by pydantic; what can be known without the data and the machine is checked here, the rest
by the trainer before the first step.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ...amp import LOSS_SCALES, OPT_LEVELS, PRECISIONS
from ...lars import Span
from .dotted_path import is_dotted_path
from .sections import (
    BatchNorm,
    Checkpoint,
    Comm,
    Data,
    Ema,
    Init,
    MLPerf,
    Model,
    Optimizer,
    Resume,
    Schedule,
    Stage,
    UserCallback,
    expand_callbacks,
    expand_resume,
)
from .types import Float, Int, Period, Positive, PositiveInt, Section, one_of, wrong


def _own_name(value: Any) -> Any:
    """apex's name of a precision as ours."""
    return OPT_LEVELS.get(value, value) if isinstance(value, str) else value


def _loss_scale(value: Any) -> Any:
    if value in LOSS_SCALES:
        return value
    try:
        if not isinstance(value, bool) and 0 < float(value) < float("inf"):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"must be a positive number or one of {', '.join(LOSS_SCALES)}")


Tracker = Literal["tensorboard", "wandb", "mlflow"]
#: What ``callbacks`` takes in a file, for the JSON schema.
_CallbacksForm = str | UserCallback | tuple[str | UserCallback, ...]


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
    batch_size: PositiveInt = Field(description="global: images per update, over all ranks")
    micro_batch_size: PositiveInt | None = Field(
        None, description="per rank and forward pass; default: batch_size / ranks"
    )
    batch_norm: BatchNorm = BatchNorm()
    scale: Literal["linear", "sqrt"] | None = Field(
        None,
        description="how optimizer.lr follows another batch_size than that of the recipe which is "
        "extended or overridden; null again once that is worked out",
    )
    stages: tuple[Stage, ...] = Field(
        (), description="from where on images or batches have another size"
    )
    epochs: Positive
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    label_smoothing: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    precision: Annotated[
        one_of("auto", *PRECISIONS),  # type: ignore[valid-type]
        BeforeValidator(_own_name),
    ] = Field(
        "fp32",
        description="auto: bf16 or fp32, whichever the machine runs faster; *-master: parameters "
        "and gradients in half, FP32 masters; apex's O0 to O3 are names for fp32, fp16, "
        "fp16-master and fp16-pure",
    )
    loss_scale: Annotated[float | str, BeforeValidator(_loss_scale)] = Field(
        "auto", description="a number is a static scale; auto: dynamic in fp16, else none"
    )
    max_skipped_steps: PositiveInt = Field(
        20, description="steps in a row whose gradients may overflow before the run stops"
    )
    channels_last: bool = Field(False, description="memory format of images and weights: NHWC")
    compile: bool = Field(False, description="torch.compile the model")
    device: Literal["auto", "cuda", "cpu"] = "auto"
    comm: Comm = Comm()
    init: Init = Init()
    ema: Ema = Ema()
    evaluate_every: Period | None = Field(Span(1, "ep"), description="null: never")
    log_every: Period = Field(Span(10, ""), description="meters are read this often")
    trust_ratios_every: Period | None = Field(
        None, description="LARS: histograms of each tensor's ratios are written; null: never"
    )
    checkpoint: Checkpoint = Checkpoint()
    mlperf: MLPerf = MLPerf()
    track: Annotated[
        tuple[Tracker, ...],
        BeforeValidator(_listed, json_schema_input_type=Tracker | tuple[Tracker, ...]),
        AfterValidator(_distinct),
    ] = Field(("tensorboard",), description="Experiment trackers that get the metrics; []: none.")
    callbacks: Annotated[
        tuple[UserCallback, ...],
        BeforeValidator(expand_callbacks, json_schema_input_type=_CallbacksForm),
    ] = Field(
        (),
        description="Callbacks of your own: dotted paths such as mypkg.module:MyCallback, or "
        "{name: mypkg.module:MyCallback, args: {...}}.",
    )
    run_dir: str | None = Field(None, description="default: runs/<recipe>/<date and time>")
    resume: Annotated[Resume, BeforeValidator(expand_resume)] = Resume()
    target_accuracy: Annotated[Float, Field(gt=0, le=100)] | None = Field(
        None,
        description="stop when top-1 in percent reaches it, of the weights, not of their average",
    )
    stop_after: Period | None = Field(
        None, description="stop there, with the schedule of the whole run"
    )

    @property
    def eval_size(self) -> int:
        """Pixels on each side of the images that are evaluated."""
        sizes = [stage.image_size for stage in self.stages if stage.image_size]
        return self.data.eval_size or [self.data.image_size, *sizes][-1]

    def reached(self, top1: float | None) -> bool:
        """Whether a top-1, in percent, is one at which the run stops."""
        target = self.target_accuracy
        return target is not None and top1 is not None and top1 >= target

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.data.eval_resize < self.eval_size:
            what = f"must be at least the size that is evaluated, {self.eval_size}"
            raise wrong("data.eval_resize", what)
        batch, micro, where = self.batch_size, self.micro_batch_size, ""
        for i, stage in enumerate((None, *self.stages)):
            if stage:
                where = f"stages.{i - 1}."
                batch, micro = stage.batch_size or batch, stage.micro_batch_size or micro
            if micro and batch % micro:
                most = next(n for n in range(min(micro, batch), 0, -1) if batch % n == 0)
                what = f"{micro} does not divide batch_size {batch}; valid: a divisor, such as"
                raise wrong(f"{where}micro_batch_size", f"{what} {most}")
        if self.target_accuracy is not None and self.evaluate_every is None:
            raise wrong("target_accuracy", "needs evaluate_every, which is null")
        if self.trust_ratios_every is not None and self.optimizer.name != "lars":
            raise wrong("trust_ratios_every", f"{self.optimizer.name} has none; valid: null")
        scaled = self.loss_scale != "none"
        ours = self.optimizer.name == "lars" or is_dotted_path(self.optimizer.name)
        if self.precision == "fp16-pure" and not ours and scaled:
            name = self.optimizer.name.replace("sgd", "SGD")
            what = f"goes with optimizer.name lars, or loss_scale none: torch's {name} does not"
            raise wrong("precision", f"fp16-pure {what} unscale FP16 gradients")
        if self.schedule.warmup_shape == "exponential" and self.optimizer.lr == 0:
            raise wrong("optimizer.lr", "must be above 0 with an exponential warm-up")
        return self
