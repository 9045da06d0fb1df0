"""RandAugment's processor time per image, against timm's.

    python -m benchmarks.pipeline.augmentation

Both get the same images of 224 pixels and return arrays, on one thread, in turns within each
repeat. Operations are random, with the same distribution. (At level 9 timm asks the latest Pillow
for 0 bits now and then, which it refuses.)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from timm.data.auto_augment import rand_augment_transform

from benchmarks import tables
from largebatch.pipeline import IMAGENET_MEAN
from largebatch.pipeline.decode.policy import AutoAugment
from largebatch.pipeline.order import Stream

NAMES = ("rand-m6-mstd0.5-inc1", "rand-m7-mstd0.5-inc1")
SIDE = 224


def pictures(count: int) -> list[Image.Image]:
    """Make images with structure of all sizes: sums of noise, enlarged by powers of two."""
    rng, found = np.random.default_rng(0), []
    for _ in range(count):
        levels = np.zeros((SIDE, SIDE, 3))
        for size in (7, 28, 112):
            noise = Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8))
            levels += np.asarray(noise.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) / 3
        found.append(Image.fromarray(levels.astype(np.uint8)))
    return found


def seconds(
    augment: Callable[[int, Image.Image], object], images: Sequence[Image.Image], first: int = 0
) -> float:
    """Return the processor time per image, in seconds; images are counted from ``first``."""
    start = time.thread_time()
    for i, image in enumerate(images, first):
        augment(i, image)
    return (time.thread_time() - start) / len(images)


def measure(name: str, images: Sequence[Image.Image], repeats: int) -> list[tuple[float, float]]:
    """Return the times per image of ours and of timm's, for each repeat."""
    ours = AutoAugment(name, IMAGENET_MEAN, "bicubic")
    hparams = {"img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
    theirs = rand_augment_transform(name, hparams)
    _, numbers = Stream(len(images), 0, further=True).take(0, repeats * len(images))

    def own(i: int, image: Image.Image) -> object:
        return ours(np.asarray(image), numbers[i])

    def timms(i: int, image: Image.Image) -> object:
        return np.asarray(theirs(image))

    return [
        (seconds(own, images, repeat * len(images)), seconds(timms, images))
        for repeat in range(repeats)
    ]


def main() -> None:
    """Measure, print the table and store it."""
    parser = tables.parser(__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=tables.RESULTS, help="folder of the results")
    options = parser.parse_args()
    base = pictures(20)
    images = [base[i % len(base)] for i in range(options.images)]
    rows, times = [], {}
    for name in NAMES:
        times[name] = found = measure(name, images, options.repeats)
        own, other = (statistics.median(column) for column in zip(*found, strict=True))
        ratio = tables.median_and_range([theirs / ours for ours, theirs in found])
        rows.append((f"`{name}`", f"{1000 * own:.3f}", f"{1000 * other:.3f}", ratio))
    columns = {"augmentation": "l", "ms per image": "r", "timm": "r", "timm / here": "r"}
    between = f"{options.repeats} repeats of {options.images} images of {SIDE} px, one thread"
    text = f"{tables.table(columns, rows)}\n\n{tables.about(between, more=['timm', 'pillow'])}.\n"
    print(text)
    (options.out / "augmentation.md").write_text(text)
    tables.store(
        options.out / "augmentation.json",
        {**tables.origin("timm", "pillow"), "seconds_ours_and_timm": times},
    )


if __name__ == "__main__":
    main()
