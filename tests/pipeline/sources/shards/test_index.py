"""The index of shards: written and read, and what is wrong with one."""

import hashlib
import io
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline import DataError, Index, index_shards
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


def test_what_was_saved_is_loaded(tmp_path):
    path = tmp_path / "index.npz"
    an_index().save(path)
    loaded = Index.load(path.read_bytes(), "index.npz")
    assert same(loaded, an_index())
    assert loaded.fingerprint == an_index().fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["index.npz"]


_NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=20)


@given(st.lists(st.tuples(_NAMES, st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1))
def test_any_index_that_was_saved_is_loaded(tmp_path_factory, images):
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


def test_the_fingerprint_is_of_names_and_labels():
    same_images = an_index(shards=("x", "y"), offset=np.array([0, 0, 0]), format="tfrecord")
    assert same_images.fingerprint == an_index().fingerprint
    for change in (
        {"names": ("ant/1.jpg", "bée/2.jpg", "ant/3.jpg")},
        {"labels": np.array([0, 1, 1])},
        {"classes": ("ant", "bee")},
    ):
        assert an_index(**change).fingerprint != an_index().fingerprint


def test_a_name_with_a_line_break_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"'a\\nb' has a line break"):
        an_index(names=("a\nb", "", "")).save(tmp_path / "index.npz")
    assert not list(tmp_path.iterdir())


def npz(**arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def test_what_is_no_index_is_refused(tmp_path):
    an_index().save(tmp_path / "index.npz")
    whole = (tmp_path / "index.npz").read_bytes()
    array = io.BytesIO()
    np.save(array, np.arange(3))
    pickled = npz(version=np.array(1), format=np.array({"a": 1}, dtype=object))
    for content in (b"", b"text", whole[:-1], whole[:100], array.getvalue(), npz(a=1), pickled):
        with pytest.raises(DataError, match=r"x/index\.npz is not an index of shards"):
            Index.load(content, "x/index.npz")
    with pytest.raises(DataError, match=r"index\.npz is of version 2, this library reads 1"):
        Index.load(npz(version=np.array(2)), "index.npz")


@given(st.data())
def test_no_damage_goes_unnoticed(tmp_path_factory, data):
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
    # Of some bytes of an archive, such as its dates, nothing hangs.
    assert same(loaded, an_index())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array([0, 1])}, "more of one thing than of another"),
        ({"names": ("a", "b")}, "more of one thing than of another"),
        ({"shards": ("a.tar",)}, "more of one thing than of another"),
        ({"shard": np.array([0, 2, 1])}, "in shards that it does not have"),
        ({"shard": np.array([0, -1, 1])}, "in shards that it does not have"),
        ({"labels": np.array([0, 2, 0])}, "labels that are no classes"),
        ({"labels": np.array([0, -1, 0])}, "labels that are no classes"),
        ({"offset": np.array([512, 2048, 513])}, "images outside of their shards"),
        ({"offset": np.array([512, -1, 0])}, "images outside of their shards"),
        ({"length": np.array([1, -1, 1])}, "images outside of their shards"),
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
    """Two shards, and files that are none."""
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
    told = []
    index = index_shards(folder, checksums=True, progress=lambda *so_far: told.append(so_far))
    contents = [(folder / shard).read_bytes() for shard in index.shards]
    assert index.shard_sha256 == tuple(hashlib.sha256(c).hexdigest() for c in contents)
    assert told == [(n * 10240, 4 * 10240) for n in (1, 2, 3, 4)]


def test_progress_within_a_large_shard(tmp_path):
    payloads = [record_payload(Image("", b"abc" + MAGIC, 0), i) for i in range(2500)]
    write_recordio(tmp_path / "x.rec", payloads)
    told = []
    index = index_shards(tmp_path, progress=lambda done, total: told.append(done / total))
    assert len(index) == 2500
    assert told == pytest.approx([0.4, 0.8, 1.0], abs=0.01)


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
        with pytest.raises(DataError, match=r"fits the pattern \.\.|part-012\.tar is not there"):
            index_shards(tmp_path, pattern=pattern)
    else:
        assert list(index_shards(tmp_path, pattern=pattern).shards) == shards


def test_what_cannot_be_scanned_is_named(folder, tmp_path):
    with pytest.raises(DataError, match=r"nowhere cannot be read: No such file"):
        index_shards(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no format of shards 'zip': one of webdataset, tfrecord"):
        index_shards(folder, "zip")
    with pytest.raises(DataError, match=r"has no shards of tfrecord: files \*\.tar"):
        index_shards(folder, "tfrecord")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no shards: files \*\.tar"):
        index_shards(tmp_path / "empty")
    write_records(folder / "c.tfrecord", [example(Image("x.jpg", b"", 0))])
    with pytest.raises(DataError, match=r"a\.tar \(webdataset\) and c\.tfrecord \(tfrecord\)"):
        index_shards(folder)
    assert index_shards(folder, "tfrecord").shards == ("c.tfrecord",)
    for name in ("c.tfrecord", "c.idx"):
        (folder / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"c\.tfrecord holds no images"):
        index_shards(folder, "tfrecord")
    with pytest.raises(DataError, match=r"no file in .* fits the pattern \*\.bin"):
        index_shards(folder, pattern="*.bin")


def test_more_labels_than_classes_are_named(folder):
    with pytest.raises(DataError, match=r"b\.tar:x\.jpg has label 1, but there are 1 classes$"):
        index_shards(folder, classes=("ant",))
    assert index_shards(folder, classes=("ant", "bee", "cat")).classes == ("ant", "bee", "cat")
