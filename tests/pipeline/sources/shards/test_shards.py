"""Shards as a source of images: with and without an index, local and on a server."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from largebatch.pipeline import DataError, ImageFolder, Index, Loader, Shards, Transform
from largebatch.pipeline.sources import INDEX_FILE
from tests.conftest import refused
from tests.pipeline import formats
from tests.pipeline.formats import MAGIC, Image, read_with_largebatch
from tests.pipeline.web_server import WebServer

CLASSES = ("ant", "bee", "cat")
FORMATS = ("webdataset", "tfrecord", "recordio")
WEBDATASET = {"format": "webdataset"}


@pytest.fixture(scope="module")
def data(photos, tmp_path_factory):
    """The photos in shards of each format with an index, in ``root/format/split``."""
    root = tmp_path_factory.mktemp("data")
    for format in FORMATS:
        formats.write_data_set(format, root / format, photos, images_per_shard=20)
    return root


@pytest.fixture
def copy(data, tmp_path):
    """Shards of WebDataset that may be changed."""
    return shutil.copytree(data / "webdataset", tmp_path / "copy")


@pytest.mark.parametrize("format", FORMATS)
def test_images_are_those_of_folders_in_any_order(photos, data, format, tmp_path):
    folder = ImageFolder(photos)
    source = Shards(data / format, format=format)
    assert (len(source), source.kind, source.classes) == (53, format, CLASSES)
    in_order = np.argsort(source.index.names)
    numbers = np.random.default_rng(0).integers(0, 53, 100)
    assert read_with_largebatch(source, in_order[numbers]) == read_with_largebatch(folder, numbers)
    # The same images are found without the index.
    root = shutil.copytree(data / format, tmp_path / format)
    (root / "train" / INDEX_FILE).unlink()
    scanned = Shards(root, format=format, classes=CLASSES)
    assert read_with_largebatch(scanned) == read_with_largebatch(source)


@pytest.mark.parametrize("format", FORMATS)
def test_batches_are_those_of_folders(photos, data, format):
    def loader(source, **options):
        return Loader(source, Transform(image_size=32), batch_size=16, threads=1, **options)

    for ours, theirs in zip(
        loader(Shards(data / format, "val", format=format), training=False),
        loader(ImageFolder(photos, "val"), training=False),
        strict=True,
    ):
        assert all(map(torch.equal, ours, theirs))
    state = loader(ImageFolder(photos)).state_dict()
    ours = loader(Shards(data / format, format=format))
    refused(f"saved with source folder, now it is {format}: the or", ours.load_state_dict, state)


@pytest.mark.parametrize("format", FORMATS)
def test_images_on_a_server_are_those_of_the_local_folder(data, format):
    with WebServer(data) as server:
        there = Shards(f"{server.url}/{format}/", "val", format=format)
        here = Shards(data / format, "val", format=format)
        assert read_with_largebatch(there) == read_with_largebatch(here)
        assert there.fingerprint == here.fingerprint
        assert there.name(3) == here.name(3).replace(str(data), server.url)
        sizes = [request for request in server.requests if request[0] == "HEAD"]
        assert len(sizes) == len(here.index.shards)


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


def test_the_error_of_an_unreadable_image_has_its_name(copy):
    source = Shards(copy, **WEBDATASET)
    path = copy / "train" / "train-00002.tar"
    with path.open("r+b") as file:
        file.truncate(int(source.index.offset[-1]) + 5)
    found = source.read(np.array([0, 52]))
    assert not isinstance(found[0], DataError)
    assert re.match(f"{source.name(52)} cannot be read: .* bytes too short", str(found[1]))
    assert source.name(52) == f"{path}:{source.index.names[52]}"


# Refused before training


def test_missing_shards_are_named(tmp_path, data):
    message = r"no data folder .*nowhere/train; valid: a folder of webdataset shards"
    refused(message, Shards, tmp_path / "nowhere", **WEBDATASET)
    refused("unknown shard format 'tar'; valid: webdataset", Shards, tmp_path, format="tar")
    message = r"ftp://x/train cannot be read; valid: URLs that start with http://"
    refused(message, Shards, "ftp://x", **WEBDATASET)
    message = r"index\.npz is an index of webdataset shards, not tfrecord"
    refused(message, Shards, data / "webdataset", format="tfrecord")
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


# Shards of both splits in one folder, as in TensorFlow's ImageNet


def test_a_pattern_selects_shards_of_a_folder(tmp_path):
    for split, count in (("train", 2), ("validation", 1)):
        for i in range(count):
            images = [Image(f"x/{split}{i}{k}.jpg", b"abc", k) for k in range(3)]
            records = [formats.example(image, CLASSES, label_offset=1) for image in images]
            path = tmp_path / f"{split}-{i:05d}-of-{count:05d}"
            formats.write_records(path, records, idx=False)
    options = {"format": "tfrecord", "label_offset": 1}
    train = Shards(tmp_path, pattern="train-{00000..00001}-of-*", **options)
    assert train.classes == CLASSES
    assert train.labels.tolist() == [0, 1, 2] * 2
    assert train.name(3) == f"{tmp_path}/train-00001-of-00002:ant/train10.jpg"
    val = {"split": "val", "pattern": "validation-*", "classes": train.classes} | options
    assert len(Shards(tmp_path, **val)) == 3
    refused("set label_offset=1", Shards, tmp_path, **val | {"label_offset": 0})
