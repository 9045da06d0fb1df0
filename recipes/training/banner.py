"""What is told of a run when it starts."""

from __future__ import annotations

from ...comm import Topology
from ..models.batch_norm import in_words
from ..ranks import Job
from ..schema.recipe import Recipe
from .build import Components


def banner(
    name: str, recipe: Recipe, made: Components, precision: str, job: Job, topology: Topology
) -> str:
    """The lines that a run begins with: the model, the data, the batch, the length.

    Args:
        name: of the recipe.
        recipe: checked.
        made: what the run is made of.
        precision: the one that is used, where the recipe leaves it open.
        job: the ranks.
        topology: which node each rank is on.
    """
    loader, val_loader = made.loader, made.val_loader
    parameters = sum(p.numel() for p in made.model.parameters())
    val = f" and {len(val_loader.source):,} to evaluate" if val_loader else ""
    nodes = " + ".join(str(len(node)) for node in topology.nodes)
    algorithms = ", ".join(dict.fromkeys(rule.algorithm for rule in made.plan.rules))
    stages = "".join(f", {s.image_size} from {s.from_}" for s in recipe.stages if s.image_size)
    size, sizes = recipe.data.image_size, ""
    if stages or recipe.eval_size != size:
        sizes = f"; {size} pixels{stages}, evaluated at {recipe.eval_size}"
    batches = "".join(
        f"\n  batch {s.batch_size} from {s.from_}, learning rate "
        + ("kept" if s.lr == "keep" else f"scaled ({s.lr})")
        for s in recipe.stages
        if s.batch_size
    )
    first = " at first" if made.timeline.changes_batch else ""
    reduced = f", reduced by {algorithms} all-reduce" if job.world_size > 1 else ""
    norm = in_words(recipe, made.model, loader, job.world_size)
    start = f"\n  {made.start.summary}" if made.start else ""
    return (
        f"{name}: {recipe.model.name}, {parameters / 1e6:.1f} M parameters, "
        f"{precision} on {job.device.type}\n"
        f"  {len(loader.source):,} images to train on{val}, {len(loader.source.classes)} classes, "
        f"read by {loader.backend}{sizes}\n"
        f"  batch {loader.batch_size} = {loader.micro_batch_size} images x "
        f"{loader.accumulation} accumulated x {job.world_size} ranks "
        f"(nodes of {nodes}){reduced}{batches}\n"
        + (f"  {norm}\n" if norm else "")
        + f"  {made.timeline.total_steps} steps, {loader.steps_per_epoch:.2f} per epoch{first}; "
        f"run folder {made.run_dir}{start}"
    )
