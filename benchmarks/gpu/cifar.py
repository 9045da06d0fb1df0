"""CIFAR-10 on the GPU: the price of a large batch, LARS and SGD, several seeds.

All images lie on the GPU as uint8, where they are cropped and flipped, so that no loader limits a
run and small batches cost as much as the host needs to launch their kernels. Network, optimizer,
schedule, crop size and epochs are those of the recipes ``cifar10-b...`` and
``cifar10-nesterov-b...``, which were tuned on a CPU, but crops are shifted by up to 4 pixels
instead of resized. FP32 with TF32. Seeds are the outer loop, so that a run that is stopped has all
batch sizes with fewer seeds.
"""

from __future__ import annotations

import io
import statistics
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.place import TRAINER, Place, need
from benchmarks.gpu.report import Report, Skipped

TITLE = "CIFAR-10: accuracy against batch size"

_BATCHES = (256, 1024, 2560, 4096, 8192)
_RECIPES = {"LARS": "cifar10-b{}", "Nesterov": "cifar10-nesterov-b{}"}
_SEEDS = 5
_PAD = 4
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

#: Images, uint8, shape ``[n, 3, 32, 32]``, and labels, int64, shape ``[n]``.
Split = tuple[Tensor, Tensor]


def read(place: Place) -> tuple[Split, Split]:
    """Read the images to train on and to test on, to the device.

    Raises:
        Skipped: they are not there.
    """
    if place.dry:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(256, (96, 3, 32, 32), generator=generator, dtype=torch.uint8)
        labels = torch.arange(96) % 10
        return (pixels[:64], labels[:64]), (pixels[64:], labels[64:])
    if place.cifar10 is None:
        raise Skipped("needs data: --cifar10 PATH")
    need("PIL")
    files = _files_of_folder if place.cifar10.is_dir() else _files_of_archive
    train, test = _decoded(files(place.cifar10))
    device = place.device
    return (train[0].to(device), train[1].to(device)), (test[0].to(device), test[1].to(device))


def _files_of_folder(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _files_of_archive(archive: Path) -> dict[str, bytes]:
    files = {}
    with tarfile.open(archive) as opened:
        for member in opened:
            found = opened.extractfile(member) if member.isfile() else None
            if found is not None:
                files[member.name] = found.read()
    return files


def _decoded(files: dict[str, bytes]) -> tuple[Split, Split]:
    """Decode images named ``train/<class>/...``, and ``test/`` or ``val/``, in order of name."""
    names: dict[str, list[str]] = {"train": [], "test": []}
    for name in sorted(files):
        parts = Path(name).parts[-3:]
        if len(parts) == 3 and parts[0] in ("train", "test", "val"):
            names["train" if parts[0] == "train" else "test"].append(name)
    classes = sorted({Path(name).parts[-2] for name in names["train"]})
    if not classes or not names["test"]:
        raise Skipped("the data have no images in train/<class>/, and test/ or val/")

    def split(of: list[str]) -> Split:
        with ThreadPoolExecutor() as threads:  # decoding lets other threads run
            pixels = np.stack([*threads.map(_pixels, (files[name] for name in of))])
        labels = [classes.index(Path(name).parts[-2]) for name in of]
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)

    return split(names["train"]), split(names["test"])


def _pixels(content: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def augmented(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Crop each image at a place of its own, after padding, and mirror half of them.

    Args:
        images: padded, shape ``[n, 3, h, h]``.
        size: height and width of the crops.
        generator: source of random numbers, on the device of ``images``.
    """
    count, _, height, _ = images.shape
    device, most = images.device, height - size + 1
    across = torch.arange(size, device=device)
    flip = torch.rand(count, 1, generator=generator, device=device) < 0.5
    columns = torch.where(flip, size - 1 - across, across)
    columns = columns + torch.randint(most, (count, 1), generator=generator, device=device)
    rows = across + torch.randint(most, (count, 1), generator=generator, device=device)
    index = torch.arange(count, device=device)[:, None, None]
    # Indices on both sides of a slice move its dimension to the end.
    return images[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def normalised(images: Tensor) -> Tensor:
    """Return FP32 channels_last images of mean 0 and deviation 1."""
    mean, std = (torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (_MEAN, _STD))
    scaled = (images.float() / 255 - mean) / std
    return scaled.contiguous(memory_format=torch.channels_last)


def train(name: str, seed: int, data: tuple[Split, Split], place: Place) -> dict[str, float]:
    """Train once by a recipe; returns ``top1`` in percent, ``train_loss``, ``seconds``, ``steps``.

    The first steps, in which kernels are chosen, are part of the seconds.
    """
    from largebatch.lars import as_scheduler
    from largebatch.recipes.models.build import build_model
    from largebatch.recipes.models.optimizers import build_optimizer
    from largebatch.recipes.schema.load import load
    from largebatch.recipes.training.lr import learning_rates
    from largebatch.recipes.training.timeline import timeline_of

    (images, labels), (tests, answers) = data
    overrides = (
        ["epochs=4", "batch_size=16", "micro_batch_size=16", "schedule.warmup=1ep"]
        if place.dry
        else []
    )
    recipe = load(name, overrides).recipe
    batch, size = recipe.batch_size, recipe.data.image_size
    timeline = timeline_of(recipe, len(images))
    torch.manual_seed(seed)
    model = build_model(recipe.model, 10).to(place.device)
    model = model.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(recipe, model)
    scheduler = as_scheduler(optimizer, learning_rates(recipe, timeline).schedule)
    generator = torch.Generator(place.device).manual_seed(seed)
    margin = (32 - size) // 2
    tests = tests[:, :, margin : margin + size, margin : margin + size]
    pad = max(0, _PAD - margin)
    padded = F.pad(images.float(), (pad,) * 4, mode="reflect").to(torch.uint8)
    began = time.monotonic()
    order = torch.empty(0, dtype=torch.int64, device=place.device)
    loss = torch.zeros((), device=place.device)
    for _ in range(timeline.total_steps):
        while len(order) < batch:
            more = torch.randperm(len(images), generator=generator, device=place.device)
            order = torch.cat([order, more])
        chosen, order = order[:batch], order[batch:]
        x = normalised(augmented(padded[chosen], size, generator))
        loss = F.cross_entropy(model(x), labels[chosen], label_smoothing=recipe.label_smoothing)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
    model.eval()
    with torch.no_grad():
        right = sum(
            (model(normalised(x)).argmax(1) == y).sum()
            for x, y in zip(tests.split(2000), answers.split(2000), strict=True)
        )
    top1 = 100 * float(right) / len(answers)
    seconds = time.monotonic() - began
    steps = float(timeline.total_steps)
    return {"top1": top1, "train_loss": loss.item(), "seconds": seconds, "steps": steps}


def run(report: Report, place: Place) -> None:
    """Train each batch size with each optimizer, seed by seed, as long as there is time."""
    need(*TRAINER)
    data = read(place)
    if place.on_gpu:
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True
    batches = _BATCHES[-1:] if place.dry else _BATCHES
    took = dict.fromkeys(((kind, batch) for kind in _RECIPES for batch in batches), 0.0)
    for seed in range(1 if place.dry else _SEEDS):
        for kind, batch in took:
            what = f"{kind}, batch {batch}, seed {seed}"
            if not report.has_time(what, 1.1 * took[kind, batch]):
                continue
            with report.attempt(what):
                found = train(_RECIPES[kind].format(batch), seed, data, place)
                took[kind, batch] = found["seconds"]
                report.row("one row for each run", optimizer=kind, batch=batch, seed=seed, **found)
    summarise(report)


def summarise(report: Report) -> None:
    """Report the mean accuracy of each optimizer and batch size, with the range of its seeds."""
    groups: dict[tuple[str, int], list[float]] = {}
    for row in report.content["tables"].get("one row for each run", []):
        groups.setdefault((row["optimizer"], row["batch"]), []).append(row["top1"])
    for (kind, batch), found in groups.items():
        report.row(
            "top-1 in percent by batch size",
            optimizer=kind,
            batch=batch,
            mean=statistics.mean(found),
            least=min(found),
            most=max(found),
            seeds=len(found),
        )
