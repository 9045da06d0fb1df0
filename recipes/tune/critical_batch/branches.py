"""The branch test: train on from a checkpoint at several batch sizes, and compare the losses.

After Merrill et al. 2025 (arXiv 2505.23971). The recipe's own run, the trunk, is trained up to a
point and saved there. From it, branches train on for the same number of images at each batch size,
with the learning rate scaled by the rule. A branch resumes the checkpoint with a stage that begins
there and sets the batch size, so that it continues with the weights, the optimizer's state and the
order of images of the trunk. The momentum buffer is kept as it is: gradients are means over the
global batch, so its content does not depend on the batch size, except for a rate inside the buffer
(LARS in the form ``mlperf``), where past gradients keep the rate that they had.

The learning rate of a branch falls linearly from that of the trunk, times the factor of the rule,
to 0 at its end. Without that, the loss would depend on the noise of the last steps, which is
smaller with a large batch at a rate that is not scaled in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import RecipeError
from ...schema.load import load, override
from ...training.folder.checkpoint import CHECKPOINTS, latest
from ...training.schedule import learning_rates
from ...training.timeline import timeline_of
from .runs import Base, Run

#: Points of the trunk at which branches leave it, and their lengths, in those of the target run.
POINTS = (0.25, 0.5)
LENGTHS = (0.25, 0.5)


def check_branches(base: Base) -> None:
    """Raise RecipeError if branches of the recipe would not train on what its trunk does."""
    if base.recipe.stages:
        raise RecipeError(
            "--method: branches take the place of the recipe's stages; valid: runs, or stages=[]"
        )


def plan_branches(base: Base, batches: Sequence[int], epochs: float) -> list[Run]:
    """The branches at all points and batch sizes, in the order of the points."""
    return [
        Run(batch, round(epochs * length, 3), base.recipe.seed, round(epochs * point, 3))
        for point in POINTS
        for length in LENGTHS
        for batch in batches
    ]


def trunk_overrides(base: Base, epochs: float, until: float) -> list[str]:
    """Overrides that train the recipe's own run of ``epochs`` epochs up to ``until`` and save it.

    A trunk that was saved at an earlier point continues from there.
    """
    whole = Run(base.recipe.batch_size, epochs, base.recipe.seed)
    own = [f"stop_after={until!r}ep", "resume=true", "checkpoint.keep=99"]
    return [*base.overrides(whole), *own, "gradient_noise_every=null"]


def branch_overrides(base: Base, run: Run, epochs: float, trunk: Path) -> list[str]:
    """Overrides that make a branch of the trunk.

    Args:
        base: The recipe.
        run: The branch.
        epochs: Length of the trunk's schedule in epochs.
        trunk: Folder of the trunk's run, which was saved at ``run.after``.

    Raises:
        RecipeError: The folder has no checkpoint there, or the learning rate is 0 there.
    """
    whole = Run(base.recipe.batch_size, epochs, run.seed)
    common = base.overrides(whole)
    recipe = load(str(base.path), common).recipe
    timeline = timeline_of(recipe, base.images, base.world_size)
    step = round(run.after * base.images / base.recipe.batch_size)
    checkpoint = latest(trunk / CHECKPOINTS, before=step + 1)
    if checkpoint is None or int(checkpoint.name.split("-")[1]) != step:
        raise RecipeError(
            f"--out: {trunk} has no checkpoint at step {step}; valid: another folder, to start anew"
        )
    rate = learning_rates(recipe, timeline).schedule(step)
    if rate == 0:
        raise RecipeError(
            f"schedule: the learning rate after {run.after:.3g} epochs is 0; valid: above 0"
        )
    own = base.recipe.batch_size
    micro = base.micro_batch_size(run.batch_size)
    stage = f"{{from: {step}, batch_size: {run.batch_size}, micro_batch_size: {micro}, lr: "
    end = timeline.epoch(step) + run.epochs
    return [
        f"batch_size={own}",
        f"micro_batch_size={base.micro_batch_size(own)}",
        f"seed={run.seed}",
        f"epochs={end!r}",
        f"optimizer.lr={rate!r}",
        # The steps before the checkpoint are the warm-up; they are not made again.
        f"schedule={{name: polynomial, warmup: {step}, warmup_shape: linear, power: 1}}",
        *("schedule.start=0", "schedule.end=0", "schedule.decay=null", "schedule.factor=0.1"),
        *("schedule.milestones=[]", "schedule.decay_from=warmup", "stop_after=null"),
        "gradient_noise_every=null",  # whole runs show it, from their begin to their end
        f"stages=[{stage}{base.rule}}}]" if run.batch_size != own else "stages=[]",
        override("resume", str(checkpoint)),
    ]


def group(run: Run) -> str:
    """Name of the curve that a run's loss lies on: branches of one point share one."""
    return f"after {run.after:.3g} epochs" if run.after else ""
