"""Divergence: when a run has diverged, and what its user is told."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..errors import TrainingError
from ..ranks import Job
from . import checkpoint


def is_finite(model: nn.Module, job: Job) -> bool:
    """Whether all weights and buffers are finite on all ranks; a collective, and a host sync."""
    finite = all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
    return not job.all_reduce_max(float(not finite))[0]


def divergence(
    what: str, step: int, *, last_step: int, lr: float, checkpoints: Path, good_step: int
) -> TrainingError:
    """The error of a run that diverged.

    Args:
        what: What was found.
        step: Step at which it was found.
        last_step: Last step of the run.
        lr: Learning rate of the step.
        checkpoints: Folder of the run's checkpoints.
        good_step: Losses are known to be finite before this step. A loss is that of the weights
            before its step, so checkpoints before it are good.
    """
    good = checkpoint.latest(checkpoints, before=good_step)
    return TrainingError(
        f"training diverged: {what} at step {step} of {last_step}, learning rate {lr:.4g}; "
        + (f"the last good checkpoint is {good}" if good else "there is no checkpoint yet")
        + "; lower optimizer.lr or lengthen schedule.warmup"
        + (f", and continue from there with resume={good} and another run_dir" if good else "")
    )
