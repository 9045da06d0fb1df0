"""The handwritten digits that scikit-learn ships."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..progress import Report, silent
from .build import build
from .images import Images
from .output import Output
from .verify import finished
from .workplace import RESULT, Workplace

_SCALE = 4  # 8 x 8 becomes 32 x 32, so that random crops have pixels to choose from
_QUALITY = 95


def prepare_digits(
    out: str | os.PathLike[str], output: Output | None = None, report: Report = silent
) -> dict[str, int]:
    """Write the handwritten digits that scikit-learn ships as JPEG files.

    1,797 real scans of 8 × 8 pixels and 17 grey levels (Alpaydin and Kaynak 1998, UCI Optical
    Recognition of Handwritten Digits, test set), enlarged to 32 × 32. Every fifth image in the
    order of scikit-learn is for validation: 360, and 1,437 for training.

    Args:
        out: the folder to make. Where the data set is there already, nothing is written.
        output: what to write; default: folders.
        report: is told of progress.

    Returns:
        The number of images by split.

    Raises:
        DataError: ``out`` holds something else or cannot be made, or scikit-learn or Pillow is not
            installed.
    """
    output = output or Output()
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"{error.name} is not installed: pip install 'largebatch[recipes]'"
        ) from error
    digits = load_digits()
    classes = tuple(str(label) for label in range(10))

    def split(name: str, numbers: list[int]) -> Images:
        def read(number: int) -> bytes:
            grey = np.round(digits.images[numbers[number]] * (255 / 16)).astype(np.uint8)
            size = (grey.shape[1] * _SCALE, grey.shape[0] * _SCALE)
            large = Image.fromarray(grey).resize(size, Image.Resampling.BICUBIC)
            encoded = io.BytesIO()
            large.save(encoded, "JPEG", quality=_QUALITY)
            return encoded.getvalue()

        numbers = sorted(numbers, key=lambda i: (digits.target[i], i))
        return Images(
            name,
            classes,
            [f"{digits.target[i]}/{i:04d}.jpeg" for i in numbers],
            np.array([digits.target[i] for i in numbers], np.int64),
            np.full(len(numbers), digits.images[0].size * _SCALE**2, np.int64),
            read,
        )

    everything = range(len(digits.target))
    splits = [
        split("train", [i for i in everything if i % 5]),
        split("val", [i for i in everything if i % 5 == 0]),
    ]
    if _is_there(Path(out), splits, output):
        return {images.split: len(images) for images in splits}
    with Workplace(out, {"data set": "digits", **output.settings()}) as place:
        return finished(place) or build(place, splits, output, report)


def _is_there(out: Path, splits: list[Images], output: Output) -> bool:
    """Whether version 0.1.0 wrote it, which left no word about that."""
    if output != Output() or not out.is_dir() or (out / RESULT).exists():
        return False
    names = {f"{images.split}/{name}" for images in splits for name in images.names}
    return {str(path.relative_to(out)) for path in out.rglob("*.jpeg")} == names
