"""Decoding: DALI on the GPU ("mixed") against DALI and torchvision on the CPU.

The JPEG files are smooth random images of the size of ImageNet's, written by this benchmark.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu import clock
from benchmarks.gpu.place import Place, installed, need, need_cuda
from benchmarks.gpu.report import Report
from largebatch.pipeline import ImageFolder, Loader, Transform

TITLE = "Input: decoding"

BACKENDS = {"dali-gpu": "nvidia.dali", "dali-cpu": "nvidia.dali", "torchvision": "torchvision"}


def write_images(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Write ``count`` JPEG files of two classes to ``folder/train/<class>/``.

    Args:
        folder: need not exist.
        count: number of files.
        size: width and height in pixels.
    """
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(count):
        of_class = folder / "train" / f"{number % 2}"
        of_class.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (size[1] // 10, size[0] // 10, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        image.save(of_class / f"{number:04d}.JPEG", quality=92)


def gpu_decodes_as_the_processor(folder: Path, device: torch.device) -> None:
    """Check that both decode the same crops, up to the difference of one level or so.

    Args:
        folder: has images in ``train/<class>/``.
        device: the GPU.
    """
    need("nvidia.dali")
    need_cuda(device)
    source, transform = ImageFolder(folder, "train"), Transform(image_size=24, eval_resize=28)
    on_cpu = Loader(source, transform, backend="dali-cpu", batch_size=12, epochs=2)
    half = {"dtype": torch.float16, "memory_format": torch.channels_last}
    for form in ({}, half):
        on_gpu = Loader(source, transform, device=device, batch_size=12, epochs=2, **form)
        assert on_gpu.backend == "dali-gpu"
        for ours, theirs in zip(on_gpu, on_cpu, strict=True):
            assert ours.images.is_cuda
            assert ours.images.dtype == form.get("dtype", torch.float32)
            assert ours.images.is_contiguous(
                memory_format=form.get("memory_format", torch.contiguous_format)
            )
            assert torch.equal(ours.labels.cpu(), theirs.labels)
            levels = 255 * 0.226 * (ours.images.float().cpu() - theirs.images).abs()
            assert levels.mean() < 1.5, f"images differ by {levels.mean():.2f} levels"


def run(report: Report, place: Place) -> None:
    """Check the images decoded on the GPU, then measure the speed of each back end."""
    need("PIL")
    batch, count, size = (8, 16, (80, 60)) if place.dry else (128, 1024, (500, 375))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, count, size)
        what = "DALI decodes on the GPU as on the processor"
        report.check(what, gpu_decodes_as_the_processor, folder, place.device)
        measures = {}
        for backend, module in BACKENDS.items():
            if not installed(module):
                report.skip(f"decoding by {backend}", f"needs {module}")
            elif backend == "dali-gpu" and not place.on_gpu:
                report.skip(f"decoding by {backend}", "needs CUDA")
            elif report.has_time(f"decoding by {backend}", 0 if place.dry else 5):
                measures[backend] = rate(backend, folder, batch, place)
        repeats = 1 if place.dry else 5
        rates = clock.interleaved(measures, repeats, lambda: report.seconds_left > 0)
        for backend, values in rates.items():
            report.row(
                f"{size[0]} × {size[1]} pixels decoded, cropped to 224, on the device",
                backend=backend,
                images_per_second=statistics.median(values),
                least=min(values),
                most=max(values),
                repeats=len(values),
            )


def rate(backend: str, folder: Path, batch: int, place: Place) -> Callable[[], float]:
    """Return a function that measures images per second, after warming the loader up."""
    loader = Loader(
        ImageFolder(folder, "train"),
        Transform(),
        batch_size=batch,
        device=place.device,
        backend=backend,
    )
    batches: Iterator[object] = iter(loader)
    for _ in range(1 if place.dry else 4):
        next(batches)
    steps = 1 if place.dry else 8

    def measure() -> float:
        return batch / clock.seconds(lambda: next(batches), place.device, steps)

    return measure
