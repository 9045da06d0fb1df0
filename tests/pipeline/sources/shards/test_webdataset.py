"""WebDataset shards: any tar is read, and faulty ones are named."""

import gzip
import json
import os
import tarfile

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from largebatch.pipeline.sources.shards import webdataset
from tests.conftest import refused
from tests.pipeline import formats
from tests.pipeline.formats import write_tar


def scan(path):
    return list(formats.scan_shard(webdataset.scan, path))


def contents(path, entries):
    return [path.read_bytes()[e.offset : e.offset + e.length] for e in entries]


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
        ([("a.jpg", b"A")], r"a has no label; valid: \.cls or \.json"),
        ([("d/a.cls", b"1"), ("d/a.txt", b"")], r"d/a has no image .* only \.cls and \.txt"),
        ([("a.jpg", b""), ("a.png", b""), ("a.cls", b"1")], r"a has the images \.jpg and "),
        *(
            (
                [("a.jpg", b""), ("a.cls", label)],
                f"a.cls has no class number: {label}; valid: decim",
            )
            for label in (b"cat", b"-1", b"1_0", b"")
        ),
        *(
            ([("a.jpg", b""), ("a.json", text)], "a.json has no class number")
            for text in (b"[1]", b'{"label": true}')
        ),
        ([("a.jpg", b""), ("a.jpg", b""), ("a.cls", b"1")], r"a\.jpg occurs twice"),
        (
            [(f"{key}.{e}", b"1") for key in "aba" for e in ("jpg", "cls")],
            r"a occurs twice, as after tar -r",
        ),
        (
            [(f"d/a.{i}.{e}", b"1") for i in range(3000) for e in ("cls", "jpg")],
            r"d/a\.0\.jpg has a key with a dot, as have 3,000 images: .*valid: d/a_0\.jpg$",
        ),
        (  # the second sample would be left out
            [("a.jpg", b""), ("a.cls", b"1"), ("a.v2.jpg", b""), ("a.v2.cls", b"1")],
            r"a\.v2\.jpg has a key with a dot, as have 1 images: .*valid: a_v2\.jpg$",
        ),
    ],
)
def test_a_sample_without_one_image_and_one_label_is_named(tmp_path, files, message):
    write_tar(tmp_path / "x.tar", files)
    refused(rf"x\.tar:{message}", scan, tmp_path / "x.tar")


@pytest.mark.parametrize("name", ["../a.jpg", "b/../../a.jpg", "/b/a.jpg", r"..\a.jpg"])
def test_a_name_that_leads_out_of_the_tar_is_refused(tmp_path, name):
    path = tmp_path / "x.tar"
    inside = [("./b/a.jpg", b"A"), ("./b/a.cls", b"1")]
    write_tar(path, inside)
    assert len(scan(path)) == 1
    write_tar(path, [*inside, (name, b"A"), ("c/a.cls", b"1")])
    refused(r"x\.tar holds the name .*a\.jpg', which leads out of it", scan, path)


def test_a_file_that_is_no_whole_tar_is_refused(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(path, [(f"{k}.{e}", b"1" * n) for k in "ab" for e, n in (("jpg", 600), ("cls", 1))])
    whole = path.read_bytes()
    end = 512 * 10  # of the last file: four headers, and contents of 2, 1, 2 and 1 blocks
    assert not any(whole[end:])
    for size in (0, 1, 511, 512, 513, 1100, 1536, 2048, 2560, 3000, end - 512, end - 1, end):
        path.write_bytes(whole[:size])
        refused(r"x\.tar(:\w)? (is|has)", scan, path)
    path.write_bytes(whole[: end + 512])
    assert len(scan(path)) == 2
    damaged = bytearray(whole)
    damaged[1536 + 100] ^= 1  # in the header of the second file: tarfile itself would stop there
    for content, message in (
        (gzip.compress(whole), "is not a tar, is compressed, or is truncated"),
        (os.urandom(4096), "is not a tar"),
        (damaged, ""),
        (whole + whole, "is damaged: .* joined by cat"),
    ):
        path.write_bytes(content)
        refused(rf"x\.tar {message}", scan, path)
    refused(r"nowhere\.tar cannot be read: No such file", scan, tmp_path / "nowhere.tar")
