"""Shards that were written again after their index: every label is right, or they are refused."""

import os
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example as case
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.pipeline import DataError, Shards, check_data, index_shards
from tests.conftest import refused
from tests.pipeline import formats
from tests.pipeline.formats import MAGIC, SHARDS, SUFFIX, Image
from tests.pipeline.web_server import WebServer


def write(folder, form, shards, label_first=True, time=2000):
    """Write lists of (name, content, label) as shards, in fresh files with a time in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, samples in enumerate(shards):
        path = folder / f"{number}{SUFFIX[form]}"
        path.unlink(missing_ok=True)
        images = [Image(f"{name}.jpg", content, label) for name, content, label in samples]
        if form == "webdataset" and label_first:
            pairs = [(f"{name}.cls", b"%d" % label) for name, _, label in samples]
            files = zip(pairs, ((i.name, i.content) for i in images), strict=True)
            formats.write_tar(path, [file for pair in files for file in pair])
        else:
            formats.write_shard(form, path, images)
        os.utime(path, (time, time))


_CONTENT = st.binary(min_size=1, max_size=40) | st.just(MAGIC * 3)
_SAMPLES = st.lists(st.tuples(_CONTENT, st.integers(0, 4)), min_size=1, max_size=20)


@st.composite
def rewritten(draw):
    """Shards, and the same after a change of one: other samples, labels, contents or order."""
    shards = [
        [(f"{number}_{i}", *sample) for i, sample in enumerate(samples)]
        for number, samples in enumerate(draw(st.lists(_SAMPLES, min_size=1, max_size=3)))
    ]
    which = draw(st.integers(0, len(shards) - 1))
    names, contents, labels = zip(*shards[which], strict=True)
    change = draw(st.sampled_from(["permute", "contents", "label", "append"]))
    if change == "contents":  # names and labels stay where they are
        contents = draw(st.permutations(contents))
    elif change == "label":
        labels = (draw(st.integers(0, 4)), *labels[1:])
    elif change == "append":
        names, contents, labels = (*names, "new"), (*contents, draw(_CONTENT)), (*labels, 0)
    samples = [*zip(names, contents, labels, strict=True)]
    if change in ("permute", "label"):
        samples = draw(st.permutations(samples))
    return shards, [*shards[:which], samples, *shards[which + 1 :]]


def pairs_of(shards):
    return Counter((content, label) for samples in shards for _, content, label in samples)


@pytest.mark.parametrize("form", SHARDS)
@settings(max_examples=40)
@given(rewritten(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 2000, 2**31]))
@case(
    ([[("a", b"A", 0), ("b", b"B", 1)]], [[("b", b"B", 1), ("a", b"A", 0)]]), True, False, False, 1
)
def test_every_label_is_right_or_the_shards_are_refused(
    tmp_path_factory, form, change, times, checksums, label_first, time
):
    before, after = change
    root = tmp_path_factory.mktemp("stale")
    folder = root / "train"
    write(folder, form, before, label_first, time=1000)
    classes = tuple("abcde")
    index = index_shards(folder, classes=classes, checksums=checksums)
    (index if times else replace(index, shard_times=None)).save(folder / "index.npz")
    write(folder, form, after, label_first, time)  # perhaps an older one in the place of a newer
    try:
        source = Shards(root, format=form)
    except DataError:
        assert before != after
        return
    found = source.read(np.arange(len(source)))
    if any(isinstance(content, DataError) for content in found):
        assert before != after
        return
    contents = [content.tobytes() for content in found]
    assert Counter(zip(contents, source.labels.tolist(), strict=True)) == pairs_of(after)


@pytest.fixture
def data(tmp_path):
    samples = [(f"k{i:03d}", bytes([i]) * 60, i % 10) for i in range(200)]
    write(tmp_path / "train", "webdataset", [samples], time=1000)
    index_shards(tmp_path / "train").save(tmp_path / "train" / "index.npz")
    return tmp_path, samples


def test_a_stale_index_is_named_in_training_and_by_data_check(data):
    root, samples = data
    assert not any("was made of" in fault.what for fault in check_data(root).corrupt)
    relabelled = [
        (name, content, 3) if i == 77 else (name, content, label)
        for i, (name, content, label) in enumerate(samples)
    ]
    write(root / "train", "webdataset", [relabelled])
    # One label of 200 may be missed by samples, but not by data check.
    (fault,) = [f for f in check_data(root).corrupt if "was made of" in f.what]
    assert fault.name == str(root / "train" / "0.tar")
    assert "k077.jpg has label 3, not 7" in fault.what
    write(root / "train", "webdataset", [samples[::-1]])
    message = r"train/0\.tar is not the shard that .*train/index\.npz was made of: k000.*k199"
    with WebServer(root) as server:
        for place in (root, server.url):
            refused(message, Shards, place, format="webdataset")


def test_other_bytes_of_the_same_size_are_no_images(data):
    root, samples = data
    index_shards(root / "train", checksums=True).save(root / "train" / "index.npz")

    def page(handler, content):
        """Send a page of the right size, as if it were the range."""
        first, last = map(int, re.findall(r"\d+", handler.headers["Range"]))
        size = last + 1 - first
        handler.answer(206, b"<html>".ljust(size), f"bytes {first}-{last}/{len(content)}")

    with WebServer(root) as server:
        remote = Shards(server.url, format="webdataset")
        assert not any(isinstance(found, DataError) for found in remote.read(np.arange(40)))
        server.fault = page
        found = remote.read(np.arange(40))
    local = Shards(root, format="webdataset")
    write(root / "train", "webdataset", [samples[::-1]])  # while it is open
    found += local.read(np.arange(40))
    assert len(found) == 80
    for error in found:
        assert isinstance(error, DataError)
        assert re.search(r"0\.tar:k0\d\d\.jpg cannot be read: its bytes are not those", str(error))


def test_an_index_of_labels_with_an_offset_is_verified(tmp_path):
    write(tmp_path / "train", "tfrecord", [[("a", b"A", 1), ("b", b"B", 2)]])
    index = index_shards(tmp_path / "train", label_offset=1)
    assert index.labels.tolist() == [0, 1]
    index.save(tmp_path / "train" / "index.npz")
    os.utime(tmp_path / "train" / "0.tfrecord", (1, 1))
    assert Shards(tmp_path, format="tfrecord").labels.tolist() == [0, 1]
