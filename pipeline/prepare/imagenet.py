"""ImageNet (ILSVRC 2012) from the archives that image-net.org hands out, which stay packed.

Russakovsky et al. 2015, "ImageNet Large Scale Visual Recognition Challenge".
``ILSVRC2012_img_train.tar`` holds one tar archive per class, ``ILSVRC2012_img_val.tar`` images
without classes, which the development kit or a list of synsets tells. None is compressed, so every
image is a run of bytes of its archive.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..progress import Meter, Report, silent
from .archives import Member, Runs, check_md5, members, need, unpacked
from .build import build
from .images import Images
from .output import Output
from .verify import finished
from .workplace import Workplace

TRAIN_MD5 = "1d675b47d978889d74fa0da5fadfb00e"
VAL_MD5 = "29b22e2961454d5413ddabcf34fc5622"
DEVKIT_MD5 = "fa75699e90414af021442c21a62c3abf"
CLASSES = 1000
COUNTS = {"train": 1_281_167, "val": 50_000}

_WHERE = "download {} from https://image-net.org/download-images.php (log in there first)"
_TRAIN = _WHERE.format("ILSVRC2012_img_train.tar, 138 GB,")
_VAL = _WHERE.format("ILSVRC2012_img_val.tar, 6.3 GB,")
_DEVKIT = _WHERE.format("ILSVRC2012_devkit_t12.tar.gz, 2.5 MB,")
_LABELS = f"{_DEVKIT}, or give --val-labels, a text file with one synset (n01440764) per line"
_VAL_NAME = re.compile(r"(?:.*/)?(ILSVRC2012_val_(\d{8})\.JPEG)")
_SYNSET = re.compile(r"n\d{8}")


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
    report: Report = silent,
) -> dict[str, int]:
    """Write ImageNet: 1,281,167 images of 1000 classes to train on, and 50,000 to evaluate.

    Classes are numbered in the order of their synsets, as everywhere but in the development kit.

    Args:
        out: the folder to make. Where the data set is there already, nothing is written.
        train_archive: ``ILSVRC2012_img_train.tar``.
        val_archive: ``ILSVRC2012_img_val.tar``.
        output: what to write; default: folders.
        devkit: ``ILSVRC2012_devkit_t12.tar.gz``, which has the classes of the validation images.
        val_labels: in its place, a text file with one synset per line in the order of the images.
        checksum: hold the archives to their MD5 checksums.
        allow_partial: take archives with fewer classes and images. Validation images of classes
            that the training images do not have are left out.
        report: is told of progress.

    Returns:
        The number of images by split.

    Raises:
        DataError: an archive is missing, broken, or holds something else; or ``out`` holds
            something else or cannot be made.
    """
    output = output or Output()
    train = need(train_archive, "--train-archive", _TRAIN)
    val = need(val_archive, "--val-archive", _VAL)
    labels = need(val_labels or devkit, "--val-labels" if val_labels else "--devkit", _LABELS)
    settings = {
        "data set": "imagenet",
        "train archive bytes": train.stat().st_size,
        "val archive bytes": val.stat().st_size,
        "labels bytes": labels.stat().st_size,
        **output.settings(),
    }
    with Workplace(out, settings) as place, ExitStack() as files:
        if counts := finished(place):
            return counts
        synsets = read_synsets(labels) if val_labels else read_devkit(labels)
        if checksum:
            if not val_labels:
                check_md5(labels, DEVKIT_MD5, place, report)
            check_md5(val, VAL_MD5, place, report)
            check_md5(train, TRAIN_MD5, place, report)
        splits = [_train(train, output.threads, files, report)]
        classes = splits[0].classes
        if not allow_partial:
            _hold(train, "classes", len(classes), CLASSES)
        splits.append(_val(val, synsets, classes, allow_partial, files, report))
        if not allow_partial:
            for path, images in zip((train, val), splits, strict=True):
                _hold(path, "images", len(images), COUNTS[images.split])
        return build(place, splits, output, report)


def read_synsets(path: Path) -> list[str]:
    """The synsets of the validation images in order, from a text file.

    Raises:
        DataError: a line is none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"--val-labels: {path} cannot be read: {error}") from error
    found = [line.strip() for line in lines if line.strip()]
    for number, line in enumerate(found, 1):
        if not _SYNSET.fullmatch(line):
            raise DataError(f"--val-labels: line {number} of {path} is {line!r}, no n01440764")
    return found


def read_devkit(path: Path) -> list[str]:
    """The synsets of the validation images in order, from the development kit.

    Raises:
        DataError: it is not the development kit, or SciPy is not installed.
    """
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError("scipy is not installed: pip install 'largebatch[recipes]'") from error
    files = unpacked(path)
    names = {name.rpartition("/")[2]: name for name in files}
    try:
        meta = files[names["meta.mat"]]
        truth = files[names["ILSVRC2012_validation_ground_truth.txt"]]
        table = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        synsets = {
            int(row["ILSVRC2012_ID"]): str(row["WNID"])
            for row in table
            if int(row["num_children"]) == 0  # a class, not one of those above
        }
        return [synsets[int(line)] for line in truth.split()]
    except Exception as error:  # loadmat may raise anything
        raise DataError(f"--devkit: {path} is no development kit ({error}); {_DEVKIT}") from error


def _train(path: Path, workers: int, files: ExitStack, report: Report) -> Images:
    archives = {
        member.name.rpartition("/")[2].removesuffix(".tar"): member
        for member in members(path)
        if member.name.endswith(".tar")
    }
    classes = tuple(sorted(archives))
    odd = [name for name in classes if not _SYNSET.fullmatch(name)]
    if odd or not classes:
        what = f"holds {odd[0]}.tar" if odd else "holds no archives of classes"
        raise DataError(f"--train-archive: {path} {what}; {_TRAIN}")
    meter = Meter(
        report, f"listing {path.name}", total_bytes=sum(m.size for m in archives.values())
    )

    def listed(name: str) -> list[Member]:
        found = list(members(path, archives[name]))
        if not found:
            raise DataError(f"{name}.tar in {path} holds no images")
        meter.add(len(found), archives[name].size)
        return found

    names, labels, offsets, sizes = [], [], [], []
    for label, found in enumerate(meter.in_threads(listed, classes, workers)):
        for member in sorted(found, key=lambda m: m.name):
            names.append(f"{classes[label]}/{member.name.rpartition('/')[2]}")
            labels.append(label)
            offsets.append(member.offset)
            sizes.append(member.size)
    return _images("train", classes, names, labels, offsets, sizes, path, files)


def _val(
    path: Path,
    synsets: list[str],
    classes: tuple[str, ...],
    allow_partial: bool,
    files: ExitStack,
    report: Report,
) -> Images:
    meter = Meter(report, f"listing {path.name}", total_bytes=path.stat().st_size)
    rows = []
    for number, name, member in _val_images(path):
        meter.add(1, member.size)
        if number > len(synsets):
            raise DataError(f"{name} of {path} has no class: there are {len(synsets):,} labels")
        synset = synsets[number - 1]
        if synset in classes:
            rows.append((classes.index(synset), name, member))
        elif not allow_partial:
            raise DataError(f"{name} of {path} is of class {synset}, which has no training images")
    if not rows:
        raise DataError(f"--val-archive: {path} has no images of the classes to train on; {_VAL}")
    rows.sort(key=lambda row: row[:2])
    return _images(
        "val",
        classes,
        [f"{classes[label]}/{name}" for label, name, _ in rows],
        [label for label, _, _ in rows],
        [member.offset for _, _, member in rows],
        [member.size for _, _, member in rows],
        path,
        files,
    )


def _val_images(path: Path) -> Iterator[tuple[int, str, Member]]:
    """The number of each validation image, counted from 1, its name, and where it is."""
    for member in members(path):
        match = _VAL_NAME.fullmatch(member.name)
        if match is None:
            raise DataError(
                f"--val-archive: {path} holds {member.name}, not ILSVRC2012_val_00000001.JPEG; "
                f"{_VAL}"
            )
        yield int(match[2]), match[1], member


def _images(
    split: str,
    classes: tuple[str, ...],
    names: list[str],
    labels: list[int],
    offsets: list[int],
    sizes: list[int],
    path: Path,
    files: ExitStack,
) -> Images:
    lengths = np.array(sizes, np.int64)
    runs = files.enter_context(Runs(path, np.array(offsets, np.int64), lengths))
    return Images(split, classes, names, np.array(labels, np.int64), lengths, runs.read)


def _hold(path: Path, what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise DataError(
            f"{path} has {found:,} {what}, not {wanted:,} (--allow-partial takes it as it is)"
        )
