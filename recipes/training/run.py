"""A run that is ready to train: its components put to work on the ranks of a job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ...amp import Precision, auto_precision
from ...comm import Topology
from ...lars import GradientNoise, Schedule, TrustRatioHistory, as_scheduler
from ..models.batch_norm import share_statistics
from ..models.optimizers import settle_on_device, share_work
from ..ranks import Job
from ..schema.load import Loaded, differences
from . import build
from .callbacks import Callback, CallbackList, RunContext
from .device import settle
from .evaluate import WeightAverage
from .folder import checkpoint
from .folder.names import CHECKPOINTS
from .folder.place import agreed_place, is_of
from .folder.saving import Checkpoints
from .screen.console import Display
from .screen.opening import show_opening
from .step import TrainingStep, data_parallel, lay_out_buckets
from .stopping import Standstill, Stopping
from .targets import Mixer
from .watch.clocks import RunClock
from .watch.meters import Readings, SkippedImages


@dataclass(frozen=True)
class Run:
    """What the trainer works with, on one rank."""

    context: RunContext  # the run as its callbacks see it: recipe, model, optimizer and loaders
    callbacks: CallbackList
    precision: Precision
    schedule: Schedule  # the learning rate by step
    scheduler: LRScheduler  # sets the optimizer's rates
    take_step: TrainingStep
    ema: WeightAverage | None  # the moving average of the weights
    trust_ratios: TrustRatioHistory | None  # None if they are not logged
    noise: GradientNoise | None  # None if the recipe does not ask for it
    reached: float | None  # top-1 of the last evaluation before this process, if the target's
    readings: Readings
    skipped: SkippedImages
    checkpoints: Checkpoints
    stopping: Stopping
    display: Display
    clock: RunClock
    notices: tuple[str, ...]  # what recipe.yaml says of how it ran
    writes_results: bool  # whether it writes weights, report and summary at its end


def start_up(
    loaded: Loaded,
    job: Job,
    *,
    quiet: bool = False,
    warns: bool = True,
    callbacks: Iterable[Callback] = (),
    results: bool = True,
    began_seconds: float = 0.0,
) -> Run:
    """Build a run, move it to its device, load its checkpoint, and show it; a collective."""
    clock = RunClock(began_seconds)
    place = agreed_place(loaded, job)
    with job.raise_on_all_ranks():
        newest = checkpoint.latest(place.folder / CHECKPOINTS)
        further = [(type(callback).__qualname__, callback) for callback in callbacks]
        if job.world_size > 1:
            further.append(("standstill", Standstill()))
        called = CallbackList([*build.callbacks_of(loaded.recipe), *further], job)
        called.check(loaded.recipe, place.folder)
        components = build.prepare(loaded, job, place)
    job.check_alike(components.facts(loaded.recipe))
    recipe, saved, settings = loaded.recipe, components.saved, components.settings
    loader, timeline, optimizer = components.loader, components.timeline, components.optimizer
    step: int = saved.get("step", 0)

    # In channels-last, convolutions then also return this memory format.
    model = components.model.to(job.device).to(memory_format=settings.memory_format)
    if recipe.precision == "auto":  # that of the checkpoint, which another machine may have written
        name = saved["precision"]["name"] if saved else auto_precision(job.device.type)
        recipe = recipe.model_copy(update={"precision": job.from_main(name)})
    precision = build.build_precision(recipe, job)
    share_statistics(model, recipe, job)
    model = precision.convert(model)
    notices = (*loaded.notices, *settle_on_device(optimizer, job))

    topology = Topology.from_environment(recipe.comm.ranks_per_node)
    with job.raise_on_all_ranks():
        plan = build.build_plan(recipe, topology)
        plan.check(topology)
    components = replace(components, plan=plan)
    share_work(recipe, optimizer, topology)
    ddp = data_parallel(model, job, plan, topology) if job.world_size > 1 else None
    kept = saved.get("recipe", {}).get("compile")
    settings.apply()
    compiled, uncompiled = settle(recipe.compile, kept, timeline, model, loader, job)
    recipe = recipe.model_copy(update={"compile": compiled})
    noise = None
    if recipe.gradient_noise_every is not None:
        noise = GradientNoise(model.parameters(), loader.micro_batch_size)
        noise.watch(False)
    take_step = TrainingStep(
        model,
        ddp,
        optimizer,
        precision,
        loss=build.loss_of(recipe),
        mix=Mixer(recipe.mixing, recipe.seed, loader) if recipe.mixing.is_on else None,
        max_norm=recipe.optimizer.clip_grad_norm,
        compile_mode=recipe.compile_mode,
        noise=noise,
    )
    if ddp:
        lay_out_buckets(ddp, take_step, loader)
    decay = recipe.ema.decay
    ema = None if decay is None else WeightAverage(model, optimizer, decay)
    resumes = components.resume_from
    if resumes:  # after DDP, which starts by copying rank 0's buffers to all ranks
        checkpoint.load(resumes, model, optimizer, job, ema)
        precision.load_state_dict(saved["precision"]["state"])
        called.load_state_dict(saved["callbacks"])

    display = Display(job.is_main, quiet=quiet, warns=warns)
    skipped = SkippedImages(job, loader, components.val_loader)
    readings = Readings(
        loader, timeline, components.rates.schedule, take_step, job, clock, skipped,
        noise, display.warn, saved.get("readings"),
    )  # fmt: skip
    keep = recipe.checkpoint
    checkpoints = Checkpoints(
        place.folder / CHECKPOINTS, job,
        keep=keep.keep, keeps_best=keep.keep_best, newest=newest, saved=saved, warn=display.warn,
    )  # fmt: skip
    stopping = Stopping(job, display.warn)

    context = RunContext(
        name=loaded.name,
        recipe=recipe,
        job=job,
        run_dir=place.folder,
        model=model,
        optimizer=optimizer,
        loader=loader,
        val_loader=components.val_loader,
        timeline=timeline,
        step=step,
        last_step=components.last_step,
        continues=resumes is not None and is_of(resumes, place.folder),
        say=display.say,
        warn=display.warn,
        stop=stopping.ask,
        untimed=partial(clock.during, "rest"),
    )
    for line in (*place.damaged, *filter(None, [components.left_out, uncompiled])):
        display.warn(line)
    resolved = recipe.model_dump(mode="json", by_alias=True)
    changed = differences(saved["recipe"], resolved) if saved else []
    asked = loaded.recipe.model_dump()
    show_opening(context, components, asked, precision.name, topology, notices, changed)
    lars: Any = optimizer
    return Run(
        context=context,
        callbacks=called,
        precision=precision,
        schedule=components.rates.schedule,
        scheduler=as_scheduler(
            optimizer,
            components.rates.schedule,
            steps_done=step,
            base_lr=recipe.optimizer.lr or None,  # which no group has where all are scaled
        ),
        take_step=take_step,
        ema=ema,
        trust_ratios=TrustRatioHistory(lars) if recipe.trust_ratios_every else None,
        noise=noise,
        reached=saved.get("reached"),
        readings=readings,
        skipped=skipped,
        checkpoints=checkpoints,
        stopping=stopping,
        display=display,
        clock=clock,
        notices=notices,
        writes_results=results,
    )
