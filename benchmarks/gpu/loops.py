"""Training steps to compare: the trainer's, that of a plain PyTorch loop, and timm's.

All train on random channels_last images that are already on the device. Ours is the trainer's own
step, with LARS, schedule and meters as in the recipe resnet50-b65536.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from benchmarks.gpu.place import TRAINER, Place, installed, need

#: The autocast dtype of the other loops, for each of our precisions.
RIVAL_DTYPE = {"bf16": torch.bfloat16, "fp16-master": torch.float16}

_SMOOTHING = 0.1


@dataclass(frozen=True)
class Load:
    """A training workload.

    Attributes:
        precision: a name in ``largebatch.amp.PRECISIONS``; a key of ``RIVAL_DTYPE`` if the other
            loops train too.
        batch: number of images per step.
        compiled: whether the model is compiled by torch.compile.
    """

    precision: str
    batch: int
    compiled: bool = False


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        step: takes one training step.
        cudnn_benchmark: whether it runs with ``torch.backends.cudnn.benchmark``.
        trainer: the trainer, if the step is ours.
        meter: the trainer's meter, if the step is ours.
    """

    step: Callable[[], object]
    cudnn_benchmark: bool = False
    trainer: Any = None
    meter: Any = None

    @contextmanager
    def as_it_runs(self) -> Iterator[None]:
        """Apply the loop's cuDNN setting inside the ``with`` block."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


def model_name(place: Place) -> str:
    """Return the model's name: ResNet-50, or a small model in a dry run."""
    return "test_resnet" if place.dry else "resnet50"


def image_size(place: Place) -> int:
    """Return the height and width of an image in pixels."""
    return 32 if place.dry else 224


def ours(load: Load, place: Place) -> Loop:
    """Return the trainer's own step.

    Raises:
        Skipped: a package that the trainer needs is not installed.
    """
    need(*TRAINER)
    from largebatch.recipes.ranks import Job
    from largebatch.recipes.schema.load import load as load_recipe
    from largebatch.recipes.training.evaluate import Meter
    from largebatch.recipes.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as run_dir:  # the trainer writes only in run()
        keys = {
            "model.name": model_name(place),
            "data.source": "synthetic",
            "data.path": "null",
            "data.image_size": image_size(place),
            "data.classes": 10 if place.dry else 1000,
            "batch_size": load.batch,
            "micro_batch_size": load.batch,
            "precision": load.precision,
            "channels_last": "true",
            "compile": str(load.compiled).lower(),
            "evaluate_every": "null",
            "target_accuracy": "null",
            "checkpoint.every": "null",
            "run_dir": run_dir,
        }
        overrides = [f"{key}={value}" for key, value in keys.items()]
        job = Job(0, 1, 1, place.device)
        trainer = Trainer(load_recipe("resnet50-b65536", overrides), job, quiet=True)
    meter = Meter(place.device)
    batches = iter(trainer.loader)

    def step() -> None:
        trainer._update(batches, meter)
        trainer.step += 1

    return Loop(step, trainer=trainer, meter=meter)


def bare(load: Load, place: Place) -> Loop:
    """Return a plain PyTorch loop: autocast, fused SGD, and GradScaler for FP16."""
    network, images, labels = _network(load, place)
    dtype = RIVAL_DTYPE[load.precision]
    optimizer = SGD(network.parameters(), 0.01, 0.9, weight_decay=5e-5, fused=True)
    scaler = torch.amp.GradScaler(place.device.type, enabled=dtype == torch.float16)

    def step() -> None:
        with torch.autocast(place.device.type, dtype):
            loss = F.cross_entropy(network(images), labels, label_smoothing=_SMOOTHING)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Loop(step, cudnn_benchmark=True)


def timms(load: Load, place: Place) -> Loop:
    """Return the step of timm's train.py, without its schedule, its averages and its logging.

    Raises:
        Skipped: timm is not installed.
    """
    need("timm")
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import NativeScaler

    network, images, labels = _network(load, place)
    dtype = RIVAL_DTYPE[load.precision]
    optimizer = create_optimizer_v2(network, "sgd", lr=0.01, weight_decay=5e-5, momentum=0.9)
    criterion = LabelSmoothingCrossEntropy(_SMOOTHING)
    takes_device = "device" in inspect.signature(NativeScaler).parameters
    options = {"device": place.device.type} if takes_device else {}
    scaler = NativeScaler(**options) if dtype == torch.float16 else None

    def step() -> None:
        with torch.autocast(place.device.type, dtype):
            loss = criterion(network(images), labels)
        if scaler is not None:
            scaler(loss, optimizer, parameters=network.parameters())
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()

    return Loop(step, cudnn_benchmark=True)


def _model(place: Place) -> nn.Module:
    """Return the model of all loops; torchvision's, which has the same layers, without timm."""
    if not (place.dry or installed("timm")):
        need("torchvision")
        from torchvision.models import resnet50

        return resnet50()
    need("timm")
    import timm

    return timm.create_model(model_name(place), num_classes=10 if place.dry else 1000)


def _network(load: Load, place: Place) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the model of the other loops with its batch of images and labels."""
    torch.manual_seed(0)
    network = _model(place)
    network = network.to(place.device, memory_format=torch.channels_last)
    if load.compiled:
        network.compile()
    size = image_size(place)
    images = torch.randn(load.batch, 3, size, size, device=place.device)
    labels = torch.randint(10, (load.batch,), device=place.device)
    return network, images.contiguous(memory_format=torch.channels_last), labels
