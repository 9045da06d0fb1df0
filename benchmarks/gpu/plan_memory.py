"""The memory that `largebatch plan` counts against what torch's allocator gave at most.

``torch.cuda.max_memory_allocated`` over whole training steps, after the first ones, in which cuDNN
tries algorithms with larger workspaces than the one that it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.place import TRAINER, need
from benchmarks.gpu.report import Case, Skipped

#: How far the count may be off, as a share.
BOUND = 0.2

#: Model, precision and images of a forward pass, at 224 pixels.
CASES = (
    ("resnet50", "bf16", 64),
    ("resnet50", "fp16-master", 64),
    ("resnet50", "fp32", 32),
    ("resnet18", "bf16", 128),
)
_WARM, _WATCHED = 3, 2


def cases(dry: bool = False) -> Iterator[Case]:
    """Yield the checks."""
    for case in CASES[:1] if dry else CASES:
        model, precision, images = case
        name = f"memory of a step as planned, {model}, {precision}, {images} images"
        yield Case(name, partial(as_planned, *case, dry), seconds=20)


def as_planned(model: str, precision: str, images: int, dry: bool, device: torch.device) -> None:
    """Compare the peak of training steps with the one that is counted without numbers.

    On a CPU a small step is counted and taken, and then the check is skipped.
    """
    need(*TRAINER)
    from largebatch.recipes.schema.load import load
    from largebatch.recipes.training.memory import MemoryCounter

    if dry:
        model, images = "test_resnet", 2
    size = 32 if dry else 224
    keys = {
        "model.name": model,
        "data.image_size": size,
        "precision": precision,
        "micro_batch_size": images,
        "batch_size": images,
        "optimizer.lr": 0.01,
        "device": device.type,
        "loss_scale": "none",
    }
    recipe = load("resnet50-b65536", [f"{key}={value}" for key, value in keys.items()]).recipe
    counted = MemoryCounter(recipe, recipe.data.classes).count(precision, images, size).peak
    found = _peak_bytes(recipe, device)
    if found is None:
        raise Skipped("needs CUDA")
    ratio = counted / found
    told = f"counted {counted / 1e6:.0f} MB, allocated {found / 1e6:.0f} MB: {ratio:.2f}"
    assert 1 / (1 + BOUND) <= ratio <= 1 + BOUND, told


def _peak_bytes(recipe: object, device: torch.device) -> int | None:
    """Largest memory of a step on a GPU, beyond that before the model was made."""
    from largebatch.amp import Precision
    from largebatch.recipes.models.build import build_model
    from largebatch.recipes.models.optimizers import build_optimizer
    from largebatch.recipes.schema.recipe import Recipe
    from largebatch.recipes.training.device_settings import device_settings
    from largebatch.recipes.training.step import TrainingStep

    assert isinstance(recipe, Recipe)
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    settings = device_settings(recipe, device)
    layout = settings.memory_format
    precision = Precision(recipe.precision, device.type, loss_scale="none")
    model = build_model(recipe.model, recipe.data.classes).to(device)
    model = precision.convert(model.to(memory_format=layout))
    optimizer = build_optimizer(recipe, model, device.type)
    step = TrainingStep(model, None, optimizer, precision, label_smoothing=recipe.label_smoothing)
    shape = (recipe.batch_size, 3, recipe.data.image_size, recipe.data.image_size)
    dtype = torch.float16 if recipe.precision.startswith("fp16") else torch.float32
    images = torch.randn(shape, device=device, dtype=dtype).to(memory_format=layout)
    labels = torch.zeros(recipe.batch_size, dtype=torch.int64, device=device)
    with settings.applied():
        for number in range(_WARM + _WATCHED):
            if on_gpu and number == _WARM:
                torch.cuda.reset_peak_memory_stats(device)
            step.forward_backward(images, labels, 0, 1)
            step.update()
            optimizer.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(device) - before if on_gpu else None
