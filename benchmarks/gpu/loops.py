"""The training loops that are compared: ours, a plain PyTorch loop, and timm's step.

All train the same model on random images that are already on the device. Ours is ``Trainer.run``,
with its schedule, meters and log, as a recipe gives it; a callback measures it. The others get the
best that their few lines allow: channels_last, fused SGD, TF32, and no log.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from benchmarks.gpu.capture import captured
from benchmarks.gpu.contenders import BARE, Contender
from benchmarks.gpu.place import TRAINER, Place, need, need_cuda

_SMOOTHING = 0.1

Hook = Callable[[], None]


def model_name(place: Place) -> str:
    """Return the model's name: ResNet-50, or a small model in a dry run."""
    return "test_resnet" if place.dry else "resnet50"


def image_size(place: Place) -> int:
    """Return the height and width of an image in pixels."""
    return 32 if place.dry else 224


def images_per_step(contender: Contender, place: Place) -> int:
    """Return the number of images of an update; few in a dry run."""
    return images_per_pass(contender, place) * passes_per_step(contender, place)


def images_per_pass(contender: Contender, place: Place) -> int:
    """Return the number of images of a forward pass; few in a dry run."""
    return 4 if place.dry else contender.batch


def passes_per_step(contender: Contender, place: Place) -> int:
    """Return the number of forward passes of an update; at most two in a dry run."""
    return min(contender.steps, 2) if place.dry else contender.steps


def overrides_of(contender: Contender, place: Place, run_dir: str) -> list[str]:
    """Return the settings of our trainer beside its recipe.

    Those beside ``contender.overrides`` give it the batch and random images, and keep evaluations
    and checkpoints, which are no part of a step, out of the measurement.
    """
    keys: dict[str, Any] = {
        "data.source": "synthetic",
        "data.path": "null",
        "batch_size": images_per_step(contender, place),
        "micro_batch_size": images_per_pass(contender, place),
        "evaluate_every": "null",
        "target_accuracy": "null",
        "checkpoint.every": "null",
        "run_dir": run_dir,
    }
    if place.dry:
        keys |= {"model.name": model_name(place), "data.image_size": image_size(place)}
        keys |= {"data.classes": 10}
    return [*(f"{key}={value}" for key, value in keys.items()), *contender.overrides]


def imports(contender: Contender) -> None:
    """Import what the contender needs, before its turn.

    Raises:
        Skipped: a package is not installed.
    """
    need(*TRAINER) if contender.ours else need("timm")
    import timm  # noqa: F401

    if contender.ours:
        import largebatch.recipes.training.trainer  # noqa: F401


def run_ours(contender: Contender, place: Place, run_dir: str, hook: Hook) -> None:
    """Train by the recipe, and call ``hook`` before each step.

    Raises:
        RecipeError: the recipe refuses a setting.
    """
    from largebatch.recipes.ranks import Job
    from largebatch.recipes.schema.load import load
    from largebatch.recipes.training.callbacks import Callback
    from largebatch.recipes.training.trainer import Trainer

    class Turns(Callback):
        def on_step_begin(self, step: int) -> None:
            hook()

    recipe = load(contender.recipe, overrides_of(contender, place, run_dir))
    Trainer(recipe, Job(0, 1, 1, place.device), quiet=True, callbacks=[Turns()]).run()


def run_other(contender: Contender, place: Place, hook: Hook) -> None:
    """Run a rival's steps without end, and call ``hook`` before each.

    Raises:
        Skipped: it needs CUDA, or a package that is not installed.
    """
    step = step_of(contender, place)
    while True:
        hook()
        step()


def step_of(contender: Contender, place: Place) -> Callable[[], object]:
    """Return the step of a rival, which returns its loss unless it is a graph.

    Raises:
        Skipped: it needs CUDA, or a package that is not installed.
    """
    torch.backends.cudnn.benchmark = contender.benchmark
    torch.set_float32_matmul_precision("high")
    network, images, labels = _network(contender, place)
    dtype = {"bf16": torch.bfloat16, "fp16-master": torch.float16}[contender.precision]
    make = partial(_bare, contender) if contender.whose == BARE else partial(_timms, contender)
    step = make(network, images, labels, dtype, place)
    if not contender.graph:
        return step
    need_cuda(place.device)
    return captured(step, place.device)


def _bare(
    contender: Contender,
    network: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    dtype: torch.dtype,
    place: Place,
) -> Callable[[], torch.Tensor]:
    """Return autocast, fused SGD, and GradScaler for FP16; compiled with the loss, as ours is."""

    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(network(images), labels, label_smoothing=_SMOOTHING)

    forward = _compiled(loss_of, contender)
    micro_batches = passes_per_step(contender, place)
    optimizer = SGD(network.parameters(), 0.01, 0.9, weight_decay=5e-5, fused=True)
    scaler = torch.amp.GradScaler(place.device.type, enabled=dtype == torch.float16)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(micro_batches):
            with torch.autocast(place.device.type, dtype):
                loss = forward(images, labels)
            scaler.scale(loss if micro_batches == 1 else loss / micro_batches).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def _timms(
    contender: Contender,
    network: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    dtype: torch.dtype,
    place: Place,
) -> Callable[[], torch.Tensor]:
    """Return the step of timm's train.py, without its schedule, its averages and its logging.

    What it compiles is the model, without the loss.
    """
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import NativeScaler

    forward = _compiled(network, contender)
    optimizer = create_optimizer_v2(network, "sgd", lr=0.01, weight_decay=5e-5, momentum=0.9)
    criterion = LabelSmoothingCrossEntropy(_SMOOTHING)
    takes_device = "device" in inspect.signature(NativeScaler).parameters
    options = {"device": place.device.type} if takes_device else {}
    scaler = NativeScaler(**options) if dtype == torch.float16 else None

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(place.device.type, dtype):
            loss: torch.Tensor = criterion(forward(images), labels)
        if scaler is not None:
            scaler(loss, optimizer, parameters=network.parameters())
        else:
            loss.backward()
            optimizer.step()
        return loss.detach()

    return step


def _compiled(function: Callable[..., Any], contender: Contender) -> Callable[..., Any]:
    if contender.compile is None:
        return function
    mode = None if contender.compile == "default" else contender.compile
    compiled: Callable[..., Any] = torch.compile(function, mode=mode)
    return compiled


def _network(contender: Contender, place: Place) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the model of a rival with its batch of images and labels."""
    import timm

    torch.manual_seed(0)
    network = timm.create_model(model_name(place), num_classes=10 if place.dry else 1000)
    network = network.to(place.device, memory_format=torch.channels_last)
    size, batch = image_size(place), images_per_pass(contender, place)
    images = torch.randn(batch, 3, size, size, device=place.device)
    labels = torch.randint(10, (batch,), device=place.device)
    return network, images.contiguous(memory_format=torch.channels_last), labels
