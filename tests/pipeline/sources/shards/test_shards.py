"""Shards as a source of images: with and without an index, local and on a server."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from largebatch.pipeline import DataError, ImageFolder, Index, Shards
from largebatch.pipeline.sources import INDEX_FILE
from tests.conftest import refused
from tests.pipeline import formats
from tests.pipeline.formats import CLASSES, MAGIC, SHARDS, Image, read_with_largebatch
from tests.pipeline.web_server import WebServer

WEBDATASET = {"format": "webdataset"}


@pytest.fixture
def copy(stored, tmp_path):
    """Shards of WebDataset that may be changed."""
    return shutil.copytree(stored / "webdataset", tmp_path / "copy")


@pytest.mark.parametrize("format", SHARDS)
def test_images_are_those_of_folders_in_any_order_and_of_a_server(photos, stored, format, tmp_path):
    folder = ImageFolder(photos)
    source = Shards(stored / format, format=format)
    assert (len(source), source.kind, source.classes) == (53, format, CLASSES)
    in_order = np.argsort(source.index.names)
    numbers = np.random.default_rng(0).integers(0, 53, 100)
    assert read_with_largebatch(source, in_order[numbers]) == read_with_largebatch(folder, numbers)
    # The same images are found without the index.
    root = shutil.copytree(stored / format, tmp_path / format)
    (root / "train" / INDEX_FILE).unlink()
    scanned = Shards(root, format=format, classes=CLASSES)
    assert read_with_largebatch(scanned) == read_with_largebatch(source)
    with WebServer(stored) as server:
        there = Shards(f"{server.url}/{format}/", format=format)
        assert read_with_largebatch(there) == read_with_largebatch(source)
        assert there.fingerprint == source.fingerprint
        assert there.name(3) == source.name(3).replace(str(stored), server.url)
        sizes = [request for request in server.requests if request[0] == "HEAD"]
        assert len(sizes) == len(source.index.shards) == 3


@pytest.mark.parametrize("format", SHARDS)
def test_images_and_labels_are_those_of_dali(photos, tmp_path, format):
    """DALI reads the shards with the index of its own scripts, which is not needed here."""
    images = formats.images_of(photos / "train")
    for i in range(0, 20, 3):  # RecordIO's magic number at aligned and unaligned positions
        head, tail = images[i].content[: 40 + i], images[i].content[40 + i :]
        content = head + MAGIC * (1 + i % 4) + tail + MAGIC * (i % 2)
        images[i] = images[i]._replace(content=content)
    (tmp_path / "train").mkdir()
    paths = []
    # DALI's reader of RecordIO takes one shard.
    parts = [images] if format == "recordio" else [images[:20], images[20:40], images[40:]]
    for number, part in enumerate(parts):
        paths.append(tmp_path / "train" / f"part-{number}{formats.SUFFIX[format]}")
        if format == "webdataset":
            formats.write_wds(paths[-1], part)
        elif format == "tfrecord":
            formats.write_records(paths[-1], [formats.example(i, CLASSES) for i in part], idx=True)
        else:
            labels = ([float(image.label), 7.0] if image.label else None for image in part)
            records = [formats.record_payload(i, 9, k) for i, k in zip(part, labels, strict=True)]
            formats.write_recordio(paths[-1], records, idx=True)
    theirs = formats.read_with_dali(format, paths, len(images))
    assert theirs == [(image.content, float(image.label)) for image in images]
    source = Shards(tmp_path, format=format)
    assert read_with_largebatch(source) == theirs
    name = {"webdataset": images[20].name.lower(), "tfrecord": images[20].name}
    shard = paths[0 if format == "recordio" else 1]
    assert source.name(20) == f"{shard}:{name.get(format, 'record 20, id 9')}"
    assert source.classes == (CLASSES if format == "tfrecord" else ("0", "1", "2"))
    assert source.index.split.any() == (format == "recordio")


def test_records_in_parts_are_read_and_a_damaged_one_is_an_error_of_one_image(tmp_path):
    (tmp_path / "train").mkdir()
    path = tmp_path / "train" / "x.rec"
    contents = [MAGIC + b"abcd" * n + MAGIC for n in range(5)]
    payloads = [formats.record_payload(Image("", content, 0)) for content in contents]
    formats.write_recordio(path, payloads)
    source = Shards(tmp_path, format="recordio")
    assert source.index.split.all()
    source.index.save(path.with_name(INDEX_FILE))
    with WebServer(tmp_path) as server:
        for images in (source, Shards(server.url, format="recordio")):
            assert read_with_largebatch(images) == [(content, 0.0) for content in contents]
    record = bytearray(path.read_bytes())
    record[source.index.offset[1]] ^= 1
    path.write_bytes(record)
    found = source.read(np.arange(3))
    assert [isinstance(content, DataError) for content in found] == [False, True, False]
    assert str(found[1]) == f"{source.name(1)} cannot be read: its record is damaged"


# Refused before training


def test_missing_shards_are_named(tmp_path, stored):
    message = r"no data folder .*nowhere/train; valid: a folder of webdataset shards"
    refused(message, Shards, tmp_path / "nowhere", **WEBDATASET)
    refused("unknown shard format 'tar'; valid: webdataset", Shards, tmp_path, format="tar")
    message = r"ftp://x/train cannot be read; valid: URLs that start with http://"
    refused(message, Shards, "ftp://x", **WEBDATASET)
    message = r"index\.npz is an index of webdataset shards, not tfrecord"
    refused(message, Shards, stored / "webdataset", format="tfrecord")
    with WebServer(tmp_path) as server:
        message = rf"no index {server.url}(/train)?/index.npz: .* largebatch data index FOLDER"
        for pattern in (None, "train-{00..10}.tar"):
            refused(message, Shards, server.url, pattern=pattern, **WEBDATASET)


def test_shards_that_disagree_with_the_index_are_named(copy):
    last = copy / "train" / "train-00002.tar"
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    size = f"{len(whole) - 1:,} bytes, but {len(whole):,} in .*index.npz"
    with WebServer(copy) as server:
        for root in (copy, server.url):
            refused(rf"{root}/train/train-00002\.tar has {size}", Shards, root, **WEBDATASET)
        for number, lost in ((2, 1), (1, 2)):
            (copy / "train" / f"train-0000{number}.tar").unlink()
            what = rf"{number}\.tar is missing \({lost} of 3 shards of .*train/index\.npz are\): "
            for root in (copy, server.url):
                refused(what, Shards, root, **WEBDATASET)


# Classes


def test_validation_has_the_class_numbers_of_training(copy):
    path = copy / "val" / INDEX_FILE
    index = Index.load(path.read_bytes(), "")

    def val(classes):
        return Shards(copy, "val", classes=classes, **WEBDATASET)

    replace(index, classes=("cat", "ant", "bee")).save(path)
    assert val(CLASSES).classes == CLASSES
    assert val(CLASSES).labels.tolist() == [[2, 0, 1][label] for label in index.labels]
    message = r"class cat of .*val/index\.npz is not a class of the training images \(2 "
    refused(message, val, ("ant", "bee"))
    # Shards without class names keep their numbers.
    replace(index, classes=("0", "1", "2")).save(path)
    assert val(CLASSES).classes == CLASSES
    assert val(CLASSES).labels.tolist() == index.labels.tolist()
    refused(r"index\.npz has 3 classes, but training has 2", val, ("ant", "bee"))
