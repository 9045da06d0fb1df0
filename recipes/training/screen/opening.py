"""What a run shows when it starts: at most 11 lines, each with a label, and what it begins with.

The lines name what was chosen for the user where the recipe says ``auto``: precision, compilation,
the back end that decodes, the all-reduce. What counts apart are notices, the checkpoint that a run
resumes from and the weights that it starts from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ....comm import Rule, Topology, launches_are_ordered
from ....lars import Span
from ....pipeline import without_query
from ...models.batch_norm import in_words as batch_norm_in_words
from ...models.optimizers import in_words as optimizer_in_words
from ...schema.optimizers import entry_of
from ...words import binary_size, count, describe_rule, folded, in_full
from ..build import Components
from ..callbacks import RunContext
from ..timeline import schedule_in_words

#: Lines are this long at most, in characters, where names and paths allow.
WIDTH = 100
_LABEL = 12  # width of the labels
_ROOM = WIDTH - _LABEL - 2
_OTHERS = "{} more in recipe.yaml"  # what does not fit into a line


def show_opening(
    run: RunContext,
    components: Components,
    asked: Mapping[str, Any],
    precision: str,
    topology: Topology,
    notices: Iterable[str] = (),
    changes: Iterable[str] = (),
) -> None:
    """Show the lines of a run, then notices and what the run begins with."""
    recipe, start = run.recipe, components.resume_from
    parameters = sum(p.numel() for p in run.model.parameters())
    average = "" if recipe.ema.decay is None else f", average of the weights {recipe.ema.decay:.4g}"
    lines = {
        "data": _data(run),
        "input": _input(run, asked),
        "batch": _batch(run, components, topology),
        "stages": _stages(run),
        "steps": _steps(run),
        "schedule": schedule_in_words(recipe, components.rates, run.timeline),
        "optimizer": _optimizer(run),
        "precision": _precision(run, components, asked, precision),
        "all-reduce": _all_reduce(run, components, asked, topology),
        "run folder": str(run.run_dir),
    }
    run.say(
        f"{run.name}: {recipe.model.name}, {parameters / 1e6:.1f} M parameters{average}, "
        f"seed {recipe.seed}"
        + "".join(f"\n  {label:{_LABEL}}{text}" for label, text in lines.items() if text)
        + "".join(f"\n  {notice}" for notice in notices)
    )
    if components.start:
        run.say(components.start)
    elif start:
        changed = (f"\n  {line}" for line in (*changes, *components.changes))
        run.say(f"resumed from {start} at step {run.step}" + "".join(changed))
    elif recipe.resume.from_:
        run.say("no checkpoint to resume from yet: training starts at step 0")


def _listed(*parts: str) -> str:
    """The parts that are not empty, in a row."""
    return ", ".join(filter(None, parts))


def _chosen(value: Any) -> str:
    """A mark beside what was chosen where the recipe says ``auto``."""
    return " (auto)" if value == "auto" else ""


def _data(run: RunContext) -> str:
    recipe, source, val = run.recipe, run.loader.source, run.val_loader
    size = recipe.data.image_size
    return _listed(
        f"{len(source):,} training images",
        f"{len(val.source):,} for validation" if val else "",
        count(len(source.classes), "class", "classes"),
        f"{size} pixels",
        f"{recipe.eval_size} in val" if val and recipe.eval_size != size else "",
    )


def _input(run: RunContext, asked: Mapping[str, Any]) -> str:
    loader, data = run.loader, run.recipe.data
    if data.source == "synthetic":
        return "synthetic images"
    back_end = f"{loader.backend}{_chosen(asked['data']['backend'])}"
    return _listed(
        f"{data.source} {without_query(data.path or '')}",
        f"decoded by {back_end} on {count(loader.threads, 'thread')}",
        f"{count(loader.prefetch, 'batch', 'batches')} ahead",
        "unusable images skipped" if data.on_error == "skip" else "",
    )


def _batch(run: RunContext, components: Components, topology: Topology) -> str:
    """How the images of a step divide, such as ``256 = 64 images x 2 accumulated x 2 ranks``."""
    loader, job = run.loader, run.job
    factors = [f"{loader.micro_batch_size:,} images"]
    if loader.accumulation > 1:
        factors.append(f"{loader.accumulation:,} accumulated")
    nodes = _on_nodes(topology) if job.world_size > 1 else ""
    factors.append(f"{count(job.world_size, 'rank')}{nodes}")
    norm = batch_norm_in_words(run.recipe, components.model, loader, job.world_size)
    return f"{loader.phase.batch_size:,} = {' x '.join(factors)}{f'; {norm}' if norm else ''}"


def _on_nodes(topology: Topology) -> str:
    """Where the ranks are, such as `` on 2 nodes of 8``."""
    sizes = [len(node) for node in topology.nodes]
    if len(sizes) == 1:
        return " on one node"
    if len({*sizes}) == 1:
        return f" on {len(sizes):,} nodes of {sizes[0]}"
    listed = folded([str(size) for size in sizes], 24, " + ")
    return f" on nodes of {listed}"


def _stages(run: RunContext) -> str:
    """What changes where in the run, such as ``batch 32 from 1ep, learning rate unchanged``."""
    rates = {None: "", "keep": ", learning rate unchanged"}
    found = []
    for stage in run.recipe.stages:
        what = _listed(
            f"{stage.image_size} pixels" if stage.image_size else "",
            f"batch {stage.batch_size:,}" if stage.batch_size else "",
        )
        rate = rates.get(stage.lr, f", learning rate scaled ({stage.lr})")
        found.append(f"{what} from {stage.from_}{rate}")
    return folded(found, _ROOM, "; ", _OTHERS)


def _steps(run: RunContext) -> str:
    recipe, timeline, last = run.recipe, run.timeline, run.last_step
    initially = " initially" if timeline.changes else ""
    target, every = recipe.target_accuracy, recipe.checkpoint.every
    parts = [
        f"{timeline.total_steps:,} in {in_full(Span(recipe.epochs, 'ep'))}",
        f"{timeline.steps_per_epoch:.2f} per epoch{initially}",
        f"stopping after {last:,}" if last < timeline.total_steps else "",
        f"until {target:g} % top-1" if target is not None else "",
        f"evaluation every {recipe.evaluate_every}" if run.val_loader else "",
        f"checkpoint every {every}" if every else "",
    ]
    return folded([*filter(None, parts)], _ROOM, others=_OTHERS)


def _optimizer(run: RunContext) -> str:
    """The optimizer and its settings that are most often changed; ``recipe.yaml`` has them all."""
    options = run.recipe.optimizer
    name, others = optimizer_in_words(run.recipe, run.optimizer)
    everywhere = " on all" if options.weight_decay and options.decay_bias_and_norm else ""
    parts = [
        name,
        f"momentum {options.momentum:g}" if "momentum" in entry_of(options.name).keys else "",
        f"weight decay {options.weight_decay:g}{everywhere}",
        others,
        f"gradients clipped at norm {clip:g}" if (clip := options.clip_grad_norm) else "",
        *(f"{key} {value}" for key, value in options.args.items()),
    ]
    return folded([*filter(None, parts)], _ROOM, others=_OTHERS)


def _precision(
    run: RunContext, components: Components, asked: Mapping[str, Any], precision: str
) -> str:
    recipe, device = run.recipe, run.job.device.type
    threads = f" with {count(torch.get_num_threads(), 'thread')}" if device == "cpu" else ""
    by_auto, mode = _chosen(asked["compile"]), recipe.compile_mode
    compiled = "not compiled" + by_auto if by_auto else ""
    if mode:
        compiled = f"compiled{by_auto}" if mode == "default" else f"compiled ({mode})"
    return _listed(
        f"{precision}{_chosen(asked['precision'])} on {device}{threads}",
        f"loss scale {recipe.loss_scale}" if recipe.loss_scale != "auto" else "",
        compiled,
        components.settings.in_words(),
    )


def _all_reduce(
    run: RunContext, components: Components, asked: Mapping[str, Any], topology: Topology
) -> str:
    """Which algorithm reduces messages of which size, such as ``ring to 1 MiB, torus above``."""
    if run.job.world_size == 1:
        return ""
    plan, job, file = components.plan, run.job, run.recipe.comm.plan
    by_auto = "" if file else _chosen(asked["comm"]["algorithm"])
    parts = [_rule(rule, alone=len(plan.rules) == 1) + by_auto for rule in plan.rules]
    sizes = plan.segments or (plan.fusion_threshold_bytes,)
    is_ordered = job.device.type == "cuda" and launches_are_ordered()
    further = [
        "buckets of " + folded([binary_size(size) for size in sizes], 24),
        f"nodes by {topology.source}" if topology.source != "given" else "",
        str(file or ""),
        job.back_end,
        "NCCL_LAUNCH_ORDER_IMPLICIT=1" if is_ordered else "",
    ]
    more = "".join(f"; {part}" for part in further if part)
    return folded(parts, max(64, _ROOM - len(more))) + more


def _rule(rule: Rule, *, alone: bool) -> str:
    sizes = "" if alone else f" to {binary_size(rule.max_bytes)}" if rule.max_bytes else " above"
    return describe_rule(rule) + sizes
