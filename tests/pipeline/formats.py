"""Shards written by other packages where possible, and DALI's readers for comparison."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from largebatch.pipeline import Output, index_shards, prepare_folder
from largebatch.pipeline.sources import INDEX_FILE
from largebatch.pipeline.sources.shards.shard_file import ShardFile
from largebatch.pipeline.sources.storage.local import LocalStorage

SUFFIX = {"webdataset": ".tar", "tfrecord": ".tfrecord", "recordio": ".rec"}
SHARDS = tuple(SUFFIX)
CLASSES = ("ant", "bee", "cat")  # of the photos
MAGIC = struct.pack("<I", 0xCED7230A)


class Image(NamedTuple):
    name: str
    content: bytes
    label: int


def scan_shard(scan: Any, path: Path, **how: Any) -> Any:
    """Return what a scanner finds in a local shard."""
    return scan(ShardFile(LocalStorage(path.parent), path.name), **how)


def images_of(folder: Path) -> list[Image]:
    """Return the images of a split in class folders."""
    classes = sorted(path.name for path in folder.iterdir())
    return [
        Image(f"{path.parent.name}/{path.name}", path.read_bytes(), classes.index(path.parent.name))
        for path in sorted(folder.glob("*/*"))
    ]


def write_wds(path: Path, images: list[Image]) -> None:
    """Write a shard with the webdataset package, and its index with DALI's script."""
    from wds2idx import IndexCreator
    from webdataset.writer import TarWriter

    with TarWriter(str(path), encoder=False) as writer:
        for image in images:
            key, _, extension = image.name.partition(".")
            label = str(image.label).encode()
            writer.write({"__key__": key, extension.lower(): image.content, "cls": label})
    with IndexCreator(str(path), str(path.with_suffix(".idx")), verbose=False) as creator:
        creator.create_index()


def write_tar(
    path: Path | IO[bytes],
    files: Iterable[tuple[str, bytes]],
    form: int = tarfile.GNU_FORMAT,
    mode: str = "w",
) -> Any:
    """Write a tar of files, and return its path."""
    where = {"name": path} if isinstance(path, Path) else {"fileobj": path}
    with tarfile.open(mode=mode, format=form, **where) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def packed(arrays: dict[str, Any]) -> bytes:
    """Return the content of a .npz file."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def field(number: int, content: bytes) -> bytes:
    """Encode a field of a protocol buffer that holds bytes or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    more, last = divmod(value, 128)
    return bytes([last | 128]) + varint(more) if more else bytes([last])


def encode_example(features: dict[str, Any]) -> bytes:
    """Encode a ``tf.train.Example``: a map of names to lists of bytes, floats or integers."""

    def entry(name: str, values: Any) -> bytes:
        if isinstance(values[0], bytes):
            content = field(1, b"".join(field(1, value) for value in values))
        elif isinstance(values[0], float):
            content = field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            content = field(3, field(1, b"".join(map(varint, values))))
        return field(1, field(1, name.encode()) + field(2, content))

    return field(1, b"".join(entry(name, values) for name, values in features.items()))


def features_of(
    image: Image, classes: tuple[str, ...] | None = None, label_offset: int = 0
) -> dict[str, Any]:
    """Return the features of TensorFlow's ImageNet, needed and unneeded ones."""
    return {
        "image/height": [375],
        "image/object/bbox/xmin": [0.25, 0.5],
        "image/class/label": [image.label + label_offset],
        "image/encoded": [image.content],
        "image/format": [b"JPEG"],
        "image/filename": [image.name.rpartition("/")[2].encode()],
        **({"image/class/synset": [classes[image.label].encode()]} if classes else {}),
    }


def example(*arguments: Any, **options: Any) -> bytes:
    """Encode the features that :func:`features_of` returns."""
    return encode_example(features_of(*arguments, **options))


def frame_records(records: list[bytes]) -> bytes:
    """Frame the records of a TFRecord shard with TensorBoard."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    file = io.BytesIO()
    writer = RecordWriter(file)
    for record in records:
        writer.write(record)
    writer.flush()
    return file.getvalue()


def write_records(path: Path, records: list[bytes], idx: bool = False) -> None:
    """Write a TFRecord shard, and its index with DALI's script."""
    path.write_bytes(frame_records(records))
    if idx:
        script = Path(sys.executable).with_name("tfrecord2idx")
        command = [sys.executable, script, path, path.with_suffix(".idx")]
        subprocess.run(command, check=True)


def record_payload(image: Image, number: int = 0, labels: list[float] | None = None) -> bytes:
    """Return the payload of a record as MXNet's ``recordio.pack`` makes it."""
    if labels is None:
        return struct.pack("<IfQQ", 0, image.label, number, 0) + image.content
    packed = struct.pack(f"<{len(labels)}f", *labels)
    return struct.pack("<IfQQ", len(labels), 0.0, number, 0) + packed + image.content


def frame_recordio(payload: bytes) -> bytes:
    """Frame a record like ``dmlc::RecordIOWriter``, which examines the payload word by word."""
    out = b""
    begin = 0
    for at in range(0, len(payload) // 4 * 4, 4):
        if payload[at : at + 4] == MAGIC:
            flag = 1 if begin == 0 else 2
            out += MAGIC + struct.pack("<I", flag << 29 | at - begin) + payload[begin:at]
            begin = at + 4
    flag = 3 if begin else 0
    out += MAGIC + struct.pack("<I", flag << 29 | len(payload) - begin) + payload[begin:]
    return out + bytes(-len(out) % 4)


def write_recordio(path: Path, payloads: list[bytes], idx: bool = False) -> None:
    """Write a RecordIO shard with the index of MXNet's ``IndexedRecordIO``."""
    records = [frame_recordio(payload) for payload in payloads]
    path.write_bytes(b"".join(records))
    starts = np.cumsum([0, *map(len, records[:-1])])
    if idx:
        lines = [f"{key}\t{start}\n" for key, start in enumerate(starts)]
        path.with_suffix(".idx").write_text("".join(lines))


def write_shard(
    form: str, path: Path, images: list[Image], classes: tuple[str, ...] | None = None
) -> None:
    """Write images as a shard without the index of other tools."""
    if form == "webdataset":
        labels = [(f"{i.name.partition('.')[0]}.cls", b"%d" % i.label) for i in images]
        files = zip(((i.name, i.content) for i in images), labels, strict=True)
        write_tar(path, [file for pair in files for file in pair])
    elif form == "tfrecord":
        write_records(path, [example(image, classes) for image in images])
    else:
        payloads = [record_payload(image, number) for number, image in enumerate(images)]
        write_recordio(path, payloads)


def write_data_set(form: str, out: Path, source: Path, images_per_shard: int) -> None:
    """Write class folders as shards with an index, training images in random order."""
    if form == "webdataset":
        prepare_folder(out, source, Output(form, images_per_shard=images_per_shard))
        return
    for split in ("train", "val"):
        folder = out / split
        folder.mkdir(parents=True)
        images = images_of(source / split)
        order = np.arange(len(images))
        if split == "train":
            order = np.random.default_rng(0).permutation(order)
        for number, part in enumerate(np.array_split(order, -(-len(order) // images_per_shard))):
            path = folder / f"{split}-{number:05d}{SUFFIX[form]}"
            write_shard(form, path, [images[i] for i in part], CLASSES)
        index = index_shards(folder, classes=CLASSES)
        names = tuple(images[i].name for i in order)
        replace(index, names=names).save(folder / INDEX_FILE)


def read_with_dali(format: str, paths: list[Path], count: int) -> list[tuple[bytes, float]]:
    """Read encoded images and labels in order with DALI's reader."""
    from nvidia.dali import fn, pipeline_def, tfrecord

    files = [str(path) for path in paths]
    indices = [str(path.with_suffix(".idx")) for path in paths]

    @pipeline_def(batch_size=count, num_threads=1, device_id=None)
    def pipe():
        if format == "webdataset":
            types = ["jpg;jpeg;png;bmp;webp", "cls"]
            return tuple(fn.readers.webdataset(paths=files, index_paths=indices, ext=types))
        if format == "recordio":
            return tuple(fn.readers.mxnet(path=files, index_path=indices))
        features = {
            "image/encoded": tfrecord.FixedLenFeature((), tfrecord.string, ""),
            "image/class/label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
        }
        found = fn.readers.tfrecord(path=files, index_path=indices, features=features)
        return found["image/encoded"], found["image/class/label"]

    contents, labels = pipe().run()
    result = []
    for content, label in zip(map(np.array, contents), map(np.array, labels), strict=True):
        value = label.tobytes() if format == "webdataset" else label.reshape(-1)[0]
        result.append((content.tobytes(), float(value)))
    return result


def read_with_largebatch(source: Any, numbers: Any = None) -> list[tuple[bytes, float]]:
    """Read encoded images and labels of a source, by default all of them in order."""
    numbers = np.arange(len(source)) if numbers is None else np.asarray(numbers)
    contents = source.read(numbers)
    for content in contents:
        if isinstance(content, Exception):
            raise content
    labels = source.labels[numbers].tolist()
    return [(c.tobytes(), float(v)) for c, v in zip(contents, labels, strict=True)]
