"""The loaders compared by benchmarks/pipeline/input.py, each measured in a process of its own.

``python -m benchmarks.pipeline.input_contenders '{"contender": ..., "data": ...}'`` prints the
measurement as JSON. All loaders do the same: random crops of 224 pixels like torchvision's
RandomResizedCrop (bilinear, antialiased), flips, normalised FP32 tensors on the CPU.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def ours(options: dict[str, Any]) -> Iterable[torch.Tensor]:
    """Return the batches of this library's loader."""
    from largebatch.pipeline import ImageFolder, Loader, Transform

    loader = Loader(
        ImageFolder(options["data"]),
        Transform(image_size=options.get("size", SIZE)),
        batch_size=options["batch"],
        backend=options.get("backend", "auto"),
        threads=options.get("threads"),
        prefetch=options.get("prefetch"),
    )
    return (batch.images for batch in loader)


def raw_dali(options: dict[str, Any]) -> Iterable[torch.Tensor]:
    """Return the batches of a plain DALI pipeline with its own reader and random crops."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(
        exec_dynamic=True,
        batch_size=options["batch"],
        num_threads=options.get("threads") or len(os.sched_getaffinity(0)),
        device_id=None,
        prefetch_queue_depth=options.get("prefetch") or 2,
        seed=0,
    )
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(
            file_root=os.path.join(options["data"], "train"), random_shuffle=True, name="reader"
        )
        image = fn.decoders.image_random_crop(
            encoded,
            device="cpu",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            num_attempts=10,
        )
        image = fn.resize(image, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True)
        image = fn.crop_mirror_normalize(
            image,
            mirror=fn.random.coin_flip(),
            mean=[255 * v for v in MEAN],
            std=[255 * v for v in STD],
            dtype=types.FLOAT,
            output_layout="CHW",
        )
        return image, labels

    built = pipeline()
    built.build()

    def batches() -> Iterator[torch.Tensor]:
        while True:
            images, _ = built.run()
            yield torch.from_dlpack(images.as_tensor())

    return batches()


def torchvision(options: dict[str, Any]) -> Iterable[torch.Tensor]:
    """Return the batches of torch's DataLoader with torchvision's transforms v2."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    steps: list[Any] = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    loading: dict[str, Any] = {}
    if options["decoder"] == "torchvision.io":
        loading["loader"] = lambda path: decode_image(path, mode=ImageReadMode.RGB)
    else:
        steps.insert(2, v2.ToImage())
    dataset = ImageFolder(
        os.path.join(options["data"], "train"), transform=v2.Compose(steps), **loading
    )
    loader = DataLoader(
        dataset,
        options["batch"],
        shuffle=True,
        drop_last=True,
        num_workers=options["workers"],
        prefetch_factor=options["prefetch_factor"],
        persistent_workers=True,
    )
    return (images for _ in itertools.count() for images, _ in loader)


def timm(options: dict[str, Any]) -> Iterable[torch.Tensor]:
    """Return the batches of timm's loader without colour jitter and random erasing."""
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root=os.path.join(options["data"], "train"), is_training=True)
    loader = create_loader(
        dataset,
        input_size=(3, SIZE, SIZE),
        batch_size=options["batch"],
        is_training=True,
        use_prefetcher=options["prefetcher"],
        no_aug=False,
        re_prob=0.0,
        color_jitter=None,
        auto_augment=None,
        hflip=0.5,
        interpolation="bilinear",
        mean=MEAN,
        std=STD,
        num_workers=options["workers"],
        pin_memory=False,
        device=torch.device("cpu"),
        persistent_workers=True,
    )
    return (images for _ in itertools.count() for images, _ in loader)


CONTENDERS = {"ours": ours, "raw DALI": raw_dali, "torchvision": torchvision, "timm": timm}


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Measure images/s, and the waiting time of steps that last ``step_seconds``."""
    os.sched_setaffinity(0, range(options["cores"]))
    torch.set_num_threads(1)
    batches = iter(CONTENDERS[options["contender"]](options))
    first = next(batches)
    size = options.get("size", SIZE)
    assert tuple(first.shape) == (options["batch"], 3, size, size)
    assert first.dtype == torch.float32
    assert 0.8 < first.std() < 1.5  # normalised, and not blank
    step_seconds = options.get("step_seconds", 0.0)
    time.sleep(step_seconds)
    if not step_seconds:  # prefetched batches do not count
        for _ in range(options["warm_up"]):
            next(batches)
    waits = []
    start = time.perf_counter()
    for _ in range(options["batches"]):
        before = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - before)
        time.sleep(step_seconds)
    seconds = time.perf_counter() - start
    return {
        "images_per_second": options["batches"] * options["batch"] / seconds,
        "wait_share": sum(waits) / seconds,
        "longest_wait_ms": 1000 * max(waits),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # without waiting for the workers of the loaders
