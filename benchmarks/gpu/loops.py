"""Training steps side by side: ours, that of a bare PyTorch loop, and timm's.

All train on random images that are on the device already, in channels_last. Ours is the trainer's
own step, with LARS, its schedule and its meters, as the recipe resnet50-b65536 has them.
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

#: The dtype that the others compute in under autocast, for each precision of ours.
RIVAL_DTYPE = {"bf16": torch.bfloat16, "fp16-master": torch.float16}

_SMOOTHING = 0.1


@dataclass(frozen=True)
class Load:
    """What is trained.

    Attributes:
        precision: one of ours, a key of ``RIVAL_DTYPE`` where others train too.
        batch: images of a step.
        compiled: by torch.compile.
    """

    precision: str
    batch: int
    compiled: bool = False


@dataclass(frozen=True)
class Loop:
    """A way to train.

    Attributes:
        step: one step.
        cudnn_benchmark: whether it is run with ``torch.backends.cudnn.benchmark``.
        trainer: that the step is of, if it is ours.
    """

    step: Callable[[], object]
    cudnn_benchmark: bool = False
    trainer: Any = None
    meter: Any = None

    @contextmanager
    def as_it_runs(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


def model_name(place: Place) -> str:
    return "test_resnet" if place.dry else "resnet50"


def image_size(place: Place) -> int:
    return 32 if place.dry else 224


def ours(load: Load, place: Place) -> Loop:
    """The trainer's own step.

    Raises:
        Skipped: what the trainer needs is not installed.
    """
    need(*TRAINER)
    from largebatch.recipes.ranks import Job
    from largebatch.recipes.schema.load import load as load_recipe
    from largebatch.recipes.training.evaluate import Meter
    from largebatch.recipes.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as run_dir:  # a trainer that is not run writes nothing
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
    """A plain PyTorch loop: autocast, fused SGD, GradScaler for FP16."""
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
    """The step of timm's train.py, without its schedule, its averages and its logging.

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
    """The model of all, or torchvision's of the same layers where timm is missing."""
    if not (place.dry or installed("timm")):
        need("torchvision")
        from torchvision.models import resnet50

        return resnet50()
    need("timm")
    import timm

    return timm.create_model(model_name(place), num_classes=10 if place.dry else 1000)


def _network(load: Load, place: Place) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The model of the others, and its batch."""
    torch.manual_seed(0)
    network = _model(place)
    network = network.to(place.device, memory_format=torch.channels_last)
    if load.compiled:
        network.compile()
    size = image_size(place)
    images = torch.randn(load.batch, 3, size, size, device=place.device)
    labels = torch.randint(10, (load.batch,), device=place.device)
    return network, images.contiguous(memory_format=torch.channels_last), labels
