"""TFRecord shards: read as DALI reads them, and damage is named."""

import gzip
import struct

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.pipeline import index_shards
from largebatch.pipeline.sources.shards import tfrecord
from tests.conftest import refused
from tests.pipeline import formats
from tests.pipeline.formats import CLASSES, Image, example, field, write_records

GOOD = example(Image("a/b.jpg", b"abcdef", 2))


def scan(path, **how):
    return list(formats.scan_shard(tfrecord.scan, path, **how))


_FEATURES = st.dictionaries(
    st.text(max_size=20).filter(lambda key: not key.startswith("image/")),
    st.one_of(
        st.lists(st.binary(max_size=200), min_size=1, max_size=3),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
        st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
    ),
    max_size=4,
)
_SAMPLES = st.tuples(_FEATURES, st.binary(max_size=9000), st.integers(0, 2**40))


@settings(max_examples=40)
@given(st.lists(_SAMPLES, min_size=1, max_size=5))
def test_the_image_and_label_of_any_example_are_read(tmp_path_factory, samples):
    path = tmp_path_factory.mktemp("records") / "x.tfrecord"
    records = [
        formats.encode_example({**more, "image/encoded": [content], "image/class/label": [label]})
        for more, content, label in samples
    ]
    write_records(path, records, idx=False)
    entries = scan(path, verify=True)
    whole = path.read_bytes()
    assert [whole[e.offset : e.offset + e.length] for e in entries] == [c for _, c, _ in samples]
    assert [entry.label for entry in entries] == [label for *_, label in samples]
    assert [entry.name for entry in entries] == [f"record {i}" for i in range(len(samples))]


def test_unpacked_labels_and_unknown_fields_are_read(tmp_path):
    label = field(1, field(1, b"image/class/label") + field(2, field(3, b"\x08\x05")))
    image = field(1, field(2, field(1, field(1, b"abc"))) + field(1, b"image/encoded"))
    unknown = b"\x78\x96\x01" + b"\x7d1234" + b"\x7912345678"  # a varint, 4 bytes, 8 bytes
    path = tmp_path / "x.tfrecord"
    # Protocol buffers merge a message field that occurs twice.
    write_records(path, [unknown + field(1, label) + field(1, unknown + image)])
    (entry,) = scan(path)
    assert entry.label == 5
    assert path.read_bytes()[entry.offset : entry.offset + entry.length] == b"abc"


def test_checksums_without_google_crc32c_are_the_same(monkeypatch):
    for content in (b"", b"123456789", bytes(range(256))):
        assert tfrecord._slow_crc32c(content) == google_crc32c.value(content)
    assert tfrecord._slow_crc32c(b"123456789") == 0xE3069283  # RFC 3720's test vector


CHANGES = {
    "has no image/encoded": {"image/encoded": None},
    "has no image/class/label": {"image/class/label": None},
    "has 2 values of image/encoded; valid: one": {"image/encoded": [b"one", b"two"]},
    "has several values of image/class/label; valid: one": {"image/class/label": [2, 2]},
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_record_without_one_image_and_one_label_is_named(tmp_path, message):
    path = tmp_path / "x.tfrecord"
    features = formats.features_of(Image("a/b.jpg", b"abcdef", 2)) | CHANGES[message]
    record = formats.encode_example({name: values for name, values in features.items() if values})
    write_records(path, [GOOD, record])
    refused(rf"x\.tfrecord:record 1 {message}", scan, path)


@pytest.mark.parametrize(
    "message", [b"\x0a\x05abc", b"\x0b", b"\xff" * 11, b"\x0a\xff", b"\x09abc"]
)
def test_a_damaged_message_is_named(tmp_path, message):
    write_records(tmp_path / "x.tfrecord", [message])
    refused(r"x\.tfrecord:record 0 is damaged: ", scan, tmp_path / "x.tfrecord")


def test_a_file_that_is_no_whole_shard_is_refused(tmp_path):
    path = tmp_path / "x.tfrecord"
    write_records(path, [GOOD, example(Image("a/c.jpg", b"", 1))])
    whole = path.read_bytes()
    first = int(path.with_suffix(".idx").read_text().split()[1])
    path.with_suffix(".idx").unlink()
    length = struct.pack("<Q", 1 << 63)
    crc = google_crc32c.value(length)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    huge = length + struct.pack("<I", masked) + bytes(100)
    for content in (*(whole[:size] for size in {*range(1, len(whole))} - {first}), huge):
        path.write_bytes(content)
        refused(r"x\.tfrecord is truncated: the record at byte", scan, path)
    for content in (gzip.compress(whole), b"\x01" + whole[1:], whole + b"more after it"):
        path.write_bytes(content)
        refused(r"x\.tfrecord is damaged or not TFRecord", scan, path)


def test_a_changed_byte_is_found_with_verify(tmp_path):
    path = tmp_path / "x.tfrecord"
    write_records(path, [GOOD, GOOD])
    content = bytearray(path.read_bytes())
    content[content.rindex(b"abcdef")] ^= 1
    path.write_bytes(content)
    assert len(scan(path)) == 2
    message = r"x\.tfrecord:record 1 is damaged: its checksum"
    refused(message, scan, path, verify=True)
    refused(message, index_shards, tmp_path, checksums=True)


def test_labels_that_start_from_one(tmp_path):
    images = [Image(f"x/{i}.jpg", b"abc", i) for i in range(3)]
    path = tmp_path / "train-00000-of-00001"
    write_records(path, [example(image, CLASSES, label_offset=1) for image in images])
    index = index_shards(tmp_path, label_offset=1)
    assert index.labels.tolist() == [0, 1, 2]
    assert index.classes == CLASSES
    refused(r"labels run from 1 to 3 .* set label_offset=1", index_shards, tmp_path)
    message = r"2\.jpg has label 3, but there are 3 .*label_offset=1"
    refused(message, index_shards, tmp_path, classes=CLASSES)
    message = r"0\.jpg has label 1, less than the label_offset of 2"
    refused(message, index_shards, tmp_path, label_offset=2)
    assert index_shards(tmp_path, classes=("none", *CLASSES)).labels.tolist() == [1, 2, 3]
    message = "label 1 and class ant, but that label is class bee"
    refused(message, index_shards, tmp_path, classes=(*CLASSES, "dog"))


def test_a_label_with_two_class_names_is_refused(tmp_path):
    image = Image("x/0.jpg", b"abc", 0)
    records = [example(image, ("ant",)), example(image, ("bee",))]
    write_records(tmp_path / "x.tfrecord", records)
    refused(r"label 0 and class bee, but others .* class ant", index_shards, tmp_path)
