"""Writing the images of a data set unit by unit, and verifying the result."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from ..progress import Meter, ProgressCallback
from ..sources import INDEX_FILE, Index
from .images import Images
from .output import Output
from .units import Unit, units_of
from .verify import verify
from .work_dir import WorkDir
from .write import Writer
from .writers import SHARD_FORMATS


def build(
    work_dir: WorkDir, splits: Sequence[Images], output: Output, report: ProgressCallback
) -> dict[str, int]:
    """Write a data set into its folder, or continue an interrupted call.

    Args:
        work_dir: The unfinished folder, locked by this process.
        splits: The images of each split.
        output: The format to write.
        report: Callback for the progress.

    Returns:
        The number of images by split.

    Raises:
        DataError: An image cannot be read, is not an image, or cannot be written. Completed units
            are kept, and the next call continues with the rest.
    """
    try:
        formats = SHARD_FORMATS.get(output.format)
        shard_format = formats() if formats else None
        units: list[Unit] = []
        for images in splits:
            work_dir.check_source(images.split, images.fingerprint())
            units += units_of(images, output, shard_format)
        for images in splits:
            folder = work_dir.work / images.split
            for name in ("", *(images.classes if shard_format is None else ())):
                (folder / name).mkdir(parents=True, exist_ok=True)
            for partial in folder.glob(".*.partial*"):  # left by a call that was killed
                partial.unlink()
        writer = Writer(work_dir, output, shard_format)
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
            if shard_format is not None:
                index.save(work_dir.work / images.split / INDEX_FILE)
            verify(work_dir.work / images.split, images, index, report)
            result[images.split] = {
                "images": len(images),
                "classes": len(set(images.labels.tolist())),
                "bytes": int(index.length.sum()),
                **({} if shard_format is None else {"shards": len(index.shards)}),
            }
        os.sync()  # once for all files: there may be a million
        work_dir.publish({"splits": result})
    except OSError as error:
        raise work_dir.write_error(error) from error
    return {images.split: len(images) for images in splits}


def _join(notes: list[Index], classes: tuple[str, ...], shard_format: str) -> Index:
    """Join the notes of the units of a split into its index."""
    # The note of a shard lists two files, the first of which holds the images.
    files = [slice(None) if shard_format == "folder" else slice(1)] * len(notes)
    pairs = list(zip(notes, files, strict=True))
    crc32 = [note.crc32 for note in notes if note.crc32 is not None]
    first = np.cumsum([0, *(len(note.shards[take]) for note, take in pairs[:-1])])
    return Index(
        format=shard_format,
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
        label_offset=np.array(0),
        # No times of shards, so that the bytes of an index depend on the settings alone.
        crc32=np.concatenate(crc32) if len(crc32) == len(notes) else None,
    )
