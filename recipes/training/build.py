"""From a recipe to the parts of a run: data, lengths, schedule, optimizer, plan, run folder."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from ...amp import PRECISIONS, MasterWeights, Precision, fastest
from ...comm import Plan, Topology
from ...lars import LARS, Schedule, is_bias_or_norm, split_parameters
from ...pipeline import (
    ImageFolder,
    ImageSource,
    Loader,
    Shards,
    Source,
    Synthetic,
    Transform,
    hold_out,
)
from ..errors import RecipeError
from ..mlperf.log import check_mlperf
from ..models.batch_norm import check_batch_norm
from ..models.build import build_model, check_image_size
from ..ranks import Job
from ..schema.data import Data
from ..schema.load import Loaded
from ..schema.recipe import Recipe
from . import checkpoint
from .init_from import Start, start_from
from .lr import learning_rates
from .metrics import METRICS
from .run_dir import run_folder
from .timeline import Timeline, timeline_of

_CASTING = [name for name, form in PRECISIONS.items() if form.casts_parameters]


@dataclass(frozen=True)
class Components:
    """What a run is made of.

    Attributes:
        run_dir: its folder.
        resume_from: the checkpoint to go on from.
        changes: what is not as it was when the checkpoint was made, beside the recipe.
        saved: what that checkpoint holds beside tensors; empty without one.
        loader: of the training images.
        val_loader: of the validation images; None if there is no evaluation.
        timeline: updates, epochs and images of the whole run.
        last_step: the update to stop after.
        schedule: the learning rate by step.
        plan: how gradients are reduced.
        model: with fresh weights, on the CPU: a check of the recipe does not touch a GPU.
        optimizer: of its parameters.
        start: what the weights were taken from, where they are not fresh; None in a resumed run.
    """

    run_dir: Path
    resume_from: Path | None
    changes: list[str]
    saved: dict[str, Any]
    loader: Loader
    val_loader: Loader | None
    timeline: Timeline
    last_step: int
    schedule: Schedule
    plan: Plan
    model: nn.Module
    optimizer: Optimizer
    start: Start | None

    def facts(self, recipe: Recipe) -> dict[str, str]:
        """What must be the same on all ranks, by what it is about."""
        content = recipe.model_dump(mode="json", by_alias=True)
        for machines_own in ("run_dir", "resume", "init"):
            del content[machines_own]
        del content["data"]["path"]
        return {
            **{f"the recipe's {key}": str(value) for key, value in content.items()},
            "the list of training images": self.loader.source.fingerprint,
            "the list of validation images": (
                self.val_loader.source.fingerprint if self.val_loader else "empty"
            ),
            "the plan": str(self.plan),
            "the last step": str(self.last_step),
            "the content of init.from": self.start.digest if self.start else "not read",
            "the step to go on from": str(self.saved.get("step", 0)),
        }


def prepare(loaded: Loaded, job: Job, started: str) -> Components:
    """Make the parts of a run on one rank, without collectives and without writing anything.

    Args:
        loaded: the recipe.
        job: the rank that the parts are for.
        started: names the run's folder, if the recipe does not.

    Raises:
        RecipeError, DataError, PlanError, TopologyError: what does not fit the data, the machine
            or the run folder.
    """
    recipe = loaded.recipe
    folder, resume_from = run_folder(loaded, started)
    check_mlperf(recipe, folder, job)
    train, val = sources(recipe)
    train_loader = loader(recipe, job, train, training=True)
    run = timeline_of(recipe, len(train))
    last_step, every = run.last_step(recipe), recipe.ema.every
    if recipe.ema.decay is not None and run.steps(every) > run.total_steps:
        raise RecipeError(f"ema.every: {every} is longer than the run, {run.total_steps} steps")
    schedule = learning_rates(recipe, run).schedule
    if recipe.comm.ranks_per_node:
        Topology.of(job.world_size, recipe.comm.ranks_per_node)
    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model, len(train.classes))
    sizes = {phase.image_size for phase in train_loader.phases}
    check_image_size(model, sizes | {recipe.eval_size} if val else sizes)
    check_batch_norm(recipe, model, train_loader, job.world_size)
    saved: dict[str, Any] = {}
    changes: list[str] = []
    start = None
    if recipe.init.from_ and not resume_from:
        start = start_from(recipe.init.from_, model, recipe.model.name)
    if resume_from:
        saved = checkpoint.read_state(resume_from)
        _refuse_another_run(saved["recipe"], recipe)
        changes = train_loader.load_state_dict(saved["loader"], reshard=recipe.resume.reshard)
        if run.position(saved["step"]) != saved["loader"]["position"]:
            raise RecipeError(
                f"stages: the checkpoint {resume_from} was made with other batches before step "
                f"{saved['step']}; valid on resume: changes from there on"
            )
        reached = recipe.reached(saved.get("reached"))
        if (reached or saved["step"] >= last_step) and not (folder / METRICS).exists():
            end = "it reached target_accuracy" if reached else f"the run ends at step {last_step}"
            raise RecipeError(
                f"resume.from: nothing is left to train: {resume_from} is at step "
                f"{saved['step']}, and {end}"
            )
    return Components(
        run_dir=folder,
        resume_from=resume_from,
        changes=changes,
        saved=saved,
        loader=train_loader,
        val_loader=loader(recipe, job, val, training=False) if val else None,
        timeline=run,
        last_step=last_step,
        schedule=schedule,
        plan=plan(recipe),
        model=model,
        optimizer=optimizer(recipe, model),
        start=start,
    )


def sources(recipe: Recipe) -> tuple[Source, Source | None]:
    """The training and the validation images; the latter None if there is no evaluation."""
    data = recipe.data
    if data.source == "synthetic":
        val = Synthetic(data.val_images, data.classes) if data.val_images else None
        return Synthetic(data.train_images, data.classes), val if recipe.evaluate_every else None
    assert data.path is not None  # checked by the schema
    if not is_url(data.path) and not Path(data.path).is_dir():
        hint = "largebatch data prepare digits --out " + data.path
        raise RecipeError(
            f"data.path: no folder {data.path}; it must hold "
            + ("train/<class>/ and val/<class>/" if data.source == "folder" else "train/ and val/")
            + (f"; {hint} makes it" if Path(data.path).name == "digits" else "")
        )
    train = split(data, "train")
    if data.holdout:
        if data.holdout >= len(train):
            raise RecipeError(
                f"data.holdout: {data.holdout} of {len(train)} training images leaves none to "
                f"train on; valid: 1 to {len(train) - 1}"
            )
        kept, held = hold_out(train, data.holdout)
        return kept, held if recipe.evaluate_every else None
    if recipe.evaluate_every is None:
        return train, None
    return train, split(data, "val", train.classes)


def split(data: Data, name: str, classes: tuple[str, ...] | None = None) -> ImageSource:
    """The images of one split, ``train`` or ``val``."""
    assert data.path is not None  # checked by the schema
    if data.source == "folder":
        return ImageFolder(data.path, name, classes)
    return Shards(
        data.path,
        name,
        format=data.source,
        pattern=data.train_shards if name == "train" else data.val_shards,
        classes=classes,
        label_offset=data.label_offset,
    )


def is_url(path: str) -> bool:
    """Whether data lie on a server."""
    return "://" in path


def loader(recipe: Recipe, job: Job, source: Source, *, training: bool) -> Loader:
    """The loader of this rank."""
    data, micro = recipe.data, recipe.micro_batch_size
    unit = (micro or 1) * job.world_size
    if recipe.batch_size % unit:
        raise RecipeError(
            f"batch_size: {recipe.batch_size} does not divide into "
            + (f"micro-batches of {micro} on {job.world_size} ranks" if micro else "equal shares")
            + f" for {job.world_size} ranks; valid: a multiple of {unit}, such as "
            + f"{max(1, recipe.batch_size // unit) * unit}"
        )
    transform = Transform(
        image_size=data.image_size if training else recipe.eval_size,
        crop_area=data.crop_area,
        crop_aspect=data.crop_aspect,
        flip=data.flip,
        eval_resize=data.eval_resize,
        mean=data.mean,
        std=data.std,
    )
    # The loader writes FP16 at once where the model would convert to it.
    half = recipe.precision.startswith("fp16")
    return Loader(
        source,
        transform,
        batch_size=recipe.batch_size,
        micro_batch_size=micro,
        training=training,
        epochs=recipe.epochs if training else None,
        seed=recipe.seed,
        rank=job.rank,
        world_size=job.world_size,
        device=job.device,
        backend=data.backend,
        threads=data.threads,
        prefetch=data.prefetch,
        dtype=torch.float16 if half else torch.float32,
        memory_format=torch.channels_last if recipe.channels_last else torch.contiguous_format,
        on_error=data.on_error,
        stages=timeline_of(recipe, len(source)).stages if training else (),
    )


def optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The optimizer over the model's parameters, in groups by what decays and adapts."""
    options = recipe.optimizer
    masters = recipe.precision in PRECISIONS and PRECISIONS[recipe.precision].masters
    groups = split_parameters(
        model,
        options.weight_decay,
        no_decay=_none if options.decay_bias_and_norm else is_bias_or_norm,
        no_adapt=_none if options.adapt_bias_and_norm else is_bias_or_norm,
    )
    if options.name == "sgd":
        sgd = SGD(groups, options.lr, options.momentum, nesterov=options.nesterov)
        return MasterWeights(sgd) if masters else sgd
    return LARS(
        groups,
        options.lr,
        momentum=options.momentum,
        trust_coefficient=options.trust_coefficient,
        eps=options.eps,
        dialect=options.dialect,
        nesterov=options.nesterov,
        master_weights=masters,
    )


def plan(recipe: Recipe) -> Plan:
    """How gradients are reduced."""
    if recipe.comm.plan is not None:
        return Plan.load(recipe.comm.plan)
    return Plan.single(recipe.comm.algorithm or "ring")


def precision(recipe: Recipe, job: Job, model: nn.Module, loader: Loader) -> Precision:
    """The recipe's precision; ``auto`` is measured on a copy of the model, alike on all ranks."""
    if recipe.precision != "auto":
        return named_precision(recipe, recipe.precision, job)
    probe = copy.deepcopy(model)
    size = recipe.data.image_size
    images = torch.randn(loader.micro_batch_size, 3, size, size, device=job.device)

    def run(candidate: Precision) -> None:
        with candidate.forward():
            loss = probe(images).float().square().mean()
        candidate.backward(loss)
        probe.zero_grad()

    seconds = fastest(run, device_type=job.device.type)
    names = sorted(seconds)
    slowest_rank = dict(zip(names, job.all_reduce_max(*(seconds[n] for n in names)), strict=True))
    return named_precision(recipe, min(names, key=lambda name: slowest_rank[name]), job)


def named_precision(recipe: Recipe, name: str, job: Job) -> Precision:
    """A precision with the recipe's loss scale."""
    return Precision(
        name,
        job.device.type,
        loss_scale=recipe.loss_scale,
        max_skipped_steps=recipe.max_skipped_steps,
    )


def _refuse_another_run(saved: dict[str, Any], recipe: Recipe) -> None:
    """Raise RecipeError where a checkpoint's tensors or steps would mean something else."""
    now = recipe.model_dump(mode="json", by_alias=True)
    keys = (
        *("model.name", "model.args", "batch_size", "optimizer.name", "optimizer.dialect"),
        *("optimizer.decay_bias_and_norm", "optimizer.adapt_bias_and_norm"),  # they make the groups
    )
    for key in keys:
        old, new = saved, now
        for part in key.split("."):
            old, new = old[part], new[part]
        if old != new:
            raise RecipeError(
                f"resume.from: the checkpoint was made with {key}={old}, "
                f"now it is {new}; a checkpoint goes on with the same one"
            )
    if bool(saved["optimizer"]["momentum"]) != bool(recipe.optimizer.momentum):
        raise RecipeError(
            "resume.from: the checkpoint was made with optimizer.momentum="
            f"{saved['optimizer']['momentum']}, now it is {recipe.optimizer.momentum}; valid: none "
            "in both, or some in both"
        )
    # Autocast may change on the way; what the checkpoint's tensors are may not.
    old, new = saved["precision"], now["precision"]
    if old != new and any(name in _CASTING for name in (old, new)):
        raise RecipeError(
            f"resume.from: the checkpoint was made with precision={old}, now it is {new}, which "
            f"holds other tensors; valid: precision={old}"
        )


def _none(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    return False
