"""RecordIO shards: read as DALI reads them, including payloads with magic numbers."""

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline.sources.shards import recordio
from tests.conftest import refused
from tests.pipeline import formats
from tests.pipeline.formats import MAGIC, Image, frame_recordio, record_payload


def scan(path):
    return list(formats.scan_shard(recordio.scan, path))


def content_of(path, entry):
    content = path.read_bytes()[entry.offset : entry.offset + entry.length]
    if entry.split:
        return recordio.image_of_parts(content)
    return content


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


def part(flag):
    """A part of a record of four bytes, with a flag for its place."""
    return MAGIC + struct.pack("<I", flag << 29 | 4) + b"abcd"


def labelled(label):
    return frame_recordio(record_payload(Image("", b"abc", label), 4))


DAMAGED = {
    "nothing": (b"not RecordIO at all", "x.rec is damaged or not RecordIO: .* at byte 0"),
    "more": (labelled(1) + b"more of it", "starts at byte 36"),
    "last alone": (part(3), "byte 0 has parts out of order"),
    "unknown flag": (part(7), "byte 0 has parts out of order"),
    "first without last": (part(1) + part(0), "byte 0 has parts out of order"),
    "short": (part(0), "x.rec:record 0 is too short for an image of MXNet"),
    "nine labels": (
        *(frame_recordio(struct.pack("<IfQQ", 9, 0, 0, 0)), "too short for its 9 labels"),
    ),
    **{str(n): (labelled(n), f"id 4 has label {n}") for n in (1.5, np.nan, np.inf)},
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
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
