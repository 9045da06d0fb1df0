"""Write data sets in the ImageNet folder layout, ``train/<class>/*.jpeg`` and ``val/...``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from .errors import DataError

_SCALE = 4  # 8 x 8 becomes 32 x 32, so that random crops have pixels to choose from
_QUALITY = 95


def prepare_digits(out: str | os.PathLike[str]) -> dict[str, int]:
    """Write the handwritten digits that scikit-learn ships as JPEG files.

    1,797 real scans of 8 × 8 pixels and 17 grey levels (Alpaydin and Kaynak 1998, UCI Optical
    Recognition of Handwritten Digits, test set), enlarged to 32 × 32. Every fifth image in the
    order of scikit-learn is for validation: 360, and 1,437 for training.

    Args:
        out: the folder to make. Where the data set is there already, nothing is written.

    Returns:
        The number of images by split.

    Raises:
        DataError: ``out`` holds something else or cannot be made, or scikit-learn or Pillow is not
            installed.
    """
    out = Path(out).absolute()
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"{error.name} is not installed: pip install 'largebatch[recipes]'"
        ) from error
    digits = load_digits()
    names = [
        f"{'val' if i % 5 == 0 else 'train'}/{label}/{i:04d}.jpeg"
        for i, label in enumerate(digits.target)
    ]
    counts = {split: sum(n.startswith(split) for n in names) for split in ("train", "val")}
    # Written beside its place and moved there whole, so that half a data set is never found.
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        if out.exists():
            if {str(path.relative_to(out)) for path in out.rglob("*.jpeg")} == set(names):
                return counts
            if not out.is_dir() or any(out.iterdir()):
                raise DataError(f"{out} is not empty and is not this data set: name a new folder")
        shutil.rmtree(partial, ignore_errors=True)
        for name, pixels in zip(names, digits.images, strict=True):
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            grey = np.round(pixels * (255 / 16)).astype(np.uint8)
            size = (grey.shape[1] * _SCALE, grey.shape[0] * _SCALE)
            large = Image.fromarray(grey).resize(size, Image.Resampling.BICUBIC)
            large.save(path, quality=_QUALITY)
        if out.exists():  # and is empty; it stays, since it may be somebody's current folder
            for split in counts:
                (partial / split).rename(out / split)
            partial.rmdir()
        else:
            partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise DataError(f"{out} cannot be made: {error.strerror or error}") from error
    return counts
