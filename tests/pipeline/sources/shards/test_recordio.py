"""RecordIO shards: read as DALI reads them, including payloads with magic numbers."""

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline import Shards
from largebatch.pipeline.sources.shards import recordio
from tests.conftest import refused
from tests.pipeline import formats
from tests.pipeline.formats import (
    MAGIC,
    Image,
    frame_recordio,
    read_with_largebatch,
    record_payload,
)


def scan(path):
    return list(formats.scan_shard(recordio.scan, path))


def content_of(path, entry):
    content = path.read_bytes()[entry.offset : entry.offset + entry.length]
    if entry.split:
        return recordio.image_of_parts(content)
    return content


@pytest.mark.parametrize("indexed", [True, False])
def test_images_and_labels_are_those_of_dali(photos, tmp_path, indexed):
    images = formats.images_of(photos / "train")
    (tmp_path / "train").mkdir()
    path = tmp_path / "train" / "train.rec"
    # Insert magic numbers at aligned and unaligned positions.
    for i in range(0, 20, 3):
        content = images[i].content
        content = content[: 40 + i] + MAGIC * (1 + i % 4) + content[40 + i :] + MAGIC * (i % 2)
        images[i] = images[i]._replace(content=content)
    payloads = [
        record_payload(image, 100 + i, [float(image.label), 7.0] if i % 5 == 4 else None)
        for i, image in enumerate(images)
    ]
    formats.write_recordio(path, payloads)
    theirs = formats.read_with_dali("recordio", [path], len(images))
    if not indexed:
        path.with_suffix(".idx").unlink()
    source = Shards(tmp_path, format="recordio")
    assert read_with_largebatch(source) == theirs == [(i.content, float(i.label)) for i in images]
    assert source.name(20) == f"{path}:record 20, id 120"
    assert source.classes == ("0", "1", "2")
    assert 0 < source.index.split.sum() < 7


_PIECES = st.lists(st.one_of(st.just(MAGIC), st.binary(max_size=9)), max_size=12).map(b"".join)


_SAMPLES = st.tuples(
    _PIECES,
    st.integers(0, 1000),
    st.just(0xCED7230A) | st.integers(0, 2**64 - 1),
    st.none() | st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=3),
)


@given(st.lists(_SAMPLES, min_size=1, max_size=6), st.booleans())
def test_the_image_and_label_of_any_record_are_read(tmp_path_factory, samples, indexed):
    """Records of labels alone are passed over; insightface's data sets start with one."""
    path = tmp_path_factory.mktemp("records") / "x.rec"
    payloads = [
        record_payload(Image("", content, label), number, labels)
        for content, label, number, labels in samples
    ]
    formats.write_recordio(path, payloads, indexed)
    expected = [
        (content, int(labels[0]) if labels else label)
        for content, label, _, labels in samples
        if content or not labels
    ]
    entries = scan(path)
    assert [(content_of(path, entry), entry.label) for entry in entries] == expected


def test_only_the_records_of_an_index_are_read(tmp_path):
    path = tmp_path / "train.rec"
    formats.write_recordio(path, [record_payload(Image("", b"abc", i), i) for i in range(4)])
    lines = path.with_suffix(".idx").read_text().splitlines(keepends=True)
    path.with_suffix(".idx").write_text(lines[3] + lines[1])
    assert [entry.label for entry in scan(path)] == [1, 3]


def test_a_truncated_shard_is_refused(tmp_path):
    path = tmp_path / "x.rec"
    payloads = [record_payload(Image("", b"abc", 2)), record_payload(Image("", MAGIC * 2, 1))]
    formats.write_recordio(path, payloads, idx=False)
    whole = path.read_bytes()
    first = len(frame_recordio(payloads[0]))
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        # The padding of the last record may be missing.
        if size not in (first - 1, first):
            refused(r"x\.rec is truncated: the record at byte", scan, path)
    path.write_bytes(whole[: first - 1])
    assert content_of(path, scan(path)[0]) == b"abc"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not RecordIO at all", r"x\.rec is damaged or not RecordIO: no record starts at byte 0"),
        (
            frame_recordio(record_payload(Image("", b"", 1))) + b"more of it",
            "starts at byte 32",
        ),
        (MAGIC + struct.pack("<I", 3 << 29 | 4) + b"abcd", "byte 0 has parts out of order"),
        (MAGIC + struct.pack("<I", 7 << 29 | 4) + b"abcd", "byte 0 has parts out of order"),
        (
            MAGIC + struct.pack("<I", 1 << 29 | 4) + b"abcd" + frame_recordio(b"abcd"),
            "byte 0 has parts out of order",
        ),
        (frame_recordio(b"abcd"), r"x\.rec:record 0 is too short for an image of MXNet"),
        (
            frame_recordio(struct.pack("<IfQQ", 9, 0, 0, 0) + b"abc"),
            "too short for its 9 labels",
        ),
        *(
            (
                frame_recordio(record_payload(Image("", b"abc", label), 4)),
                f"id 4 has label {label}",
            )
            for label in (1.5, np.nan, np.inf)
        ),
    ],
)
def test_a_damaged_record_is_named(tmp_path, content, message):
    path = tmp_path / "x.rec"
    path.write_bytes(content)
    refused(message, scan, path)


def test_the_index_of_another_shard_is_refused(tmp_path):
    path = tmp_path / "x.rec"
    formats.write_recordio(path, [record_payload(Image("", b"abc", 2))] * 3)
    idx = path.with_suffix(".idx")
    right = idx.read_text()
    for wrong, message in (
        (right + "3\t4000\n", "has a record at byte 4,000, but .*x.rec has none there"),
        ("0\t4\n", "has a record at byte 4, but"),
        ("", "is empty"),
        ("0 1 2\n", "is not an index of RecordIO"),
        ("0\tx\n", "is not an index of RecordIO"),
    ):
        idx.write_text(wrong)
        refused(rf"x\.idx {message}", scan, path)


@given(st.binary(max_size=40) | _PIECES.map(lambda c: frame_recordio(c + MAGIC * 3)))
def test_joining_parts_raises_only_value_errors(content):
    with contextlib.suppress(ValueError):
        image = recordio.image_of_parts(content)
        assert len(image) < len(content)
