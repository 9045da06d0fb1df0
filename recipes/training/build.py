"""Build the components of a run from its recipe: data, timeline, model, optimizer, plan."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...amp import Precision
from ...comm import Plan, Topology
from ...lars import Span
from ...pipeline import LeftOut, Loader
from ..errors import RecipeError
from ..models.batch_norm import check_batch_norm
from ..models.build import build_model, check_image_size
from ..models.optimizers import build_optimizer
from ..ranks import Job
from ..schema.dotted_path import is_dotted_path, resolve
from ..schema.load import Loaded, with_defaults
from ..schema.optimizers import called
from ..schema.recipe import Recipe
from .callbacks import Callback
from .data import build_loader, build_sources, transform_of
from .device import DeviceSettings, device_settings
from .folder.metrics import MetricsLog
from .folder.place import RunPlace
from .folder.resume import largest_micro_batch, move_to
from .folder.tensor_files import NotPlainError, check_plain
from .initial_weights import start_from, start_from_images
from .targets import training_loss
from .timeline import LearningRates, Timeline, learning_rates, timeline_of
from .watch.profile import check_profile

_ROOMS = ("lars", "amp", "comm", "pipeline", "recipes")
#: Our own callbacks beside the metrics: module, relative to this package, and class. They are
#: imported only where a recipe asks for them.
_CALLBACKS = {
    "profile": (".watch.profile", "StepProfiler"),
    "mlperf": ("..mlperf.log", "MLPerfLog"),
    "tensorboard": (".watch.trackers", "TensorBoard"),
    "wandb": (".watch.trackers", "WandB"),
    "mlflow": (".watch.trackers", "MLflow"),
}


@dataclass(frozen=True)
class Components:
    """The components of a run on one rank, built from its recipe."""

    resume_from: Path | None  # the checkpoint; None starts at step 0
    changes: list[str]  # since that checkpoint was written, other than in the recipe
    saved: dict[str, Any]  # that checkpoint's state.json; empty without one
    loader: Loader
    val_loader: Loader | None  # None without evaluation
    timeline: Timeline  # of the whole run, by which `loader` iterates
    last_step: int  # after which the run stops
    rates: LearningRates
    plan: Plan  # how gradients are reduced
    model: nn.Module  # on the CPU, so that checking a recipe does not touch a GPU
    optimizer: Optimizer
    start: str | None  # what training starts from, in words; None for fresh weights and resumed
    settings: DeviceSettings
    left_out: str  # a line about images that are there and not in the data, or empty

    def facts(self, recipe: Recipe) -> dict[str, str]:
        """Everything that must be the same on all ranks, by name, for :meth:`Job.check_alike`."""
        content = recipe.model_dump(mode="json", by_alias=True)
        for own_by_machine in ("run_dir", "resume"):
            del content[own_by_machine]
        del content["data"]["path"], content["init"]["from"]
        return {
            **{f"the recipe's {key}": str(value) for key, value in content.items()},
            **code_facts(content, self.model),
            "the list of training images": self.loader.source.fingerprint,
            "the list of validation images": (
                self.val_loader.source.fingerprint if self.val_loader else "empty"
            ),
            "the class of the optimizer": called(
                type(getattr(self.optimizer, "_inner", self.optimizer))
            ),
            "the plan": str(self.plan),
            "the last step": str(self.last_step),
            "the step to resume from": str(self.saved.get("step", 0)),
        }


def callbacks_of(recipe: Recipe) -> list[tuple[str, Callback]]:
    """Make the callbacks of a recipe, each with its name, in the order in which they are called."""
    own = [
        *(["profile"] if recipe.profile.steps is not None else []),
        *recipe.track,
    ]
    found: list[tuple[str, Callback]] = [("metrics", MetricsLog())]
    for name in own:
        module, kind = _CALLBACKS[name]
        found.append((name, getattr(import_module(module, __package__), kind)()))
    for entry in recipe.callbacks:
        make = resolve(entry.name, "callbacks")
        try:
            callback = make(**entry.args)
        except Exception as error:  # whatever the user's code raises
            raise RecipeError(
                f"callbacks: {entry.name} does not take {entry.args}: {type(error).__name__}: "
                f"{error}"
            ) from error
        if not isinstance(callback, Callback):
            raise RecipeError(
                f"callbacks: {entry.name} makes a {type(callback).__name__}; valid: a subclass of "
                f"{Callback.__module__}.Callback"
            )
        found.append((entry.name, callback))
    return found


def prepare(loaded: Loaded, job: Job, place: RunPlace) -> Components:
    """Build the components of a run on one rank, without collectives and without writing files."""
    recipe = loaded.recipe
    folder, resume_from, saved = place.folder, place.resume_from, place.saved
    if saved:
        saved = {**saved, "recipe": with_defaults(saved["recipe"])}
    left_out = LeftOut()
    train, val = build_sources(recipe, left_out)
    most = largest_micro_batch(saved) if recipe.resume.reshard else None
    timeline = timeline_of(recipe, len(train), job.world_size, most)
    last_step = timeline.last_step(recipe)
    if recipe.gradient_noise_every is not None:
        _check_noise(recipe.gradient_noise_every, timeline, last_step)
    check_profile(recipe.profile, last_step, job.world_size)
    rates = learning_rates(recipe, timeline)
    train_loader = build_loader(recipe, job, train, timeline)
    one_node = Topology.of(job.world_size, recipe.comm.ranks_per_node or job.world_size)
    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model, len(train.classes))
    sizes = {phase.image_size for phase in timeline.phases}
    check_image_size(model, sizes | {recipe.eval_size} if val else sizes)
    check_batch_norm(recipe, model, timeline.phases, job.world_size)
    start = None
    if recipe.init.from_ and not resume_from:
        start = start_from(recipe.init.from_, model, recipe.model.name)
    elif not resume_from:
        transform = transform_of(recipe, training=False)
        count, name = recipe.init.images, recipe.model.name
        start = start_from_images(count, model, name, train, transform, recipe.data, recipe.seed)
    changes: list[str] = []
    if resume_from:
        changes = move_to(saved, loaded, folder, resume_from, train_loader, timeline, model)
    optimizer = build_optimizer(recipe, model)
    _check_storable(recipe, optimizer)
    return Components(
        resume_from=resume_from,
        changes=changes,
        saved=saved,
        loader=train_loader,
        val_loader=build_loader(recipe, job, val) if val else None,
        timeline=timeline,
        last_step=last_step,
        rates=rates,
        plan=build_plan(recipe, one_node),  # until the machines of the ranks are known
        model=model,
        optimizer=optimizer,
        start=start,
        settings=device_settings(recipe, job.device),
        left_out=left_out.line(),
    )


def _check_noise(every: Span, timeline: Timeline, last_step: int) -> None:
    """Raise RecipeError if no step measures the noise scale, or one has a single backward pass."""
    key, ranks = "gradient_noise_every", timeline.world_size
    if timeline.steps(every) > last_step:
        raise RecipeError(f"{key}: {every} is longer than the run, {last_step} steps")
    for phase, first in zip(timeline.phases, timeline.first_steps, strict=False):
        if first < last_step and phase.accumulation(ranks) * ranks < 2:
            raise RecipeError(
                f"{key}: a batch of {phase.batch_size} images is one backward pass, with no "
                f"smaller batch to compare it with; valid: a micro_batch_size of at most "
                f"{max(1, phase.batch_size // 2)}, or null"
            )


def _check_storable(recipe: Recipe, optimizer: Optimizer) -> None:
    """Check that a checkpoint can hold the optimizer's options, and that it gives its state."""
    name = recipe.optimizer.name
    try:
        state = optimizer.state_dict()
    except Exception as error:  # of any kind: ZeroRedundancyOptimizer's has to be collected first
        raise RecipeError(
            f"optimizer.name: {name} does not give its state, which a checkpoint holds: "
            f"{str(error).splitlines()[0]}; valid: an optimizer whose state_dict() each rank can "
            "call by itself"
        ) from error
    try:
        check_plain(state)
    except NotPlainError as kind:
        raise RecipeError(
            f"optimizer.args: {name} keeps a {kind} in its parameter groups or its state, which a "
            "checkpoint does not hold; valid: numbers, strings, tensors, lists and the like"
        ) from None


def build_plan(recipe: Recipe, topology: Topology) -> Plan:
    """Return the plan by which gradients are reduced: from a file, or one algorithm for all."""
    if recipe.comm.plan is not None:
        return Plan.load(recipe.comm.plan)
    if recipe.comm.algorithm == "auto":
        return Plan.single(algorithm_for(topology))
    return Plan.single(recipe.comm.algorithm or "ring")


def algorithm_for(topology: Topology) -> str:
    """Return the algorithm that ``comm.algorithm: auto`` stands for on these nodes."""
    sizes = {len(ranks) for ranks in topology.nodes}
    if len(topology.nodes) == 1 or sizes == {1}:
        return "ring"
    return "hierarchical" if len(sizes) == 1 else "leader"


def build_precision(recipe: Recipe, job: Job) -> Precision:
    """Return the recipe's precision, which is no longer ``auto``, with its loss scale."""
    return Precision(
        recipe.precision,
        job.device.type,
        loss_scale=recipe.loss_scale,
        max_skipped_steps=recipe.max_skipped_steps,
    )


def loss_of(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of a recipe's training, of logits and labels or mixed targets."""
    return partial(
        training_loss, **recipe.loss.model_dump(), label_smoothing=recipe.label_smoothing
    )


# --- what all ranks have in common -----------------------------------------------------------


def code_facts(recipe: dict[str, Any], model: nn.Module) -> dict[str, str]:
    """Return what tells whether ranks run the same code on the same model, by name."""
    facts = {f"the version of {name}": version(name) for name in ("torch", "timm")}
    rooms = [import_module(f"largebatch.{room}").__path__[0] for room in _ROOMS]
    files = (path for room in rooms for path in sorted(Path(room).rglob("*.py")))
    facts["the source of largebatch"] = _digest(path.read_bytes() for path in files)
    for name in sorted({*_modules(recipe)}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).is_file():
            facts[f"the source of {name}"] = _digest([Path(file).read_bytes()])
    tensors = (*model.named_parameters(), *model.named_buffers())
    shapes = (f"{name} {[*tensor.shape]} {tensor.dtype}".encode() for name, tensor in tensors)
    facts["the parameters and buffers of the model"] = _digest(shapes)
    return facts


def _modules(content: Any) -> Iterator[str]:
    """Yield the modules of the dotted paths in a recipe."""
    if isinstance(content, str) and is_dotted_path(content):
        yield content.partition(":")[0]
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _modules(part)


def _digest(parts: Iterable[bytes]) -> str:
    content = hashlib.sha256()
    for part in parts:
        content.update(hashlib.sha256(part).digest())
    return content.hexdigest()[:16]
