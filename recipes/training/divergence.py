"""Divergence: the check of a run's weights, and the error of a run that diverged."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch
from torch import nn

from ..errors import TrainingError
from ..ranks import Job
from ..schema.load import override
from .callbacks import RunContext
from .folder import checkpoint


def is_finite(model: nn.Module, job: Job) -> bool:
    """Whether all weights and buffers are finite on all ranks; a collective, and a host sync."""
    finite = all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
    return not job.all_reduce_max(float(not finite))[0]


def divergence(run: RunContext, what: str, step: int, lr: float, good_step: int) -> TrainingError:
    """The error of a run that diverged.

    Args:
        run: The run.
        what: What was found.
        step: Step at which it was found.
        lr: Learning rate of the step.
        good_step: Losses are known to be finite before this step. A loss is that of the weights
            before its step, so checkpoints before it are good.
    """
    good = checkpoint.latest(run.run_dir / checkpoint.CHECKPOINTS, before=good_step)
    place = f"at step {step:,} of {run.timeline.total_steps:,}"
    return TrainingError(
        f"training diverged: {what} {place}, learning rate {lr:.4g}; "
        + (f"the last good checkpoint is {good}" if good else "there is no checkpoint yet")
        + "; lower optimizer.lr or lengthen schedule.warmup"
        + (f", and continue from there with {_resume(good)}" if good else "")
    )


def _resume(good: Path) -> str:
    return shlex.quote(override("resume", str(good)))
