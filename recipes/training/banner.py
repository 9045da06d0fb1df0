"""The lines that a run shows when it starts."""

from __future__ import annotations

from collections.abc import Iterable

from ...comm import Topology, launches_are_ordered
from ..models.batch_norm import in_words
from ..models.optimizers import in_words as optimizer_in_words
from ..ranks import Job
from ..schema.recipe import Recipe
from .build import Components


def banner(
    name: str, recipe: Recipe, components: Components, precision: str, job: Job, topology: Topology
) -> str:
    """Return the lines that describe a run: its model, data, batch, device settings and length.

    Args:
        name: Name of the recipe.
        recipe: The recipe.
        components: Components of the run.
        precision: Name of the precision in use, which the recipe may leave open.
        job: The ranks.
        topology: The node of each rank.
    """
    loader, val_loader = components.loader, components.val_loader
    timeline = components.timeline
    parameters = sum(p.numel() for p in components.model.parameters())
    val = f", {len(val_loader.source):,} for validation" if val_loader else ""
    nodes = " + ".join(str(len(node)) for node in topology.nodes)
    if topology.source != "given":
        nodes += f" by {topology.source}"
    algorithms = ", ".join(dict.fromkeys(rule.algorithm for rule in components.plan.rules))
    stages = "".join(f", {s.image_size} from {s.from_}" for s in recipe.stages if s.image_size)
    size, sizes = recipe.data.image_size, ""
    if stages or recipe.eval_size != size:
        sizes = f"; {size} pixels{stages}, evaluation at {recipe.eval_size}"
    batches = "".join(
        f"\n  batch {s.batch_size} from {s.from_}, learning rate "
        + ("unchanged" if s.lr == "keep" else f"scaled ({s.lr})")
        for s in recipe.stages
        if s.batch_size
    )
    initially = " initially" if timeline.changes_batch else ""
    reduced = f", reduced by {algorithms} all-reduce" if job.world_size > 1 else ""
    if reduced and job.device.type == "cuda" and launches_are_ordered():
        reduced += " with NCCL_LAUNCH_ORDER_IMPLICIT=1"
    norm = in_words(recipe, components.model, loader, job.world_size)
    optimizer = optimizer_in_words(recipe, components.optimizer)
    settings = components.settings.in_words()
    start = f"\n  {components.start.summary}" if components.start else ""
    return (
        f"{name}: {recipe.model.name}, {parameters / 1e6:.1f} M parameters, "
        f"{precision} on {job.device.type}\n"
        f"  {len(loader.source):,} training images{val}, {len(loader.source.classes)} classes, "
        f"decoded by {loader.backend}{sizes}\n"
        f"  batch {loader.batch_size} = {loader.micro_batch_size} images x "
        f"{loader.accumulation} accumulated x {job.world_size} ranks "
        f"(nodes of {nodes}){reduced}{batches}\n"
        + (f"  {norm}\n" if norm else "")
        + (f"  {optimizer}\n" if optimizer else "")
        + (f"  {settings}\n" if settings else "")
        + f"  {timeline.total_steps} steps, {timeline.steps_per_epoch:.2f} per epoch{initially}; "
        f"run folder {components.run_dir}{start}"
    )


def resumption(
    components: Components, changes: Iterable[str], step: int, recipe: Recipe
) -> list[str]:
    """The lines about the checkpoint that a run was to resume from, and what has changed since."""
    path = components.resume_from
    if path is None:
        none = "no checkpoint to resume from yet: training starts at step 0"
        return [none] if recipe.resume.from_ else []
    return [f"resumed from {path} at step {step}", *(f"  {line}" for line in changes)]
