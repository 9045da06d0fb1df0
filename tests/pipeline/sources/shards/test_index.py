"""The index of shards: saving, loading, damage, and scanning a folder."""

import io
import zlib
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline import DataError, Index, Shards, index_shards
from largebatch.pipeline.sources.faults import LeftOut
from largebatch.pipeline.sources.shards.indexing import find_shards
from tests.conftest import refused
from tests.pipeline import formats
from tests.pipeline.formats import Image, packed, record_payload, write_recordio, write_tar

SAMPLE = [("x.jpg", b"abc"), ("x.cls", b"0")]


def an_index(**changes):
    index = Index(
        format="webdataset",
        classes=("ant", "bée"),
        shards=("a.tar", "b.tar"),
        shard_bytes=np.array([5000, 3000]),
        names=("ant/1.jpg", "bée/2 two.jpg", "ant/3.jpg"),
        labels=np.array([0, 1, 0]),
        shard=np.array([0, 0, 1]),
        offset=np.array([512, 2048, 512]),
        length=np.array([700, 0, 2488]),
        split=np.array([False, False, True]),
    )
    return replace(index, **changes)


def same(one, other):
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Index))


def saved(path, index):
    index.save(path)
    return path.read_bytes()


_NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=20)


@given(st.lists(st.tuples(_NAMES, st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1))
def test_any_saved_index_is_loaded_unchanged(tmp_path_factory, images):
    names, offset, length = zip(*images, strict=True)
    index = an_index(
        names=names,
        labels=np.arange(len(names)) % 2,
        shard=np.arange(len(names)) % 2,
        offset=np.array(offset),
        length=np.array(length),
        split=np.arange(len(names)) % 3 == 0,
        shard_bytes=np.array([2**42, 2**42]),
    )
    path = tmp_path_factory.mktemp("index") / "index.npz"
    loaded = Index.load(saved(path, index), "")
    assert same(loaded, index)
    assert loaded.fingerprint == index.fingerprint
    assert [*path.parent.iterdir()] == [path]


def test_the_fingerprint_depends_on_names_and_labels():
    same_images = an_index(shards=("x", "y"), offset=np.array([0, 0, 0]), format="tfrecord")
    assert same_images.fingerprint == an_index().fingerprint
    changes = {"names": ("1", "2", "3")}, {"labels": np.array([0, 1, 1])}, {"classes": ("a", "b")}
    assert len({an_index(**change).fingerprint for change in ({}, *changes)}) == 4


def test_a_file_that_is_not_an_index_is_refused(tmp_path):
    whole = saved(tmp_path / "index.npz", an_index())
    array = io.BytesIO()
    np.save(array, np.arange(3))
    pickled = packed({"version": np.array(1), "format": np.array({"a": 1}, dtype=object)})
    refused("Object arrays cannot be loaded", Index.load, pickled, "x")
    other = array.getvalue(), packed({"a": 1})
    for content in (b"", b"text", whole[:-1], whole[:100], *other):
        refused(r"x/index\.npz is not an index of shards", Index.load, content, "x/index.npz")
    newer = packed({"version": np.array(2)})
    refused("x is not an index .*it has version 2, and 1 is read", Index.load, newer, "x")
    refused(r"'a\\nb' contains a line break", an_index(names=("a\nb",)).save, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@given(st.data())
def test_damage_is_detected(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    content = bytearray(path.read_bytes() if path.exists() else saved(path, an_index()))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    try:
        loaded = Index.load(bytes(content), "index.npz")
    except DataError:
        return
    # Some bytes of a zip archive, such as its dates, have no effect.
    assert same(loaded, an_index())


OUTSIDE = ["../../x", "train/../../b.tar", "/x", "..", "", r"..\b.tar", r"C:\b.tar", "//host/b.tar"]
CONTRADICTIONS = [
    ({"labels": np.array([0, 1])}, "arrays of different lengths"),
    ({"names": ("a", "b")}, "arrays of different lengths"),
    ({"shards": ("a.tar",)}, "arrays of different lengths"),
    *(({"shard": np.array([0, n, 1])}, "images in unknown shards") for n in (2, -1)),
    *(({"labels": np.array([0, n, 0])}, "labels without a class") for n in (2, -1)),
    ({"offset": np.array([512, 2048, 513])}, "images beyond the end of their shards"),
    ({"offset": np.array([512, -1, 0])}, "images beyond the end of their shards"),
    ({"offset": np.full(3, 2**62), "length": np.full(3, 2**62)}, "images beyond the end"),
    ({"length": np.array([1, -1, 1])}, "images beyond the end of their shards"),
    *(({"shards": ("a.tar", name)}, "leads out of it") for name in OUTSIDE),
]


def test_an_index_that_contradicts_itself_or_names_other_folders_is_refused(tmp_path):
    for changes, message in CONTRADICTIONS:
        content = saved(tmp_path / "index.npz", an_index(**changes))
        refused(rf"x is not an index of shards \(it .*{message}", Index.load, content, "x")
    for name in ("b.tar", "train/b.tar", "..b.tar", "b..tar", "b c.tar", "é.tar"):
        content = saved(tmp_path / "index.npz", an_index(shards=("a.tar", name)))
        assert Index.load(content, "x").shards == ("a.tar", name)


# Scanning a folder


@pytest.fixture
def folder(tmp_path):
    """Two shards, and files that are not shards."""
    for name, number in (("b.tar", b"1"), ("a.tar", b"0"), (".a.tar.partial", b"7")):
        write_tar(tmp_path / name, [("x.jpg", b"abc"), ("x.cls", number)])
    for name in ("a.idx", "readme.txt", ".c.tar"):
        (tmp_path / name).touch()
    return tmp_path


def test_a_folder_is_scanned_in_the_order_of_names(folder):
    index, reported = index_shards(folder), []
    assert (index.format, index.classes, index.crc32) == ("webdataset", ("0", "1"), None)
    assert index.shards == ("a.tar", "b.tar")
    assert index.shard_bytes.tolist() == [10240, 10240]
    assert index.labels.tolist() == index.shard.tolist() == [0, 1]
    assert same(Index.load(saved(folder / "index.npz", index), ""), index)
    index_shards(folder, progress=lambda *done: reported.append(done))
    assert reported == [(10240, 20480), (20480, 20480)]
    summed = index_shards(folder, checksums=True, progress=lambda *done: reported.append(done))
    assert summed.crc32.tolist() == [zlib.crc32(b"abc")] * 2
    assert reported[2:] == [(n * 10240, 4 * 10240) for n in (1, 2, 3, 4)]


def test_patterns(tmp_path):
    for number in (8, 9, 10, 11):
        write_tar(tmp_path / f"part-{number:03d}.tar", SAMPLE)
        (tmp_path / f"part-{number:03d}.idx").touch()
    for pattern, numbers in (
        *((pattern, (8, 9, 10, 11)) for pattern in ("*.tar", "part-0{0..1}{0..9}*")),
        *((pattern, (10, 11)) for pattern in ("part-01?.tar", "p*-0{10..11}.tar")),
        ("part-{009..010}.tar", (9, 10)),
    ):
        names = tuple(f"part-{number:03d}.tar" for number in numbers)
        assert index_shards(tmp_path, pattern=pattern).shards == names
    refused(r"matches the pattern \.\./\{x", index_shards, tmp_path, pattern="../{x,y}/*")
    refused(r"12\.tar of the pattern", index_shards, tmp_path, pattern="part-{008..012}.tar")


def test_folders_that_cannot_be_scanned_are_named(folder, tmp_path):
    refused("nowhere cannot be read: No such file", index_shards, tmp_path / "nowhere")
    refused("unknown .* 'zip'; valid: webdataset, tfrecord, recordio", index_shards, folder, "zip")
    refused(r"has no tfrecord shards; valid: files \*\.tar", index_shards, folder, "tfrecord")
    (tmp_path / "empty").mkdir()
    refused(r"empty has no shards; valid: files \*\.tar", index_shards, tmp_path / "empty")
    formats.write_records(folder / "c.tfrecord", [formats.example(Image("x.jpg", b"", 0))])
    refused(r"a\.tar \(webdataset\) and c\.tfrecord \(tfrecord\)", index_shards, folder)
    assert index_shards(folder, "tfrecord").shards == ("c.tfrecord",)
    for name in ("c.tfrecord", "c.idx"):
        (folder / name).write_bytes(b"")
    refused(r"c\.tfrecord holds no images", index_shards, folder, "tfrecord")
    refused(r"no file in .* matches the pattern \*\.bin", index_shards, folder, pattern="*.bin")


@given(st.sets(st.integers(0, 4)), st.integers(1, 5), st.sampled_from(["", ".tar"]))
def test_missing_shards_of_a_numbered_set_are_named(tmp_path_factory, numbers, count, suffix):
    folder, form = tmp_path_factory.mktemp("set"), "webdataset" if suffix else "tfrecord"
    there = {number for number in numbers if number < count} | {0}
    for number in there:
        (folder / f"train-{number:05d}-of-{count:05d}{suffix}").touch()
    missing = sorted({*range(count)} - there)
    if missing:
        message = f"{len(missing)} of {count} shards are missing: number {missing[0]}"
        refused(message, find_shards, folder, form, None)
    else:
        assert len(find_shards(folder, form, None)[0]) == count
    meant = f"train-0000[01234]-of-{count:05d}{suffix}"
    assert len(find_shards(folder, form, meant)[0]) == len(there)


def test_a_numbered_set_may_count_from_1_and_be_the_only_one(tmp_path):
    for number in (1, 2):
        (tmp_path / f"train-0000{number}-of-00002").touch()
    assert len(find_shards(tmp_path, "tfrecord", "*")[0]) == 2
    (tmp_path / "train-00001-of-99999999999").touch()
    message = "several sets, of 2 and 99,999,999,999"
    refused(message, find_shards, tmp_path, "tfrecord", "*")


def test_labels_that_are_ids_are_refused_before_names_are_made(tmp_path):
    for label in (25130987, 2**62, 18446744073709551617, 10**38):
        write_tar(tmp_path / "a.tar", [("x.jpg", b"abc"), ("x.cls", str(label).encode())])
        write_recordio(tmp_path / "b.rec", [record_payload(Image("", b"abc", label))])
        for form, written in (("webdataset", label), ("recordio", int(np.float32(label)))):
            refused(rf"label {written} is far above the number of", index_shards, tmp_path, form)
        message = r"label 25130987, but there are 1 classes|is far above"
        refused(message, index_shards, tmp_path, "webdataset", classes=("ant",))


def test_classes_without_images_are_counted(tmp_path):
    files = [(f"{i}.{e}", str(i * 100).encode()) for i in range(10) for e in ("jpg", "cls")]
    (tmp_path / "train").mkdir()
    write_tar(tmp_path / "train" / "a.tar", files)
    counted = LeftOut()
    Shards(tmp_path, format="webdataset", on_fault=counted)
    assert "classes without images: 891" in counted.line()
    index = index_shards(tmp_path / "train")
    assert len(index.classes) == 901
    assert index.unused_classes == "only 10 of 901 classes have images"
    assert an_index().unused_classes == ""


def test_labels_beyond_the_classes_are_named(folder):
    assert index_shards(folder, classes=("ant", "bee", "cat")).classes == ("ant", "bee", "cat")
    write_recordio(folder / "x.rec", [record_payload(Image("", b"abc", -1), 8)])
    message = r"x\.rec:record 0, id 8 has label -1, less than the label_offset of 0"
    refused(message, index_shards, folder, "recordio")
