"""Find the loss scale that a recipe needs, from the gradients of its first steps in FP32.

Follows Micikevicius et al. 2018 (arXiv 1710.03740), section 4: choose the scale by the magnitudes
of the gradients in a real run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ...amp import (
    INITIAL_LOSS_SCALE,
    LOSS_SCALE_HEADROOM,
    UnderflowReport,
    underflow_report,
)
from ..errors import RecipeError
from ..ranks import Job, device_of
from ..schema.load import Loaded, load, override
from ..schema.recipe import Recipe
from ..training.folder import checkpoint
from ..training.trainer import Trainer

PICTURE = "underflow.png"


@dataclass(frozen=True)
class PrecisionTuning:
    """The underflow observed in several steps of a recipe.

    Attributes:
        name: name of the recipe.
        report: counts of flushed gradients and updates.
        present: loss scale that the recipe uses in FP16; the initial one if it is dynamic.
        dynamic: whether that loss scale is dynamic.
    """

    name: str
    report: UnderflowReport
    present: float
    dynamic: bool


def tune_precision(recipe: str, overrides: Sequence[str], steps: int) -> PrecisionTuning:
    """Train a recipe for several steps in FP32 on this process, and count underflows.

    The run itself is not kept. With ``resume=PATH`` among the overrides, it starts from that
    checkpoint.

    Args:
        recipe: name or path of the recipe.
        overrides: overrides of the form ``key=value``.
        steps: number of optimizer steps to observe.

    Raises:
        RecipeError, DataError: the recipe, an override or the data is invalid.
    """
    asked = load(recipe, overrides)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(recipe, [*overrides, *_only(steps, asked.recipe, Path(folder) / "run")])
        report = _watch(loaded)
    scale = asked.recipe.loss_scale
    dynamic = scale in ("auto", "dynamic")
    present = INITIAL_LOSS_SCALE if dynamic else 1.0 if scale == "none" else float(scale)
    return PrecisionTuning(loaded.name, report, present, dynamic)


def _only(steps: int, recipe: Recipe, run_dir: Path) -> list[str]:
    """Return overrides that reduce the run to the steps to observe."""
    wanted = recipe.resume.from_
    if wanted == "latest":
        raise RecipeError(
            "resume: true takes the newest checkpoint of a run folder; valid here: resume=PATH of "
            "a checkpoint"
        )
    start = checkpoint.read_state(Path(wanted))["step"] if wanted else 0
    off = ("evaluate_every", "trust_ratios_every", "gradient_noise_every", "checkpoint.every")
    return [
        *("precision=fp32", "loss_scale=none", f"stop_after={start + steps}"),
        "compile=false",  # hooks of layers watch the gradients
        *(f"{key}=null" for key in (*off, "target_accuracy")),
        *("track=[]", "callbacks=[]", override("run_dir", str(run_dir))),
    ]


def _watch(loaded: Loaded) -> UnderflowReport:
    job = Job(0, 1, 1, device_of(loaded.recipe, 0))
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    # The run is not kept, so do not report it.
    trainer = Trainer.of(loaded, job, quiet=True, warns=False)
    with underflow_report(trainer.model, trainer.optimizer, trainer.precision) as report:
        trainer.run()
    return report


def print_summary(tuning: PrecisionTuning) -> None:
    """Print a table by layer and the loss scale to use."""
    report, best = tuning.report, tuning.report.best_loss_scale
    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    scaled = (f"at {tuning.present:g}\n(present)", f"at {best:g}\n(best)")
    updates = ("updates\nflushed", "lost in FP16\nweights")
    for column in ("gradients flushed\nunscaled", *scaled, *updates):
        table.add_column(column, justify="right")
    for layer in (*report.layers, report.total):
        scales = (1.0, tuning.present, best)
        shares = [layer.gradients_flushed(scale) for scale in scales]
        shares += [layer.updates_flushed, layer.updates_lost]
        if layer.name == report.total.name:
            table.add_section()
        table.add_row(layer.name, *(f"{share:.2%}" for share in shares))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(
        f"{tuning.name}, {report.steps} steps in FP32: fraction of the values of each layer, of "
        "its parameters and its output, that FP16 would flush to zero",
        markup=False,
        soft_wrap=True,
    )
    console.print(table)
    start = " (initially, dynamic)" if tuning.dynamic else ""
    console.print(
        f"largest gradient: {report.largest_gradient:.3g}; present loss scale: {tuning.present:g}"
        f"{start}; largest loss scale with headroom to overflow (a factor of "
        f"{LOSS_SCALE_HEADROOM:g}): {report.largest_loss_scale:g}",
        soft_wrap=True,
    )
    console.print(f"loss scale to use: loss_scale={best:g}", soft_wrap=True)


def make_folder(out: Path) -> None:
    """Create the output folder, before any time is spent on the results.

    Raises:
        RecipeError: the folder cannot be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"--out: cannot write into {out}: {error.strerror}") from None


def draw(tuning: PrecisionTuning, out: Path) -> Path:
    """Plot the share of all gradient values that FP16 flushes to zero, by loss scale.

    Returns:
        The path of the picture in the folder ``out``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    report = tuning.report
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(f"{tuning.name}: gradients in FP16, {report.steps} steps")
    scales = [2.0**exponent for exponent in range(32)]
    axes.plot(scales, [100 * report.total.gradients_flushed(scale) for scale in scales])
    if report.largest_loss_scale < scales[-1]:
        axes.axvspan(report.largest_loss_scale, scales[-1], color="tab:red", alpha=0.1, lw=0,
                     label="near overflow")  # fmt: skip
    axes.axvline(tuning.present, color="tab:gray", ls="--", label=f"present: {tuning.present:g}")
    best = report.best_loss_scale
    axes.axvline(best, color="tab:green", ls="--", label=f"best: {best:g}")
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, scales[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("loss scale")
    axes.set_ylabel("gradient values flushed to zero (%)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(out / PICTURE, dpi=110)
    return out / PICTURE
