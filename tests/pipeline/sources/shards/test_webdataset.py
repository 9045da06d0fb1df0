"""WebDataset shards: read as DALI and the webdataset package read them."""

import gzip
import json
import os
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline import DataError, Shards
from largebatch.pipeline.sources.shards import webdataset
from tests.pipeline.formats import (
    images_of,
    read_with_dali,
    read_with_largebatch,
    scan_shard,
    write_tar,
    write_wds,
    write_wds_idx,
)


@pytest.fixture
def shards(photos, tmp_path):
    """Three shards of the training images, and the images."""
    images = images_of(photos / "train")
    (tmp_path / "train").mkdir()
    paths = [tmp_path / "train" / f"part-{i}.tar" for i in range(3)]
    for i, path in enumerate(paths):
        write_wds(path, images[i * 20 : (i + 1) * 20])
    return tmp_path, paths, images


def scan(path):
    return list(scan_shard(webdataset.scan, path))


def contents(path, entries):
    return [path.read_bytes()[e.offset : e.offset + e.length] for e in entries]


def test_images_and_labels_are_those_of_dali(shards):
    root, paths, images = shards
    theirs = read_with_dali("webdataset", paths, len(images))
    source = Shards(root, format="webdataset")
    assert read_with_largebatch(source) == theirs == [(i.content, float(i.label)) for i in images]
    assert source.name(20) == f"{paths[1]}:{images[20].name.lower()}"
    assert source.classes == ("0", "1", "2")


def test_images_and_labels_are_those_of_the_webdataset_package(shards):
    import webdataset as wds

    root, paths, _ = shards
    theirs = [
        (sample["jpeg"], float(sample["cls"]))
        for sample in wds.WebDataset([str(path) for path in paths], shardshuffle=False)
    ]
    assert read_with_largebatch(Shards(root, format="webdataset")) == theirs


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_and_names_with_dots_and_spaces(tmp_path, form):
    path = tmp_path / "x.tar"
    folder = "a.b/" + "/".join(["long" * 15] * 3)
    names = [f"{folder}/1", f"{folder}/2 two", "./3", "é"]
    files = []
    for i, name in enumerate(names):
        files += [(f"{name}.JPG", bytes([i]) * 700), (f"{name}.cls", b"%d" % i)]
    write_tar(path, files, form)
    write_wds_idx(path)
    entries = scan(path)
    assert [entry.name for entry in entries] == [f"{name}.JPG" for name in names]
    assert [entry.label for entry in entries] == [0, 1, 2, 3]
    assert contents(path, entries) == [bytes([i]) * 700 for i in range(4)]


_KEYS = st.text(st.sampled_from("ab. /é"), min_size=1, max_size=120)


@given(
    st.lists(
        st.tuples(_KEYS, st.binary(max_size=1500), st.integers(0, 2000)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_the_images_of_any_tar_are_read(tmp_path_factory, samples, form):
    path = tmp_path_factory.mktemp("tars") / "x.tar"
    # A leading number makes sample keys unique; a dot ends the key.
    files = []
    for i, (key, content, label) in enumerate(samples):
        name = f"{i}{key.replace('/', '/x')}"
        stem = name.rpartition("/")[2].partition(".")[0]
        name = f"{name.rpartition('/')[0]}/{stem}" if "/" in name else stem
        files += [(f"{name}.jpeg", content), (f"{name}.cls", str(label).encode())]
    write_tar(path, files, form)
    entries = scan(path)
    assert contents(path, entries) == [content for _, content, _ in samples]
    assert [entry.label for entry in entries] == [label for *_, label in samples]
    assert [entry.name for entry in entries] == [name for name, _ in files[::2]]


def test_labels_in_json_and_other_files_are_handled(tmp_path):
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
    write_tar(path, files)
    entries = scan(path)
    assert [(e.name, e.label) for e in entries] == [("a.jpg", 7), ("b.PNG", 3)]
    assert contents(path, entries) == [b"A", b"B"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("a.jpg", b"A")], r"x\.tar:a has no label; valid: \.cls or \.json"),
        ([("d/a.cls", b"1"), ("d/a.txt", b"")], r"x\.tar:d/a has no image .* only \.cls and \.txt"),
        ([("a.jpg", b""), ("a.png", b""), ("a.cls", b"1")], r"x\.tar:a has the images \.jpg and "),
        (
            [("a.jpg", b""), ("a.cls", b"cat")],
            r"x\.tar:a\.cls has no class number: b'cat'; valid: decimal digits",
        ),
        ([("a.jpg", b""), ("a.cls", b"-1")], r"x\.tar:a\.cls has no class number: b'-1'"),
        ([("a.jpg", b""), ("a.cls", b"1_0")], r"x\.tar:a\.cls has no class number: b'1_0'"),
        ([("a.jpg", b""), ("a.cls", b"")], r"x\.tar:a\.cls has no class number"),
        ([("a.jpg", b""), ("a.json", b"[1]")], r"x\.tar:a\.json has no class number"),
        ([("a.jpg", b""), ("a.json", b'{"label": true}')], r"x\.tar:a\.json has no class number"),
        ([("a.jpg", b""), ("a.jpg", b""), ("a.cls", b"1")], r"x\.tar:a\.jpg occurs twice"),
        (
            [(f"{key}.{e}", b"1") for key in "aba" for e in ("jpg", "cls")],
            r"x\.tar:a occurs twice, as after tar -r",
        ),
        (
            [(f"d/a.{i}.{e}", b"1") for i in range(3000) for e in ("cls", "jpg")],
            r"x\.tar:d/a\.0\.jpg has a key with a dot, as have 3,000 images: .*valid: d/a_0\.jpg$",
        ),
        (  # the second sample would be left out
            [("a.jpg", b""), ("a.cls", b"1"), ("a.v2.jpg", b""), ("a.v2.cls", b"1")],
            r"x\.tar:a\.v2\.jpg has a key with a dot, as have 1 images: .*valid: a_v2\.jpg$",
        ),
    ],
)
def test_a_sample_without_one_image_and_one_label_is_named(tmp_path, files, message):
    path = tmp_path / "x.tar"
    write_tar(path, files)
    with pytest.raises(DataError, match=message):
        scan(path)


@pytest.mark.parametrize("name", ["../a.jpg", "b/../../a.jpg", "/b/a.jpg", r"..\a.jpg"])
def test_a_name_that_leads_out_of_the_tar_is_refused(tmp_path, name):
    path = tmp_path / "x.tar"
    inside = [("./b/a.jpg", b"A"), ("./b/a.cls", b"1")]
    write_tar(path, inside)
    assert len(scan(path)) == 1
    write_tar(path, [*inside, (name, b"A"), ("c/a.cls", b"1")])
    with pytest.raises(DataError, match=r"x\.tar holds the name .*a\.jpg', which is not inside"):
        scan(path)


def test_a_tar_truncated_anywhere_is_refused(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(
        path, [("a.jpg", b"A" * 600), ("a.cls", b"1"), ("b.jpg", b"B" * 600), ("b.cls", b"1")]
    )
    whole = path.read_bytes()
    end = 512 * 10  # of the last file: four headers, and contents of 2, 1, 2 and 1 blocks
    assert not any(whole[end:])
    for size in (0, 1, 511, 512, 513, 1100, 1536, 2048, 2560, 3000, end - 512, end - 1, end):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"x\.tar(:\w)? (is|has)"):
            scan(path)
    path.write_bytes(whole[: end + 512])
    assert len(scan(path)) == 2


def test_a_file_that_is_not_a_tar_is_refused(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(path, [("a.jpg", b"A"), ("a.cls", b"1")])
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(whole))
    with pytest.raises(DataError, match=r"x\.tar is not a tar, is compressed, or is truncated"):
        scan(path)
    path.write_bytes(os.urandom(4096))
    with pytest.raises(DataError, match=r"x\.tar is not a tar"):
        scan(path)
    damaged = bytearray(whole)
    damaged[1024 + 100] ^= 1  # in the header of the second file: tarfile itself would stop there
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"x\.tar"):
        scan(path)
    path.write_bytes(whole + whole)
    with pytest.raises(DataError, match=r"x\.tar is damaged: .* joined by cat"):
        scan(path)
    with pytest.raises(DataError, match=r"nowhere\.tar cannot be read: No such file"):
        scan(tmp_path / "nowhere.tar")
