"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

import os

import numpy as np

from ..decode.pillow import encode
from ..errors import DataError
from ..progress import ProgressCallback, silent
from .images import Images
from .output import Output
from .preparation import preparing
from .write import build

_SCALE = 4  # from 8 x 8 to 32 x 32, so that random crops have a choice of positions
_QUALITY = 95


def prepare_digits(
    out: str | os.PathLike[str], output: Output | None = None, report: ProgressCallback = silent
) -> dict[str, int]:
    """Write the handwritten digits that come with scikit-learn as JPEG files.

    1,797 real scans of 8 × 8 pixels and 17 grey levels (Alpaydin and Kaynak 1998, UCI Optical
    Recognition of Handwritten Digits, test set), enlarged to 32 × 32. Every fifth image in
    scikit-learn's order is for validation: 360 images, and 1,437 for training.

    Arguments, the result and errors are as of :func:`prepare_imagenet`. It needs scikit-learn.
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
    order = np.argsort(digits.target, kind="stable")

    def read(number: int) -> bytes:
        grey = np.round(digits.images[order[number]] * (255 / 16)).astype(np.uint8)
        size = (grey.shape[1] * _SCALE, grey.shape[0] * _SCALE)
        large = Image.fromarray(grey).resize(size, Image.Resampling.BICUBIC)
        return encode(large, "JPEG", quality=_QUALITY)

    names = [f"{digits.target[i]}/{i:04d}.jpeg" for i in order]
    sizes = np.full(len(order), digits.images[0].size * _SCALE**2, np.int64)
    images = Images("all", classes, names, digits.target[order].astype(np.int64), sizes, read)
    parts = {"train": order % 5 != 0, "val": order % 5 == 0}
    splits = [images.part(name, np.flatnonzero(chosen)) for name, chosen in parts.items()]
    with preparing(out, {"data set": "digits", **output.settings()}) as preparation:
        return preparation.finished_counts() or build(preparation, splits, output, report)
