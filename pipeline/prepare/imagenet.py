"""ImageNet (ILSVRC 2012) from the archives of image-net.org, which are not unpacked.

Russakovsky et al. 2015, "ImageNet Large Scale Visual Recognition Challenge".
``ILSVRC2012_img_train.tar`` holds one tar archive per class. ``ILSVRC2012_img_val.tar`` holds
images without classes, which come from the development kit or from a list of synsets. No archive
is compressed, so every image is a byte range of its archive.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..progress import Meter, ProgressCallback, silent
from ..sources.shards.webdataset import Member
from ..sources.storage.local import ByteRange, LocalStorage
from .archives import check_count, check_md5, members, read_archive, report_hidden, require_file
from .images import Images
from .output import Output
from .preparation import preparing
from .write import build

TRAIN_MD5 = "1d675b47d978889d74fa0da5fadfb00e"
VAL_MD5 = "29b22e2961454d5413ddabcf34fc5622"
DEVKIT_MD5 = "fa75699e90414af021442c21a62c3abf"
CLASSES = 1000
COUNTS = {"train": 1_281_167, "val": 50_000}

_WHERE = "download {} from https://image-net.org/download-images.php (log in there first)"
_TRAIN = _WHERE.format("ILSVRC2012_img_train.tar, 138 GB,")
_VAL = _WHERE.format("ILSVRC2012_img_val.tar, 6.3 GB,")
_DEVKIT = _WHERE.format("ILSVRC2012_devkit_t12.tar.gz, 2.5 MB,")
_LABELS = (
    f"{_DEVKIT}, or give --val-labels, a text file with one synset (n01440764) per line or "
    "Kaggle's LOC_val_solution.csv"
)
_VAL_NAME = re.compile(r"(?:.*/)?(ILSVRC2012_val_(\d{8})\.JPEG)")
_SYNSET = re.compile(r"n\d{8}")
_SYNSET_VALID = "a synset (n01440764)"
_KAGGLE_VALID = (
    "ILSVRC2012_val_00000001,n01440764 and the corners of a box, or several of one synset"
)
_KAGGLE_HEADER = "ImageId,PredictionString"
_KAGGLE_LINE = re.compile(r"ILSVRC2012_val_(\d{8}),((?:n\d{8}(?: -?\d+){4} ?)+)")


def prepare_imagenet(
    out: str | os.PathLike[str],
    train_archive: str | os.PathLike[str] | None,
    val_archive: str | os.PathLike[str] | None,
    output: Output | None = None,
    *,
    devkit: str | os.PathLike[str] | None = None,
    val_labels: str | os.PathLike[str] | None = None,
    checksum: bool = True,
    allow_partial: bool = False,
    report: ProgressCallback = silent,
) -> dict[str, int]:
    """Write ImageNet: 1,281,167 training images of 1000 classes, and 50,000 validation images.

    Classes are numbered in the order of their synsets, as is usual except in the development kit.
    The function returns the number of images by split.

    Args:
        out: The folder to create. If it already holds the data set, nothing is written.
        train_archive: Path of ``ILSVRC2012_img_train.tar``.
        val_archive: Path of ``ILSVRC2012_img_val.tar``.
        output: The format to write; default: class folders.
        devkit: Path of ``ILSVRC2012_devkit_t12.tar.gz``, with the classes of validation images.
        val_labels: Alternative to ``devkit``: a text file with one synset per line, in the order
            of the validation images, or ``LOC_val_solution.csv`` of Kaggle's competition.
        checksum: Whether to verify the MD5 checksums of the archives.
        allow_partial: Whether to accept archives with fewer classes and images. Validation images
            of classes without training images are left out.
        report: Callback for the progress.

    Raises:
        DataError: An archive is missing, broken, or holds something else; or ``out`` holds
            something else or cannot be created.
    """
    output = output or Output()
    train = require_file(train_archive, "--train-archive", _TRAIN)
    val = require_file(val_archive, "--val-archive", _VAL)
    labels = require_file(
        val_labels or devkit, "--val-labels" if val_labels else "--devkit", _LABELS
    )
    settings = {
        "data set": "imagenet",
        "train archive bytes": train.stat().st_size,
        "val archive bytes": val.stat().st_size,
        "labels bytes": labels.stat().st_size,
        **output.settings(),
    }
    with preparing(out, settings) as preparation:
        if counts := preparation.finished_counts():
            return counts
        synsets = read_synsets(labels) if val_labels else read_devkit(labels, report)
        if checksum:
            if not val_labels:
                check_md5(labels, DEVKIT_MD5, report)
            check_md5(val, VAL_MD5, report)
            check_md5(train, TRAIN_MD5, report)
        splits = [_train(train, output.threads, report)]
        classes = splits[0].classes
        if not allow_partial:
            check_count(train, "classes", len(classes), CLASSES)
        splits.append(_val(val, synsets, classes, allow_partial, report))
        if not allow_partial:
            for path, images in zip((train, val), splits, strict=True):
                check_count(path, "images", len(images), COUNTS[images.split])
        return build(preparation, splits, output, report)


def read_synsets(path: Path) -> dict[int, str]:
    """Return the synset of each validation image by its number, from 1, from a text file."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"--val-labels: {path} cannot be read: {error}") from error
    found: dict[int, str] = {}
    kaggle = bool(lines) and lines[0].strip() == _KAGGLE_HEADER
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or (kaggle and number == 1):
            continue
        where = f"--val-labels: line {number} of {path} is {line[:80]!r}"
        match = (_KAGGLE_LINE if kaggle else _SYNSET).fullmatch(line)
        synsets = set(_SYNSET.findall(line))
        if match is None or len(synsets) != 1:
            raise DataError(f"{where}; valid: {_KAGGLE_VALID if kaggle else _SYNSET_VALID}")
        image = int(match[1]) if kaggle else len(found) + 1
        if image in found:
            raise DataError(f"{where}, an image that occurs twice; valid: each image once")
        found[image] = synsets.pop()
    return found


def read_devkit(path: Path, report: ProgressCallback = silent) -> dict[int, str]:
    """Return the same from the development kit."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError("scipy is not installed: pip install 'largebatch[recipes]'") from error
    files = read_archive(path, report)
    names = {name.rpartition("/")[2]: name for name in files}
    try:
        meta = files[names["meta.mat"]]
        truth = files[names["ILSVRC2012_validation_ground_truth.txt"]]
        table = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        synsets = {
            int(row["ILSVRC2012_ID"]): str(row["WNID"])
            for row in table
            if int(row["num_children"]) == 0  # a class, not an inner node of the hierarchy
        }
        return {number: synsets[int(line)] for number, line in enumerate(truth.split(), 1)}
    except Exception as error:  # loadmat may raise any exception
        raise DataError(
            f"--devkit: {path} is not the development kit ({error}); {_DEVKIT}"
        ) from error


def _train(path: Path, workers: int, report: ProgressCallback) -> Images:
    archives: dict[str, Member] = {}
    hidden: list[str] = []
    for member in members(path, hidden):
        name = member.name.rpartition("/")[2].removesuffix(".tar")
        if member.name.endswith(".tar"):
            if name in archives:
                raise DataError(f"--train-archive: {path} holds {name}.tar twice; valid: once")
            archives[name] = member
    classes = tuple(sorted(archives))
    odd = [name for name in classes if not _SYNSET.fullmatch(name)]
    if odd or not classes:
        what = f"holds {f'{odd[0]}.tar'!r}" if odd else "holds no archive of a class"
        raise DataError(f"--train-archive: {path} {what}; {_TRAIN}")
    total = sum(archive.length for archive in archives.values())
    meter = Meter(report, f"listing {path.name}", total_bytes=total)

    def listed(name: str) -> list[Member]:
        images = list(members(path, hidden, archives[name]))
        if not images:
            raise DataError(f"{name}.tar in {path} holds no images")
        meter.add(len(images), archives[name].length)
        return images

    rows = []
    for label, found in enumerate(meter.in_threads(listed, classes, workers)):
        rows += [(label, member.name.rpartition("/")[2], member) for member in found]
    report_hidden(path, hidden, report)
    return _images("train", classes, rows, path)


def _val(
    path: Path,
    synsets: dict[int, str],
    classes: tuple[str, ...],
    allow_partial: bool,
    report: ProgressCallback,
) -> Images:
    meter = Meter(report, f"listing {path.name}", total_bytes=path.stat().st_size)
    rows = []
    hidden: list[str] = []
    for member in members(path, hidden):
        meter.add(1, member.length)
        match = _VAL_NAME.fullmatch(member.name)
        if match is None:
            raise DataError(
                f"--val-archive: {path} holds {member.name!r}, not ILSVRC2012_val_00000001.JPEG; "
                f"{_VAL}"
            )
        name, number = match[1], int(match[2])
        if number not in synsets:
            raise DataError(f"{name} of {path} has no class: there are {len(synsets):,} labels")
        synset = synsets[number]
        if synset in classes:
            rows.append((classes.index(synset), name, member))
        elif not allow_partial:
            raise DataError(f"{name} of {path} is of class {synset}, which has no training images")
    if not rows:
        raise DataError(f"--val-archive: {path} has no images of the training classes; {_VAL}")
    report_hidden(path, hidden, report)
    return _images("val", classes, rows, path)


def _images(
    split: str, classes: tuple[str, ...], rows: list[tuple[int, str, Member]], path: Path
) -> Images:
    """Return images sorted by class number and name, which are byte ranges of a file."""
    rows = sorted(rows, key=lambda row: row[:2])
    storage = LocalStorage(path.parent)

    def read(number: int) -> bytes:
        member = rows[number][2]
        (content,) = storage.read([ByteRange(path.name, member.offset, member.length)])
        if isinstance(content, str):
            raise DataError(f"{path} {content}")
        return content.tobytes()

    names = [f"{classes[label]}/{name}" for label, name, _ in rows]
    labels = np.array([label for label, _, _ in rows], np.int64)
    sizes = np.array([member.length for _, _, member in rows], np.int64)
    return Images(split, classes, names, labels, sizes, read)
