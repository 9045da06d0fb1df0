"""CIFAR-10 accuracy against batch size: ResNet-18 with LARS, run by the trainer.

Images are scaled up to 64 pixels, because ResNet-18's first layers are too coarse for 32. Learning
rates scale with the square root of the batch size from 4 at 512, with a warm-up of a fifth of the
run; they were not tuned. The available time is divided so that all batch sizes train the same
number of epochs.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.dali import write_images
from benchmarks.gpu.place import TRAINER, Place, need
from benchmarks.gpu.report import Report, Skipped

TITLE = "CIFAR-10: accuracy against batch size"

_BATCHES = (512, 2048, 8192)
_MOST_EPOCHS, _FEWEST_EPOCHS = 30, 3


def folders(place: Place, root: Path) -> Path:
    """Return a folder with train/ and val/, as the trainer expects it, that links to the data."""
    if place.dry:
        need("PIL")
        write_images(root, 32, (32, 32))
        (root / "val").symlink_to(root / "train", target_is_directory=True)
        return root
    if place.cifar10 is None:
        raise Skipped("needs data: --cifar10 DIR")
    given = place.cifar10.resolve()
    held_out = next((given / name for name in ("val", "test") if (given / name).is_dir()), None)
    if held_out is None:
        raise Skipped(f"{given} has neither val/ nor test/")
    (root / "train").symlink_to(given / "train", target_is_directory=True)
    (root / "val").symlink_to(held_out, target_is_directory=True)
    return root


def train(place: Place, data: Path, batch: int, epochs: float, stop_after: str) -> dict[str, float]:
    """Train once, and return the summary with the duration in ``wall_seconds``."""
    from largebatch.recipes.ranks import Job
    from largebatch.recipes.schema.load import load
    from largebatch.recipes.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as run_dir:
        keys = {
            "model.name": "test_resnet" if place.dry else "resnet18",
            "data.path": data,
            "data.image_size": 32 if place.dry else 64,
            "data.eval_resize": 32 if place.dry else 64,
            "data.flip": 0.5,
            "batch_size": batch,
            "micro_batch_size": min(batch, 2048),
            "epochs": epochs,
            "seed": 0,
            "optimizer.lr": 4.0 * (batch / 512) ** 0.5,
            "schedule.warmup": "0.2dur",
            "precision": "bf16",
            "channels_last": "true",
            "comm.ranks_per_node": "null",
            "log_every": 5,
            "evaluate_every": f"{epochs:g}ep",
            "checkpoint.every": "null",
            "stop_after": stop_after,
            "run_dir": f"{run_dir}/run",
        }
        overrides = [f"{key}={value}" for key, value in keys.items()]
        start = time.monotonic()
        trainer = Trainer(load("digits", overrides), Job(0, 1, 1, place.device), quiet=True)
        summary = trainer.run()
        summary["wall_seconds"] = time.monotonic() - start
        return summary


def run(report: Report, place: Place) -> None:
    """Train each batch size for the same number of epochs, as many as there is time for."""
    need(*TRAINER, "tensorboard", "matplotlib")
    with tempfile.TemporaryDirectory() as name:
        data = folders(place, Path(name))
        images = sum(1 for path in (data / "train").rglob("*") if path.is_file())
        batches = (8, 16) if place.dry else _BATCHES
        epochs = 1.0
        if not place.dry:
            probe = train(place, data, batches[0], 100.0, "0.5ep")
            epoch_seconds = images / probe["images_per_second"]
            # An evaluation takes about a fifth of an epoch.
            fits = 0.85 * report.seconds_left / len(batches) / epoch_seconds - 1
            report.note(f"{probe['images_per_second']:,.0f} images/s in a first half epoch")
            epochs = float(min(_MOST_EPOCHS, int(fits)))
            if epochs < _FEWEST_EPOCHS:
                raise Skipped(f"no time: an epoch takes {epoch_seconds:.0f} s")
        for batch in batches:
            if not report.has_time(f"batch {batch}"):
                continue
            summary = train(place, data, batch, epochs, "1dur")
            report.row(
                "one run each, BF16",
                batch=batch,
                epochs=epochs,
                steps=summary["step"],
                learning_rate=4.0 * (batch / 512) ** 0.5,
                top1_percent=summary["top1"],
                train_loss=summary["train_loss"],
                images_per_second=summary["images_per_second"],
                wait_percent=100 * summary["wait_share"],
                seconds=summary["wall_seconds"],
            )
            gc.collect()
            if place.on_gpu:
                torch.cuda.empty_cache()
