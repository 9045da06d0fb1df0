"""Decoding: DALI on the GPU by the share of its JPEG decoders, nvImageCodec and torchvision.

Contenders run one after another, since how much memory of the GPU each takes is to be found out.
The JPEG files are random images of ImageNet's size and bytes per pixel, written by this benchmark.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import clock
from benchmarks.gpu.place import Place, installed, need, need_cuda
from benchmarks.gpu.report import Report
from largebatch.pipeline import ImageFolder, Loader, Transform

TITLE = "Input: decoding"

#: Width and height of the images: the medians of 200 of ImageNet.
SIZE = (500, 375)
#: Bytes per pixel of the same 200, whose files have 102 kB and 468 × 396 pixels on average.
BYTES_PER_PIXEL = 0.525

#: What is measured: options of the loader. The first is what a recipe gets.
DALI = {"backend": "dali-gpu"}
CONTENDERS: dict[str, dict[str, Any]] = {
    "DALI on the GPU": DALI,
    "DALI, decoders' share 0.65, prefetch 2": DALI | {"hw_decoder_load": 0.65, "prefetch": 2},
    "DALI, decoders' share 0.65, prefetch 4": DALI | {"hw_decoder_load": 0.65, "prefetch": 4},
    "DALI, decoders' share 0.95, prefetch 2": DALI | {"hw_decoder_load": 0.95, "prefetch": 2},
    "DALI, no hardware decoder, prefetch 4": DALI | {"hw_decoder_load": 0.0, "prefetch": 4},
    "nvImageCodec": {"backend": "nvimgcodec"},
    "torchvision": {"backend": "torchvision"},
}
MODULES = {
    "dali-gpu": "nvidia.dali",
    "nvimgcodec": "nvidia.nvimgcodec",
    "torchvision": "torchvision",
}


def write_images(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Write ``count`` JPEG files of two classes to ``folder/train/<class>/``.

    They are smooth, with noise that brings them to :data:`BYTES_PER_PIXEL`. As most of ImageNet's,
    they keep colours at full resolution (4:4:4).
    """
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(count):
        of_class = folder / "train" / f"{number % 2}"
        of_class.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (size[1] // 10, size[0] // 10, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC))
        levels = smooth + generator.normal(0, 2.8, (size[1], size[0], 1))
        image = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
        image.save(of_class / f"{number:04d}.JPEG", quality=92, subsampling=0)


def gpu_decodes_as_the_processor(folder: Path, device: torch.device) -> None:
    """Check that both decode the same crops, up to the difference of one level or so."""
    need_cuda(device)
    need("nvidia.dali")
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
    """Check the images decoded on the GPU, then measure the speed of each contender."""
    need("PIL")
    count, size = (16, (80, 60)) if place.dry else (512, SIZE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder, count, size)
        what = "DALI decodes on the GPU as on the processor"
        report.check(what, gpu_decodes_as_the_processor, folder, place.device)
        for contender, options in CONTENDERS.items():
            module = MODULES[options["backend"]]
            if options["backend"] == "dali-gpu" and not place.on_gpu:
                report.skip(contender, "needs CUDA")
            elif not installed(module):
                report.skip(contender, f"needs {module}")
            elif report.has_time(contender, 0 if place.dry else 5):
                with report.attempt(contender):
                    measure(report, place, folder, contender, options)


def measure(
    report: Report, place: Place, folder: Path, contender: str, options: dict[str, Any]
) -> None:
    """Add a contender's images per second to the table, and the memory of the GPU that it took.

    DALI keeps memory that it has freed, so that a later contender is seen to take less.
    """
    batch, warm, steps, repeats = (8, 1, 1, 1) if place.dry else (256, 8, 12, 5)
    free = _free_bytes(place)
    source = ImageFolder(folder, "train")
    loader = Loader(source, Transform(), batch_size=batch, device=place.device, **options)
    batches: Iterator[object] = iter(loader)
    for _ in range(warm):  # also empties the queue of what was decoded ahead
        next(batches)
    seconds = [
        clock.seconds(lambda: next(batches), place.device, steps)
        for repeat in range(repeats)
        if not repeat or report.seconds_left > 0
    ]
    rates = [batch / taken for taken in seconds]
    report.row(
        "images of ImageNet's bytes per pixel decoded, cropped to 224, on the device",
        contender=contender,
        images_per_second=statistics.median(rates),
        least=min(rates),
        most=max(rates),
        repeats=len(rates),
        threads=loader.threads,
        prefetch=loader.prefetch,
        gpu_memory_gib=(free - _free_bytes(place)) / 2**30,
    )


def _free_bytes(place: Place) -> int:
    """Memory of the GPU that is free, as DALI's does not come from torch; 0 on a CPU."""
    if not place.on_gpu:
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(place.device)[0]
