"""Comparison of an index with its shards, which may have been written again since.

Times decide only what is compared, since copies change them: a shard whose time is the one in the
index is as it was, and of any other some samples are compared. Sizes do not tell, since tar pads
its files to 10,240 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...errors import DataError
from ..storage.local import LocalStorage, Storage
from .index import INDEX_FILE, Index
from .indexing import SCANNERS, change_times
from .shard_file import Entry, ShardFile

_PER_SHARD = 3
_IN_ALL = 64
_THREADS = 16
_END = -1  # in place of an image: no other follows


def stale_shards(
    index: Index, storage: Storage, shards: Sequence[int], *, all_images: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the name of each shard in which an image has another place, label or name, and a line.

    Compared are the shards whose time of change is not the one in the index, at 3 images in each,
    and at least 64 in all; of shards on a server about 64 images in all.
    """
    if isinstance(storage, LocalStorage):
        if index.shard_times is not None and not all_images:
            names = [index.shards[shard] for shard in shards]
            times = index.shard_times[list(shards)]
            changed = (times < 0) | (change_times(storage, names) != times)
            shards = np.array(shards)[changed].tolist()
    elif not all_images:
        few = min(len(shards), _IN_ALL // _PER_SHARD)
        shards = np.array(shards)[np.linspace(0, len(shards) - 1, few).astype(int)].tolist()
    if not shards:
        return
    order = np.lexsort((index.offset, index.shard))
    bounds = np.searchsorted(index.shard[order], np.arange(len(index.shards) + 1))
    count = None if all_images else max(_PER_SHARD, -(-_IN_ALL // len(shards)))
    # Indexes of earlier versions do not say it.
    label_offset = 0 if index.label_offset is None else int(index.label_offset)

    def compare(shard: int) -> str:
        images = order[bounds[shard] : bounds[shard + 1]].tolist()
        file = ShardFile(storage, index.shards[shard], int(index.shard_bytes[shard]))
        scan = SCANNERS[index.format]
        try:
            if count is None:
                return _compare(index, [*images, _END], scan(file), label_offset)
            chosen = np.linspace(0, len(images) - 1, min(count, len(images))).astype(int)
            for at in np.unique(chosen).tolist():
                before = images[at - 1]
                start = int(index.offset[before] + index.length[before]) if at else 0
                wanted = images[at : at + 1] + [_END] * (at == len(images) - 1)
                what = _compare(index, wanted, scan(file, start=start), label_offset)
                if what:
                    return what
        except DataError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(_THREADS) as pool:
        for shard, what in zip(shards, pool.map(compare, shards), strict=True):
            if what:
                yield (
                    index.shards[shard],
                    f"is not the shard that {storage.where(INDEX_FILE)} was made of: {what}; write "
                    "the index again with largebatch data index FOLDER",
                )


def _compare(index: Index, images: Sequence[int], found: Iterator[Entry], label_offset: int) -> str:
    """Return how images differ from those found in their shard; empty if they do not."""
    for image in images:
        entry = next(found, None)
        if image == _END:
            return f"{entry.name} is not in the index" if entry else ""
        name = index.names[image]
        if entry is None:
            return f"{name} is not there"
        if index.format == "webdataset" and entry.name != name:
            return f"{name} is not there, but {entry.name}"
        if (entry.offset, entry.length) != (index.offset[image], index.length[image]):
            return f"{name} is elsewhere"
        label = index.labels[image] + label_offset
        if entry.label != label:
            return f"{name} has label {entry.label}, not {label}"
    return ""
