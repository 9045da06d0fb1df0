"""The training loops that are compared: ours, a plain PyTorch loop, and timm's step.

All train the same model on random images that are already on the device. Ours is ``Trainer.run``,
with its schedule, meters and log, as a recipe gives it; a callback measures it. The others get the
best that their few lines allow: channels_last, fused SGD, TF32, and no log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim import SGD

from benchmarks.gpu.contenders import BARE, COMPILED, EAGER, Contender
from benchmarks.gpu.place import TRAINER, Place, need

_SMOOTHING = 0.1

Hook = Callable[[], None]
Step = Callable[[], torch.Tensor]
Forward = Callable[..., torch.Tensor]


def model_and_size(place: Place) -> tuple[str, int]:
    """Return the model's name and the height of its images: ResNet-50, or a small one if dry."""
    return ("test_resnet", 32) if place.dry else ("resnet50", 224)


def images_and_passes(contender: Contender, place: Place) -> tuple[int, int]:
    """Return the images of a forward pass and the passes of an update; few in a dry run."""
    return (4, min(contender.passes, 2)) if place.dry else (contender.batch, contender.passes)


def overrides_of(contender: Contender, place: Place, run_dir: str) -> list[str]:
    """Return the settings of our trainer beside its recipe.

    Those beside ``contender.overrides`` give it the batch and random images, keep evaluations and
    checkpoints, which are no part of a step, out of the measurement, and let it read its meters
    every 50 steps, as rivals have none.
    """
    images, passes = images_and_passes(contender, place)
    keys: dict[str, Any] = {
        "data.source": "synthetic",
        "data.path": "null",
        "batch_size": images * passes,
        "micro_batch_size": images,
        "evaluate_every": "null",
        "target_accuracy": "null",
        "checkpoint.every": "null",
        "log_every": 50,
        "run_dir": run_dir,
    }
    if place.dry:
        model, size = model_and_size(place)
        keys |= {"model.name": model, "data.image_size": size, "data.classes": 10}
    return [*(f"{key}={value}" for key, value in keys.items()), *contender.overrides]


def imports(contender: Contender) -> None:
    """Import what the contender needs, before its turn."""
    need(*TRAINER) if contender.ours else need("timm")
    import timm  # noqa: F401

    if contender.ours:
        import largebatch.recipes.training.trainer  # noqa: F401


def run_ours(contender: Contender, place: Place, run_dir: str, hook: Hook) -> None:
    """Train by the recipe, and call ``hook`` before each step."""
    from largebatch.recipes.ranks import Job
    from largebatch.recipes.schema.load import load
    from largebatch.recipes.training.callbacks import Callback
    from largebatch.recipes.training.trainer import Trainer

    class Turns(Callback):
        def on_step_begin(self, step: int) -> None:
            hook()

    recipe = load(contender.recipe, overrides_of(contender, place, run_dir))
    Trainer.of(recipe, Job(0, 1, 1, place.device), quiet=True, callbacks=[Turns()]).run()


def counted_memory(contender: Contender, place: Place) -> dict[str, float]:
    """Return a column with the peak memory of an eager step of ours as the plan counts it."""
    if not contender.ours or contender.how != EAGER:
        return {}
    from largebatch.recipes.predict.memory import MemoryCounter
    from largebatch.recipes.schema.load import load

    recipe = load(contender.recipe, overrides_of(contender, place, "runs/counted")).recipe
    counter, size = MemoryCounter(recipe, recipe.data.classes), recipe.data.image_size
    images, passes = images_and_passes(contender, place)
    counted = counter.count(contender.precision, images, size, accumulation=passes)
    return {"counted_GiB": counted.peak / 2**30}


def run_other(contender: Contender, place: Place, run_dir: str, hook: Hook) -> None:
    """Run a rival's steps without end, and call ``hook`` before each; ``run_dir`` is not used."""
    step = step_of(contender, place)
    while True:
        hook()
        step()


def step_of(contender: Contender, place: Place) -> Step:
    """Return the step of a rival, which returns its loss."""
    import timm

    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    (name, size), (count, passes) = model_and_size(place), images_and_passes(contender, place)
    network = timm.create_model(name, num_classes=10 if place.dry else 1000)
    network = network.to(place.device, memory_format=torch.channels_last)
    images = torch.randn(count, 3, size, size, device=place.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (count,), device=place.device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[contender.precision]

    def forward(loss_of: Forward) -> torch.Tensor:
        with torch.autocast(place.device.type, dtype):
            return loss_of(images, labels)

    if contender.whose == BARE:
        return _bare(network, forward, contender.how == COMPILED, dtype, passes)
    return _timms(network, forward)


def _bare(network: Any, forward: Forward, compiled: bool, dtype: torch.dtype, passes: int) -> Step:
    """Return autocast, fused SGD, and GradScaler for FP16; compiled with the loss, as ours is."""

    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(network(images), labels, label_smoothing=_SMOOTHING)

    function = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    optimizer = SGD(network.parameters(), 0.01, 0.9, weight_decay=5e-5, fused=True)
    device = next(network.parameters()).device.type
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(passes):
            loss = forward(function)
            scaler.scale(loss if passes == 1 else loss / passes).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def _timms(network: Any, forward: Forward) -> Step:
    """Return the step of timm's train.py in BF16, without its schedule, averages and logging."""
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2

    optimizer = create_optimizer_v2(network, "sgd", lr=0.01, weight_decay=5e-5, momentum=0.9)
    criterion = LabelSmoothingCrossEntropy(_SMOOTHING)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(lambda images, labels: criterion(network(images), labels))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
