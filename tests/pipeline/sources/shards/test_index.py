"""The index of shards: saving, loading, damage, and scanning a folder."""

import hashlib
import io
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline import DataError, Index, Shards, index_shards
from largebatch.pipeline.sources.faults import LeftOut
from largebatch.pipeline.sources.shards.indexing import find_shards
from tests.pipeline.formats import (
    MAGIC,
    Image,
    example,
    record_payload,
    write_recordio,
    write_records,
    write_tar,
)


def an_index(**changes):
    index = Index(
        format="webdataset",
        classes=("ant", "bée"),
        shards=("a.tar", "b.tar"),
        shard_bytes=np.array([5000, 3000]),
        shard_sha256=("", ""),
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


def test_a_saved_index_is_loaded_unchanged(tmp_path):
    path = tmp_path / "index.npz"
    an_index().save(path)
    loaded = Index.load(path.read_bytes(), "index.npz")
    assert same(loaded, an_index())
    assert loaded.fingerprint == an_index().fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["index.npz"]


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
    index.save(path)
    assert same(Index.load(path.read_bytes(), ""), index)


def test_the_fingerprint_depends_on_names_and_labels():
    same_images = an_index(shards=("x", "y"), offset=np.array([0, 0, 0]), format="tfrecord")
    assert same_images.fingerprint == an_index().fingerprint
    for change in (
        {"names": ("ant/1.jpg", "bée/2.jpg", "ant/3.jpg")},
        {"labels": np.array([0, 1, 1])},
        {"classes": ("ant", "bee")},
    ):
        assert an_index(**change).fingerprint != an_index().fingerprint


def test_a_name_with_a_line_break_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"'a\\nb' contains a line break"):
        an_index(names=("a\nb", "", "")).save(tmp_path / "index.npz")
    assert not list(tmp_path.iterdir())


def npz(**arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def test_a_file_that_is_not_an_index_is_refused(tmp_path):
    an_index().save(tmp_path / "index.npz")
    whole = (tmp_path / "index.npz").read_bytes()
    array = io.BytesIO()
    np.save(array, np.arange(3))
    pickled = npz(version=np.array(1), format=np.array({"a": 1}, dtype=object))
    for content in (b"", b"text", whole[:-1], whole[:100], array.getvalue(), npz(a=1), pickled):
        with pytest.raises(DataError, match=r"x/index\.npz is not an index of shards"):
            Index.load(content, "x/index.npz")
    with pytest.raises(DataError, match=r"index\.npz has version 2, but this library reads 1"):
        Index.load(npz(version=np.array(2)), "index.npz")


@given(st.data())
def test_damage_is_detected(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    if not path.exists():
        an_index().save(path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    try:
        loaded = Index.load(bytes(content), "index.npz")
    except DataError:
        return
    # Some bytes of a zip archive, such as its dates, have no effect.
    assert same(loaded, an_index())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array([0, 1])}, "arrays of different lengths"),
        ({"names": ("a", "b")}, "arrays of different lengths"),
        ({"shards": ("a.tar",)}, "arrays of different lengths"),
        ({"shard": np.array([0, 2, 1])}, "images in unknown shards"),
        ({"shard": np.array([0, -1, 1])}, "images in unknown shards"),
        ({"labels": np.array([0, 2, 0])}, "labels without a class"),
        ({"labels": np.array([0, -1, 0])}, "labels without a class"),
        ({"offset": np.array([512, 2048, 513])}, "images beyond the end of their shards"),
        ({"offset": np.array([512, -1, 0])}, "images beyond the end of their shards"),
        ({"length": np.array([1, -1, 1])}, "images beyond the end of their shards"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(tmp_path, changes, message):
    an_index(**changes).save(tmp_path / "index.npz")
    with pytest.raises(
        DataError, match=rf"index\.npz is not an index of shards \(it has .*{message}"
    ):
        Index.load((tmp_path / "index.npz").read_bytes(), "index.npz")


# Scanning a folder


@pytest.fixture
def folder(tmp_path):
    """Two shards, and files that are not shards."""
    for name, number in (("b.tar", 1), ("a.tar", 0), (".a.tar.partial", 7)):
        write_tar(tmp_path / name, [("x.jpg", b"abc"), ("x.cls", str(number).encode())])
    (tmp_path / "a.idx").write_text("")
    (tmp_path / "readme.txt").write_text("")
    (tmp_path / ".c.tar").write_text("")
    return tmp_path


def test_a_folder_is_scanned_in_the_order_of_names(folder):
    index = index_shards(folder)
    assert index.format == "webdataset"
    assert index.shards == ("a.tar", "b.tar")
    assert index.shard_bytes.tolist() == [10240, 10240]
    assert index.shard_sha256 == ("", "")
    assert index.labels.tolist() == [0, 1]
    assert index.shard.tolist() == [0, 1]
    assert index.classes == ("0", "1")
    index.save(folder / "index.npz")
    assert same(Index.load((folder / "index.npz").read_bytes(), ""), index)


def test_checksums_and_progress(folder):
    reported = []
    index = index_shards(folder, checksums=True, progress=lambda *so_far: reported.append(so_far))
    contents = [(folder / shard).read_bytes() for shard in index.shards]
    assert index.shard_sha256 == tuple(hashlib.sha256(c).hexdigest() for c in contents)
    assert reported == [(n * 10240, 4 * 10240) for n in (1, 2, 3, 4)]


def test_progress_within_a_large_shard(tmp_path):
    payloads = [record_payload(Image("", b"abc" + MAGIC, 0), i) for i in range(2500)]
    write_recordio(tmp_path / "x.rec", payloads)
    reported = []
    index = index_shards(tmp_path, progress=lambda done, total: reported.append(done / total))
    assert len(index) == 2500
    assert reported == pytest.approx([0.4, 0.8, 1.0], abs=0.01)


@pytest.mark.parametrize(
    ("pattern", "shards"),
    [
        ("*.tar", ["part-008.tar", "part-009.tar", "part-010.tar", "part-011.tar"]),
        ("part-{009..010}.tar", ["part-009.tar", "part-010.tar"]),
        ("part-01?.tar", ["part-010.tar", "part-011.tar"]),
        ("p*-0{10..11}.tar", ["part-010.tar", "part-011.tar"]),
        ("part-0{0..1}{0..9}*", ["part-008.tar", "part-009.tar", "part-010.tar", "part-011.tar"]),
        ("../{x,y}/*", None),
        ("part-{008..012}.tar", None),
    ],
)
def test_patterns(tmp_path, pattern, shards):
    for number in (8, 9, 10, 11):
        path = tmp_path / f"part-{number:03d}.tar"
        write_tar(path, [("x.jpg", b"abc"), ("x.cls", b"0")])
        path.with_suffix(".idx").write_text("")
    if shards is None:
        with pytest.raises(
            DataError, match=r"matches the pattern \.\.|part-012\.tar of the pattern"
        ):
            index_shards(tmp_path, pattern=pattern)
    else:
        assert list(index_shards(tmp_path, pattern=pattern).shards) == shards


def test_folders_that_cannot_be_scanned_are_named(folder, tmp_path):
    with pytest.raises(DataError, match=r"nowhere cannot be read: No such file"):
        index_shards(tmp_path / "nowhere")
    with pytest.raises(
        DataError, match=r"unknown shard format 'zip'; valid: webdataset, tfrecord, recordio"
    ):
        index_shards(folder, "zip")
    with pytest.raises(DataError, match=r"has no tfrecord shards; valid: files \*\.tar"):
        index_shards(folder, "tfrecord")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no shards; valid: files \*\.tar"):
        index_shards(tmp_path / "empty")
    write_records(folder / "c.tfrecord", [example(Image("x.jpg", b"", 0))])
    with pytest.raises(DataError, match=r"a\.tar \(webdataset\) and c\.tfrecord \(tfrecord\)"):
        index_shards(folder)
    assert index_shards(folder, "tfrecord").shards == ("c.tfrecord",)
    for name in ("c.tfrecord", "c.idx"):
        (folder / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"c\.tfrecord holds no images"):
        index_shards(folder, "tfrecord")
    with pytest.raises(DataError, match=r"no file in .* matches the pattern \*\.bin"):
        index_shards(folder, pattern="*.bin")


@given(st.sets(st.integers(0, 4)), st.integers(1, 5), st.sampled_from(["", ".tar"]))
def test_missing_shards_of_a_numbered_set_are_named(tmp_path_factory, numbers, count, suffix):
    folder = tmp_path_factory.mktemp("set")
    there = {number for number in numbers if number < count}
    for number in there | {0}:
        path = folder / f"train-{number:05d}-of-{count:05d}{suffix}"
        write_records(path, [example(Image("x.jpg", b"abc", 0))], idx=False)
    missing = sorted({*range(count)} - there - {0})
    for pattern in (None, "train-*"):
        form = "tfrecord" if not suffix or pattern else "webdataset"
        if missing:
            message = f"{len(missing)} of {count} shards are missing: number {missing[0]}"
            with pytest.raises(DataError, match=message):
                find_shards(folder, form, pattern)
        else:
            assert len(find_shards(folder, form, pattern)[0]) == count
    named = "train-0000[01234]-of-*".replace("*", f"{count:05d}{suffix}")
    assert len(find_shards(folder, "tfrecord", named)[0]) == count - len(missing)
    for path in folder.iterdir():  # some tools count from 1
        path.rename(folder / path.name.replace("train-0000", "train-1000"))
    for path in folder.iterdir():
        number = int(path.name[7:11]) + 1
        path.rename(folder / f"train-{number:05d}{path.name[11:]}")
    if not missing:
        assert len(find_shards(folder, "tfrecord", "*")[0]) == count
    (folder / f"train-00001-of-99999999999{suffix}").touch()
    with pytest.raises(DataError, match=rf"several sets, of {count} and 99,999,999,999"):
        find_shards(folder, "tfrecord", "*")


@pytest.mark.parametrize("label", [25130987, 2**62, 18446744073709551617, 10**38])
def test_labels_that_are_ids_are_refused_before_names_are_made(tmp_path, label):
    write_tar(tmp_path / "a.tar", [("x.jpg", b"abc"), ("x.cls", str(label).encode())])
    write_recordio(tmp_path / "b.rec", [record_payload(Image("", b"abc", label))])
    for form, written in (("webdataset", label), ("recordio", int(np.float32(label)))):
        with pytest.raises(DataError, match=rf"label {written} is far above the number of classes"):
            index_shards(tmp_path, form)
    with pytest.raises(DataError, match=r"label 25130987, but there are 1 classes|is far above"):
        index_shards(tmp_path, "webdataset", classes=("ant",))


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
    with pytest.raises(DataError, match=r"b\.tar:x\.jpg has label 1, but there are 1 classes$"):
        index_shards(folder, classes=("ant",))
    assert index_shards(folder, classes=("ant", "bee", "cat")).classes == ("ant", "bee", "cat")


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "train/../../b.tar",
        "/etc/passwd",
        "..",
        "",
        r"..\b.tar",
        r"C:\b.tar",
        "//host/b.tar",
    ],
)
def test_shards_outside_the_folder_are_refused(tmp_path, name):
    path = tmp_path / "index.npz"
    an_index(shards=("a.tar", name)).save(path)
    with pytest.raises(DataError) as error:
        Index.load(path.read_bytes(), str(path))
    assert f"{path} is not an index of shards (it names the shard {name!r}, " in str(error.value)


@pytest.mark.parametrize("name", ["b.tar", "train/b.tar", "..b.tar", "b..tar", "b c.tar", "é.tar"])
def test_shards_inside_the_folder_are_accepted(tmp_path, name):
    path = tmp_path / "index.npz"
    an_index(shards=("a.tar", name)).save(path)
    assert Index.load(path.read_bytes(), "index.npz").shards == ("a.tar", name)
