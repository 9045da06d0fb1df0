"""Find the loss scale that a recipe needs, from the gradients of its first steps in FP32.

Follows Micikevicius et al. 2018 (arXiv 1710.03740), section 4: choose the scale by the magnitudes
of the gradients in a real run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from ...amp import INITIAL_LOSS_SCALE, LOSS_SCALE_HEADROOM, UnderflowReport, underflow_report
from ..errors import RecipeError
from ..output import console, table
from ..ranks import Job, device_of
from ..schema.load import load, override
from ..schema.recipe import Recipe
from ..training.folder import checkpoint
from ..training.trainer import Trainer


def tune_precision(recipe: str, overrides: Sequence[str], steps: int) -> None:
    """Train for several updates in FP32 on this process, and print the underflow; keeps no run."""
    asked = load(recipe, overrides)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(recipe, [*overrides, *_only(steps, asked.recipe, Path(folder) / "run")])
        job = Job(0, 1, 1, device_of(loaded.recipe, 0))
        if job.device.type == "cuda":
            torch.cuda.set_device(job.device)
        trainer = Trainer.of(loaded, job, quiet=True, warns=False)
        with underflow_report(trainer.model, trainer.optimizer, trainer.precision) as report:
            trainer.run()
    _print(loaded.name, report, asked.recipe.loss_scale)


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


def _print(name: str, report: UnderflowReport, scale: str | float) -> None:
    """Print a table by layer, and the loss scale to use in place of the recipe's."""
    dynamic, best = scale in ("auto", "dynamic"), report.best_loss_scale
    present = INITIAL_LOSS_SCALE if dynamic else 1.0 if scale == "none" else float(scale)
    scaled = (f"at {present:g}\n(present)", f"at {best:g}\n(best)")
    updates = ("updates\nflushed", "lost in FP16\nweights")
    found = table("layer", "gradients flushed\nunscaled", *scaled, *updates)
    for layer in (*report.layers, report.total):
        shares = [layer.gradients_flushed(scale) for scale in (1.0, present, best)]
        shares += [layer.updates_flushed, layer.updates_lost]
        found.add_row(layer.name, *(f"{share:.2%}" for share in shares))
    out = console(120)
    out.print(
        f"{name}, {report.steps} steps in FP32: fraction of the values of each layer, of "
        "its parameters and its output, that FP16 would flush to zero",
        markup=False,
    )
    out.print(found)
    start = " (initially, dynamic)" if dynamic else ""
    out.print(
        f"largest gradient: {report.largest_gradient:.3g}; present loss scale: {present:g}"
        f"{start}; largest loss scale with headroom to overflow (a factor of "
        f"{LOSS_SCALE_HEADROOM:g}): {report.largest_loss_scale:g}"
    )
    out.print(f"loss scale to use: loss_scale={best:g}")
