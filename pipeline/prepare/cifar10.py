"""CIFAR-10, from the official archive of Python pickles or from an archive of image files.

Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images":
https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decode.pillow import encode
from ..errors import DataError
from ..progress import ProgressCallback, silent
from .archives import check_count, check_md5, read_archive, require_file
from .images import Images
from .output import Output
from .preparation import preparing
from .write import build

MD5 = "c58f30108f718f92721af3b95e74349a"

_WHERE = (
    "download cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html "
    "(or give an archive of train/<class>/<image>.jpg and test/<class>/<image>.jpg)"
)
_PICKLES = {
    "train": [f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)],
    "val": ["cifar-10-batches-py/test_batch"],
}
_META = "cifar-10-batches-py/batches.meta"
_COUNTS = {"train": 50_000, "val": 10_000}
_FILE = re.compile(r"(train|test)/([^/]+)/([^/]+\.(?:jpe?g|png))", re.IGNORECASE)
_SHAPE = (3, 32, 32)


def prepare_cifar10(
    out: str | os.PathLike[str],
    archive: str | os.PathLike[str] | None,
    output: Output | None = None,
    *,
    checksum: bool = True,
    allow_partial: bool = False,
    report: ProgressCallback = silent,
) -> dict[str, int]:
    """Write CIFAR-10: 50,000 training images, and the 10,000 images of its test set as ``val``.

    Other arguments, the result and errors are as of :func:`prepare_imagenet`.

    Args:
        archive: ``cifar-10-python.tar.gz``, or a tar archive, compressed or not, of JPEG or PNG
            files ``train/<class>/<image>`` and ``test/<class>/<image>``, whose bytes are kept.
        checksum: Whether to verify the MD5 checksum of the official archive.
        allow_partial: Whether to accept an archive with fewer images.
    """
    output = output or Output()
    path = require_file(archive, "--archive", _WHERE)
    settings = {
        "data set": "cifar10",
        "archive bytes": path.stat().st_size,
        "encoding": "png",
        **output.settings(),
    }
    with preparing(out, settings) as preparation:
        if counts := preparation.finished_counts():
            return counts
        files = read_archive(path, report)
        if _META in files:
            if checksum:
                check_md5(path, MD5, report)
            splits = _official(files, path)
        else:
            splits = _of_files(files, path)
        for images in splits:
            if not allow_partial:
                what = f"images for {images.split}"
                check_count(path, what, len(images), _COUNTS[images.split])
        return build(preparation, splits, output, report)


def _of_files(files: dict[str, bytes], path: Path) -> list[Images]:
    matches = [match for name in sorted(files) if (match := _FILE.fullmatch(name))]
    classes = tuple(sorted({match[2] for match in matches if match[1].lower() == "train"}))
    splits = []
    for split, folder in (("train", "train"), ("val", "test")):
        found = [match for match in matches if match[1].lower() == folder]
        if not found:
            raise DataError(
                f"--archive: {path} has no files {folder}/<class>/<image>.jpg; {_WHERE}"
            )
        for match in found:
            if match[2] not in classes:
                raise DataError(f"{match[0]!r} in {path} is of a class without training images")
        contents = [files[match[0]] for match in found]
        splits.append(
            Images(
                split,
                classes,
                [f"{match[2]}/{match[3]}" for match in found],
                np.array([classes.index(match[2]) for match in found], np.int64),
                np.array([len(content) for content in contents], np.int64),
                contents.__getitem__,
            )
        )
    return splits


def _official(files: dict[str, bytes], path: Path) -> list[Images]:
    """Return the images, as PNG, sorted by class, each named by its position in the archive."""
    from PIL import Image

    found = _unpickle(files, _META, path).get(b"label_names")
    if not isinstance(found, list) or not all(isinstance(name, bytes) for name in found):
        raise DataError(f"{_META} in {path} has no class names")
    classes = tuple(name.decode(errors="surrogateescape") for name in found)

    def images(split: str) -> Images:
        parts = [_batch(files, name, path, len(classes)) for name in _PICKLES[split]]
        pixels = np.concatenate([p for p, _ in parts]).reshape(-1, *_SHAPE)
        labels = np.concatenate([found for _, found in parts])
        order = np.argsort(labels, kind="stable")

        def read(number: int) -> bytes:
            colours = np.ascontiguousarray(pixels[order[number]].transpose(1, 2, 0))
            return encode(Image.fromarray(colours), "PNG")

        names = [f"{classes[labels[i]]}/{i:05d}.png" for i in order]
        sizes = np.full(len(order), pixels[0].size, np.int64)
        return Images(split, classes, names, labels[order], sizes, read)

    return [images(split) for split in _PICKLES]


def _batch(
    files: dict[str, bytes], name: str, path: Path, classes: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return pixels, uint8, ``[images, 3072]``, and labels, int64, ``[images]``, of a batch."""
    found = _unpickle(files, name, path)
    pixels = found.get(b"data")
    labels = np.asarray(found.get(b"labels"))
    if not (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == np.uint8
        and pixels.shape == (len(pixels), int(np.prod(_SHAPE)))
        and labels.shape == (len(pixels),)
        and np.issubdtype(labels.dtype, np.integer)
        and np.all((labels >= 0) & (labels < classes))
    ):
        raise DataError(f"{name} in {path} does not hold pixels and labels of CIFAR-10")
    return pixels, labels.astype(np.int64)


class _Unpickler(pickle.Unpickler):
    """Unpickles NumPy arrays only, since a pickle may call any function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _unpickle(files: dict[str, bytes], name: str, path: Path) -> dict[Any, Any]:
    if name not in files:
        raise DataError(f"{path} has no {name}: download it again")
    try:
        found = _Unpickler(io.BytesIO(files[name]), encoding="bytes").load()
    except Exception as error:  # a broken pickle may raise any exception
        raise DataError(f"{name} in {path} is not CIFAR-10: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{name} in {path} is not CIFAR-10: it holds no dictionary")
    return found
