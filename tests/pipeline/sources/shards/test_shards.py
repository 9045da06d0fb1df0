"""Shards as a source of images: with and without an index, local and on a server."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from largebatch.pipeline import (
    DataError,
    ImageFolder,
    Index,
    Loader,
    Retries,
    Shards,
    Transform,
    index_shards,
)
from tests.pipeline.formats import (
    MAGIC,
    Image,
    example,
    images_of,
    read_with_largebatch,
    record_payload,
    write_recordio,
    write_records,
    write_wds,
)
from tests.pipeline.web_server import WebServer, status

CLASSES = ("ant", "bee", "cat")
FORMATS = ("webdataset", "tfrecord", "recordio")


@pytest.fixture(autouse=True)
def _direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def data(photos, tmp_path_factory):
    """The photos in shards of each format with an index, in ``root/format/split``."""
    root = tmp_path_factory.mktemp("data")
    for format in FORMATS:
        for split in ("train", "val"):
            folder = root / format / split
            folder.mkdir(parents=True)
            images = images_of(photos / split)
            for i in range(2):
                some = images[:20] if i == 0 else images[20:]
                if format == "webdataset":
                    write_wds(folder / f"{i}.tar", some)
                elif format == "tfrecord":
                    write_records(folder / f"{i}.tfrecord", [example(x, CLASSES) for x in some])
                else:
                    payloads = [record_payload(x, k) for k, x in enumerate(some)]
                    write_recordio(folder / f"{i}.rec", payloads)
            index_shards(folder, classes=CLASSES).save(folder / "index.npz")
    return root


def copy_of(data, tmp_path, format="webdataset"):
    root = tmp_path / format
    shutil.copytree(data / format, root)
    return root


@pytest.mark.parametrize("format", FORMATS)
def test_images_are_those_of_folders_in_any_order(photos, data, format, tmp_path):
    folder = ImageFolder(photos)
    source = Shards(data / format, format=format)
    numbers = np.random.default_rng(0).integers(0, 53, 100)
    assert read_with_largebatch(source, numbers) == read_with_largebatch(folder, numbers)
    assert len(source) == 53
    assert source.kind == format
    assert source.classes == CLASSES
    # The same images are found without the index.
    root = copy_of(data, tmp_path, format)
    (root / "train" / "index.npz").unlink()
    scanned = Shards(root, format=format, classes=CLASSES)
    assert scanned.fingerprint == source.fingerprint
    assert read_with_largebatch(scanned, numbers) == read_with_largebatch(source, numbers)


@pytest.mark.parametrize("format", FORMATS)
def test_batches_of_shards_are_those_of_folders(photos, data, format):
    def batches(source):
        loader = Loader(
            source, Transform(image_size=32), batch_size=16, epochs=2, backend="dali-cpu", threads=1
        )
        return [(b.images.clone(), b.labels.clone()) for b in loader]

    pairs = zip(
        batches(Shards(data / format, format=format)), batches(ImageFolder(photos)), strict=True
    )
    for (images, labels), (expected, expected_labels) in pairs:
        assert torch.equal(images, expected)
        assert torch.equal(labels, expected_labels)


@pytest.mark.parametrize("format", FORMATS)
def test_images_on_a_server_are_those_of_the_local_folder(data, format):
    with WebServer(data) as server:
        there = Shards(f"{server.url}/{format}/", "val", format=format)
        here = Shards(data / format, "val", format=format)
        assert read_with_largebatch(there) == read_with_largebatch(here)
        assert there.fingerprint == here.fingerprint
        assert there.name(3) == here.name(3).replace(str(data), server.url)
        sizes = [request for request in server.requests if request[0] == "HEAD"]
        assert len(sizes) == 2


def test_records_in_parts_are_read_from_a_server(tmp_path):
    (tmp_path / "train").mkdir()
    contents = [MAGIC + b"abcd" * n + MAGIC for n in range(5)]
    payloads = [record_payload(Image("", content, 0)) for content in contents]
    write_recordio(tmp_path / "train" / "x.rec", payloads)
    index = index_shards(tmp_path / "train")
    assert index.split.all()
    index.save(tmp_path / "train" / "index.npz")
    with WebServer(tmp_path) as server:
        source = Shards(server.url, format="recordio")
        assert read_with_largebatch(source) == [(content, 0.0) for content in contents]


def test_a_damaged_record_in_parts_is_an_error_of_one_image(tmp_path):
    (tmp_path / "train").mkdir()
    path = tmp_path / "train" / "x.rec"
    contents = [MAGIC + b"abcd" * n + MAGIC for n in range(3)]
    write_recordio(path, [record_payload(Image("", content, 0), 7) for content in contents])
    source = Shards(tmp_path, format="recordio")
    record = bytearray(path.read_bytes())
    record[source.index.offset[1]] ^= 1
    path.write_bytes(record)
    found = source.read(np.arange(3))
    assert [isinstance(content, DataError) for content in found] == [False, True, False]
    assert str(found[1]) == f"{source.name(1)} cannot be read: its record is damaged"


def test_the_error_of_an_unreadable_image_has_its_name(data, tmp_path):
    root = copy_of(data, tmp_path)
    source = Shards(root, format="webdataset")
    path = root / "train" / "1.tar"
    with path.open("r+b") as file:
        file.truncate(int(source.index.offset[-1]) + 5)
    found = source.read(np.array([0, 52]))
    assert not isinstance(found[0], DataError)
    assert str(found[1]).startswith(f"{source.name(52)} cannot be read: it is ")
    assert source.name(52) == f"{path}:cat/016.jpeg"


# Refused before training


def test_missing_shards_are_named(tmp_path, data):
    with pytest.raises(
        DataError, match=r"no data folder .*nowhere/train; valid: a folder of webdataset shards"
    ):
        Shards(tmp_path / "nowhere", format="webdataset")
    with pytest.raises(DataError, match=r"unknown shard format 'tar'; valid: webdataset"):
        Shards(tmp_path, format="tar")
    with pytest.raises(
        DataError, match=r"ftp://x/train cannot be read; valid: URLs that start with http://"
    ):
        Shards("ftp://x", format="webdataset")
    with pytest.raises(
        DataError, match=r"index\.npz is an index of webdataset shards, not tfrecord"
    ):
        Shards(data / "webdataset", format="tfrecord")
    with WebServer(tmp_path) as server:
        with pytest.raises(
            DataError, match=rf"no index {server.url}/train/index.npz: .* largebatch data index"
        ):
            Shards(server.url, format="webdataset")
        with pytest.raises(DataError, match=r"no index .* largebatch data index FOLDER"):
            Shards(server.url, format="webdataset", pattern="train-{00..10}.tar")


def test_shards_that_disagree_with_the_index_are_named(data, tmp_path):
    root = copy_of(data, tmp_path)
    last = root / "train" / "1.tar"
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    size = f"{len(whole) - 1:,} bytes, but {len(whole):,} in .*index.npz"
    with pytest.raises(DataError, match=rf"train/1\.tar has {size}"):
        Shards(root, format="webdataset")
    with (
        WebServer(root) as server,
        pytest.raises(DataError, match=rf"{server.url}/train/1\.tar has {size}"),
    ):
        Shards(server.url, format="webdataset")
    last.unlink()
    message = r"train/1\.tar is missing \(1 of 2 shards of .*train/index\.npz are\): "
    with pytest.raises(DataError, match=message):
        Shards(root, format="webdataset")
    (root / "train" / "0.tar").unlink()
    message = r"train/0\.tar is missing \(2 of 2 shards of .*train/index\.npz are\): "
    with WebServer(root) as server, pytest.raises(DataError, match=message):
        Shards(server.url, format="webdataset")


def test_a_damaged_index_is_named(data, tmp_path):
    root = copy_of(data, tmp_path)
    (root / "train" / "index.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"train/index\.npz is not an index of shards"):
        Shards(root, format="webdataset")


def test_a_server_that_does_not_answer_is_named(tmp_path):
    retries = Retries(attempts=2, wait_seconds=0.001)
    with WebServer(tmp_path) as server:
        server.fault = status(503)
        with pytest.raises(
            DataError,
            match=rf"{server.url}/train/index\.npz cannot be read: HTTP status 503 .*tried 2 times",
        ):
            Shards(server.url, format="webdataset", retries=retries)


# Classes


def _reindex(root, split, **changes):
    path = root / split / "index.npz"
    replace(Index.load(path.read_bytes(), ""), **changes).save(path)


def test_validation_has_the_class_numbers_of_training(data, tmp_path):
    root = copy_of(data, tmp_path)
    _reindex(root, "val", classes=("cat", "ant", "bee"))
    labels = Shards(data / "webdataset", "val", format="webdataset").labels
    source = Shards(root, "val", format="webdataset", classes=CLASSES)
    assert source.classes == CLASSES
    assert source.labels.tolist() == [[2, 0, 1][label] for label in labels]
    with pytest.raises(
        DataError, match=r"class cat of .*val/index\.npz is not a class of the training images \(2 "
    ):
        Shards(root, "val", format="webdataset", classes=("ant", "bee"))


def test_shards_without_class_names_keep_their_numbers(data, tmp_path):
    root = copy_of(data, tmp_path)
    _reindex(root, "val", classes=("0", "1", "2"))
    source = Shards(root, "val", format="webdataset", classes=CLASSES)
    assert source.classes == CLASSES
    assert source.labels.tolist() == Shards(root, "val", format="webdataset").labels.tolist()
    with pytest.raises(DataError, match=r"index\.npz has 3 classes, but training has 2"):
        Shards(root, "val", format="webdataset", classes=("ant", "bee"))


# Shards of both splits in one folder, as in TensorFlow's ImageNet


def test_a_pattern_selects_shards_of_a_folder(tmp_path):
    for split, count in (("train", 2), ("validation", 1)):
        for i in range(count):
            images = [Image(f"x/{split}{i}{k}.jpg", b"abc", k) for k in range(3)]
            records = [example(image, CLASSES, label_offset=1) for image in images]
            write_records(tmp_path / f"{split}-{i:05d}-of-{count:05d}", records, idx=False)
    train = Shards(tmp_path, format="tfrecord", pattern="train-{00000..00001}-of-*", label_offset=1)
    assert train.classes == CLASSES
    assert train.labels.tolist() == [0, 1, 2] * 2
    assert train.name(3) == f"{tmp_path}/train-00001-of-00002:ant/train10.jpg"
    val = Shards(
        tmp_path,
        "val",
        format="tfrecord",
        pattern="validation-*",
        classes=train.classes,
        label_offset=1,
    )
    assert len(val) == 3
    with pytest.raises(DataError, match="set label_offset=1"):
        Shards(tmp_path, "val", format="tfrecord", pattern="validation-*", classes=train.classes)
