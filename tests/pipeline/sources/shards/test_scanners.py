"""Scanners of WebDataset, TFRecord and RecordIO: any valid shard is read, and faults are named."""

import gzip
import io
import json
import struct
import tarfile

import google_crc32c
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from largebatch.pipeline import index_shards
from largebatch.pipeline.sources.shards import recordio, tfrecord
from largebatch.pipeline.sources.shards.indexing import SCANNERS
from tests.conftest import refused
from tests.pipeline import formats
from tests.pipeline.formats import (
    CLASSES,
    MAGIC,
    SHARDS,
    SUFFIX,
    Image,
    encode_example,
    frame_recordio,
    record_payload,
    write_recordio,
    write_records,
    write_tar,
)

FORMS = {suffix: form for form, suffix in SUFFIX.items()}


def scan(path, **how):
    return list(formats.scan_shard(SCANNERS[FORMS[path.suffix]], path, **how))


def contents(path, entries):
    whole = path.read_bytes()
    parts = [whole[e.offset : e.offset + e.length] for e in entries]
    pairs = zip(parts, entries, strict=True)
    return [recordio.image_of_parts(part) if e.split else part for part, e in pairs]


# Any valid shard

_KEYS = st.text(st.sampled_from("ab. /é"), min_size=1, max_size=120)
_LONG = "a.b/" + "/".join(["long" * 15] * 3)


@given(
    st.lists(
        st.tuples(_KEYS, st.binary(max_size=1500), st.integers(0, 2000)), min_size=1, max_size=6
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]),
)
@example([(f"{_LONG}/{key}", b"x" * 700, 3) for key in ("1", "2 two", "é")], tarfile.USTAR_FORMAT)
def test_the_images_of_any_tar_are_read(tmp_path_factory, samples, form):
    path = tmp_path_factory.mktemp("tars") / "x.tar"
    # A leading number makes sample keys unique; a dot ends the key.
    files = []
    for i, (key, content, label) in enumerate(samples):
        folder, slash, name = f"./{i}{key.replace('/', '/x')}".rpartition("/")
        stem = f"{folder}{slash}{name.partition('.')[0]}"
        files += [(f"{stem}.JPEG", content), (f"{stem}.cls", str(label).encode())]
    try:
        write_tar(path, files, form)
    except ValueError:  # USTAR holds no long names without slashes
        assume(False)
    entries = scan(path)
    assert contents(path, entries) == [content for _, content, _ in samples]
    assert [entry.label for entry in entries] == [label for *_, label in samples]
    assert [entry.name for entry in entries] == [name for name, _ in files[::2]]


def test_labels_in_json_and_other_files_of_a_tar_are_handled(tmp_path):
    path = tmp_path / "x.tar"
    files = [
        ("__meta__", b"of the package, not a sample"),
        ("a.jpg", b"A"),
        ("a.seg.png", b"not the image"),
        ("a.json", json.dumps({"label": 7}).encode()),
        ("b.cls", b" 3\n"),
        (".hidden.jpg", b"no sample"),
        ("without", b"no sample"),
        ("b.json", b'{"label": 9}'),
        ("b.PNG", b"B"),
    ]
    entries = scan(write_tar(path, files))
    assert [(e.name, e.label) for e in entries] == [("a.jpg", 7), ("b.PNG", 3)]
    assert contents(path, entries) == [b"A", b"B"]


_FEATURES = st.dictionaries(
    st.text(max_size=20).filter(lambda key: not key.startswith("image/")),
    st.one_of(
        st.lists(st.binary(max_size=200), min_size=1, max_size=3),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
        st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
    ),
    max_size=4,
)
_EXAMPLES = st.tuples(_FEATURES, st.binary(max_size=9000), st.integers(0, 2**40))


@settings(max_examples=40)
@given(st.lists(_EXAMPLES, min_size=1, max_size=5))
def test_the_image_and_label_of_any_example_are_read(tmp_path_factory, samples):
    path = tmp_path_factory.mktemp("records") / "x.tfrecord"
    records = [
        encode_example({**more, "image/encoded": [content], "image/class/label": [label]})
        for more, content, label in samples
    ]
    write_records(path, records)
    entries = scan(path, verify=True)
    assert contents(path, entries) == [content for _, content, _ in samples]
    assert [entry.label for entry in entries] == [label for *_, label in samples]
    assert [entry.name for entry in entries] == [f"record {i}" for i in range(len(samples))]


_PIECES = st.lists(st.one_of(st.just(MAGIC), st.binary(max_size=9)), max_size=12).map(b"".join)
_RECORDS = st.tuples(
    _PIECES,
    st.integers(0, 1000),
    st.just(0xCED7230A) | st.integers(0, 2**64 - 1),
    st.none() | st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=3),
)


@given(st.lists(_RECORDS, min_size=1, max_size=6))
def test_the_image_and_label_of_any_record_are_read(tmp_path_factory, samples):
    """Records of labels alone are passed over; insightface's data sets start with one."""
    path = tmp_path_factory.mktemp("records") / "x.rec"
    payloads = [
        record_payload(Image("", content, label), number, labels)
        for content, label, number, labels in samples
    ]
    write_recordio(path, payloads)
    expected = [
        (content, int(labels[0]) if labels else label)
        for content, label, _, labels in samples
        if content or not labels
    ]
    entries = scan(path)
    assert [*zip(contents(path, entries), [e.label for e in entries], strict=True)] == expected


def test_checksums_without_google_crc32c_are_the_same():
    for content in (b"", b"123456789", bytes(range(256))):
        assert tfrecord._slow_crc32c(content) == google_crc32c.value(content)
    assert tfrecord._slow_crc32c(b"123456789") == 0xE3069283  # RFC 3720's test vector


# Faults of a sample


def with_features(**changes):
    """A record with other features, by their last names; those that are None are left out."""
    named = {"encoded": "image/encoded", "label": "image/class/label"}
    features = formats.features_of(GOOD_IMAGE) | {named[k]: v for k, v in changes.items()}
    return encode_example({name: values for name, values in features.items() if values})


def part(flag):
    """A part of a record of four bytes, with a flag for its place."""
    return MAGIC + struct.pack("<I", flag << 29 | 4) + b"abcd"


def pairs(*keys):
    """An image and a label of each key of a tar."""
    return [(f"{key}.{extension}", b"1") for key in keys for extension in ("jpg", "cls")]


def labelled(label):
    return frame_recordio(record_payload(Image("", b"abc", label), 4))


GOOD_IMAGE = Image("a/b.jpg", b"abcdef", 2)
GOOD = formats.example(GOOD_IMAGE)
TWO_IMAGES, TWO_LABELS = with_features(encoded=[b"one", b"two"]), with_features(label=[2, 2])
TWO_PAIRS = [(f"{k}.{e}", b"1" * n) for k in "ab" for e, n in (("jpg", 600), ("cls", 1))]
TAR = write_tar(io.BytesIO(), TWO_PAIRS).getvalue()
# With another bit in the header of the second file, where tarfile itself would stop.
HALF_TAR = TAR[:1636] + bytes([TAR[1636] ^ 1]) + TAR[1637:]
RECORDS = formats.frame_records([GOOD, GOOD])
ENDLESS = struct.pack("<Q", 1 << 63)  # the length of a record, with its right checksum
ENDLESS += tfrecord._masked(ENDLESS) + bytes(100)
DOTS = r"{0}\.{1}\.jpg has a key with a dot, as have {2} images: .*valid: {0}_{1}\.jpg$"
NO_CLASS = r"a\.cls has no class number: {}; valid: decim"
FAULTY = [
    ("x.tar", [("a.jpg", b"A")], r"a has no label; valid: \.cls or \.json"),
    ("x.tar", [("d/a.cls", b"1"), ("d/a.txt", b"")], r"d/a has no image .* only \.cls and \.txt"),
    ("x.tar", [("a.jpg", b""), ("a.png", b""), ("a.cls", b"1")], r"a has the images \.jpg and "),
    *(
        ("x.tar", [("a.jpg", b""), ("a.cls", label)], NO_CLASS.format(label))
        for label in (b"cat", b"-1", b"1_0", b"")
    ),
    *(
        ("x.tar", [("a.jpg", b""), ("a.json", text)], "a.json has no class number")
        for text in (b"[1]", b'{"label": true}')
    ),
    ("x.tar", [("a.jpg", b""), ("a.jpg", b""), ("a.cls", b"1")], r"a\.jpg occurs twice"),
    ("x.tar", pairs("a", "b", "a"), "a occurs twice, as after tar -r"),
    ("x.tar", pairs(*(f"d/a.{i}" for i in range(30))), DOTS.format("d/a", 0, 30)),
    ("x.tar", pairs("a", "a.v2"), DOTS.format("a", "v2", 1)),  # the second would be left out
    ("x.tfrecord", [GOOD, with_features(encoded=None)], "record 1 has no image/encoded"),
    ("x.tfrecord", [GOOD, with_features(label=None)], "record 1 has no image/class/label"),
    ("x.tfrecord", [GOOD, TWO_IMAGES], "record 1 has 2 values of image/encoded; valid: one"),
    ("x.tfrecord", [GOOD, TWO_LABELS], "record 1 has several values of .*/label; valid: one"),
    *(
        ("x.tfrecord", [message], "record 0 is damaged: ")
        for message in (b"\x0a\x05abc", b"\x0b", b"\xff" * 11, b"\x0a\xff", b"\x09abc")
    ),
    ("x.rec", part(0), "record 0 is too short for an image of MXNet"),
    ("x.rec", frame_recordio(struct.pack("<IfQQ", 9, 0, 0, 0)), ".*too short for its 9 labels"),
    *(("x.rec", labelled(n), f".*id 4 has label {n}") for n in (1.5, np.nan, np.inf)),
    # Faults of a file
    ("x.tar", gzip.compress(TAR), "is not a tar, is compressed, or is truncated"),
    ("x.tar", bytes(range(256)) * 16, "is not a tar"),
    ("x.tar", HALF_TAR, "(is|has)"),
    ("x.tar", TAR + TAR, "is damaged: .* joined by cat"),
    *(
        ("x.tfrecord", content, "is damaged or not TFRecord")
        for content in (gzip.compress(RECORDS), b"\x01" + RECORDS[1:], RECORDS + b"more after it")
    ),
    ("x.tfrecord", ENDLESS, "is truncated: the record at byte 0"),
    ("x.rec", b"not RecordIO at all", "is damaged or not RecordIO: .* at byte 0"),
    ("x.rec", labelled(1) + b"more of it", ".* starts at byte 36"),
    *(
        ("x.rec", content, ".* byte 0 has parts out of order")
        for content in (part(3), part(7), part(1) + part(0))
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), FAULTY)
def test_samples_without_one_image_and_one_label_and_damage_are_named(
    tmp_path, name, content, message
):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif name == "x.tar":
        write_tar(path, content)
    else:
        write_records(path, content)
    refused(rf"{name}[: ]{message}", scan, path)


@pytest.mark.parametrize("form", SHARDS)
def test_a_shard_that_is_cut_is_refused_unless_a_whole_record_ends_there(tmp_path, form):
    path = tmp_path / f"x{SUFFIX[form]}"
    images = [Image("a.jpg", b"abc", 2), Image("b.jpg", MAGIC * 2, 1)]
    formats.write_shard(form, path, images[:1])
    first = path.stat().st_size
    formats.write_shard(form, path, images)
    whole = path.read_bytes()
    sizes = range(1, len(whole))
    ends = {"tfrecord": [first], "recordio": [first - 1, first]}.get(form, [])  # without padding
    if form == "webdataset":
        end = 512 * 8  # of the last file: a header and a block for each
        sizes = (0, *range(1, end, 61), *(512 * n - 1 for n in range(1, 10)), *range(512, end, 512))
        assert contents(path, scan(path)) == [image.content for image in images]
        path.write_bytes(whole[: end + 512])
    assert contents(path, scan(path)) == [image.content for image in images]
    for size in sizes:
        path.write_bytes(whole[:size])
        if size in ends:
            assert contents(path, scan(path)) == [b"abc"]
        else:
            refused(r"x\.\w+(:\w)? (is (not a tar|truncated)|has)", scan, path)
    path.unlink()
    refused(rf"{path.name} cannot be read: No such file", scan, path)


@pytest.mark.parametrize("name", ["../a.jpg", "b/../../a.jpg", "/b/a.jpg", r"..\a.jpg"])
def test_a_name_that_leads_out_of_the_tar_is_refused(tmp_path, name):
    path = tmp_path / "x.tar"
    inside = [("./b/a.jpg", b"A"), ("./b/a.cls", b"1")]
    assert len(scan(write_tar(path, inside))) == 1
    write_tar(path, [*inside, (name, b"A"), ("c/a.cls", b"1")])
    refused(r"x\.tar holds the name .*a\.jpg', which leads out of it", scan, path)


def test_a_changed_byte_of_a_tfrecord_is_found_with_verify(tmp_path):
    path = tmp_path / "x.tfrecord"
    write_records(path, [GOOD, GOOD])
    content = bytearray(path.read_bytes())
    content[content.rindex(b"abcdef")] ^= 1
    path.write_bytes(content)
    assert len(scan(path)) == 2
    message = r"x\.tfrecord:record 1 is damaged: its checksum"
    refused(message, scan, path, verify=True)
    refused(message, index_shards, tmp_path, checksums=True)


# Labels and classes of TFRecord


def test_labels_that_start_from_one(tmp_path):
    images = [Image(f"x/{i}.jpg", b"abc", i) for i in range(3)]
    records = [formats.example(image, CLASSES, label_offset=1) for image in images]
    write_records(tmp_path / "train-00000-of-00001", records)
    index = index_shards(tmp_path, label_offset=1)
    assert (index.labels.tolist(), index.classes) == ([0, 1, 2], CLASSES)
    assert index_shards(tmp_path, classes=("none", *CLASSES)).labels.tolist() == [1, 2, 3]
    for message, options in (
        (r"labels run from 1 to 3 .* set label_offset=1", {}),
        (r"2\.jpg has label 3, but there are 3 .*label_offset=1", {"classes": CLASSES}),
        (r"0\.jpg has label 1, less than the label_offset of 2", {"label_offset": 2}),
        ("label 1 and class ant, but that label is class bee", {"classes": (*CLASSES, "dog")}),
    ):
        refused(message, index_shards, tmp_path, **options)


def test_a_label_with_two_class_names_is_refused(tmp_path):
    image = Image("x/0.jpg", b"abc", 0)
    records = [formats.example(image, (name,)) for name in ("ant", "bee")]
    write_records(tmp_path / "x.tfrecord", records)
    refused(r"label 0 and class bee, but others .* class ant", index_shards, tmp_path)
