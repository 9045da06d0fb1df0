"""Write the images of a data set, unit by unit, and verify what was written."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from ..progress import Meter, Report
from ..sources import INDEX, Index
from .images import Images
from .output import Output
from .units import Unit, units_of
from .verify import verify
from .workplace import Workplace
from .write import Writer
from .writers import SHARD_FORMATS


def build(
    place: Workplace, splits: Sequence[Images], output: Output, report: Report
) -> dict[str, int]:
    """Write a data set into its folder, or go on with it.

    Args:
        place: the folder, held by this process and not finished.
        splits: what to write.
        output: how.
        report: is told of progress.

    Returns:
        The number of images by split.

    Raises:
        DataError: an image cannot be read, is none, or cannot be written; what is whole stays, and
            the next call goes on.
    """
    try:
        formats = SHARD_FORMATS.get(output.format)
        form = formats() if formats else None
        units: list[Unit] = []
        for images in splits:
            place.agree(images.split, images.fingerprint())
            units += units_of(images, output, form)
        for images in splits:
            folder = place.work / images.split
            for name in ("", *(images.classes if form is None else ())):
                (folder / name).mkdir(parents=True, exist_ok=True)
            for partial in folder.glob(".*.partial*"):  # of a call that was killed
                partial.unlink()
        writer = Writer(place, output, form)
        meter = Meter(
            report,
            f"writing {' and '.join(images.split for images in splits)}",
            sum(len(images) for images in splits),
            sum(int(images.sizes.sum()) for images in splits),
        )
        done: dict[str, list[Index]] = {images.split: [] for images in splits}
        results = meter.in_threads(lambda u: writer.write(u, meter), units, output.threads)
        for unit, note in zip(units, results, strict=True):
            done[unit.images.split].append(note)
        result = {}
        for images in splits:
            index = _join(done[images.split], images.classes, output.format)
            if form is not None:
                index.save(place.work / images.split / INDEX)
            verify(place.work / images.split, images, index, report)
            result[images.split] = {
                "images": len(images),
                "classes": len(set(images.labels.tolist())),
                "bytes": int(index.length.sum()),
                **({} if form is None else {"shards": len(index.shards)}),
            }
        os.sync()  # once for all files, of which there may be a million
        place.publish({"splits": result})
    except OSError as error:
        raise place.broken(error) from error
    return {images.split: len(images) for images in splits}


def _join(notes: list[Index], classes: tuple[str, ...], form: str) -> Index:
    """The index of a split from the notes of its units."""
    # Of a shard's two files the first holds the images.
    files = [slice(None) if form == "folder" else slice(1)] * len(notes)
    pairs = list(zip(notes, files, strict=True))
    first = np.cumsum([0, *(len(note.shards[take]) for note, take in pairs[:-1])])
    return Index(
        format=form,
        classes=classes,
        shards=tuple(name for note, take in pairs for name in note.shards[take]),
        shard_bytes=np.concatenate([note.shard_bytes[take] for note, take in pairs]),
        shard_sha256=tuple(sha for note, take in pairs for sha in note.shard_sha256[take]),
        names=tuple(name for note in notes for name in note.names),
        labels=np.concatenate([note.labels for note in notes]),
        shard=np.concatenate([note.shard + at for note, at in zip(notes, first, strict=True)]),
        offset=np.concatenate([note.offset for note in notes]),
        length=np.concatenate([note.length for note in notes]),
        split=np.concatenate([note.split for note in notes]),
    )
