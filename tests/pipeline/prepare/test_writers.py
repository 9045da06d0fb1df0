"""Shards read back by other packages: tarfile, wds2idx and DALI."""

import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image
from wds2idx import IndexCreator

from largebatch.pipeline import Output, prepare_folder
from largebatch.pipeline.sources import INDEX_FILE, Index
from tests.conftest import refused
from tests.pipeline.formats import images_of, read_with_dali
from tests.pipeline.prepare.kills import tree


@pytest.fixture(scope="module")
def shards(photos, tmp_path_factory):
    """The photos in shards."""
    out = tmp_path_factory.mktemp("shards") / "out"
    counts = prepare_folder(out, photos, Output("webdataset", images_per_shard=20))
    assert counts == {"train": 53, "val": 23}
    return out


def load(folder):
    return Index.load((folder / INDEX_FILE).read_bytes(), "index")


@pytest.mark.parametrize("split", ["train", "val"])
def test_tarfile_and_wds2idx_agree_on_shards_with_training_images_mixed(
    shards, photos, tmp_path, split
):
    index, found = load(shards / split), []
    for path in sorted((shards / split).glob("*.tar")):
        with tarfile.open(path) as archive:
            infos = archive.getmembers()
            assert {info.mtime for info in infos} == {0}
            for image, label in zip(infos[::2], infos[1::2], strict=True):
                assert label.name == image.name.replace(".jpeg", ".cls")
                content, number = (archive.extractfile(info).read() for info in (image, label))
                found.append((image.name.replace(".jpeg", ".JPEG"), content, int(number)))
        assert path.stat().st_size % tarfile.RECORDSIZE == 0
        with IndexCreator(str(path), str(tmp_path / "theirs.idx"), verbose=False) as creator:
            creator.create_index()
        assert (tmp_path / "theirs.idx").read_text() == path.with_suffix(".idx").read_text()
    wanted = images_of(photos / split)
    assert sorted(found) == wanted
    assert (found == wanted) == (split == "val")
    assert index.names == tuple(name.replace(".JPEG", ".jpeg") for name, *_ in found)
    assert index.labels.tolist() == [label for *_, label in found]
    assert index.crc32.tolist() == [zlib.crc32(content) for _, content, _ in found]
    assert index.classes == ("ant", "bee", "cat")
    assert sorted(np.bincount(index.shard)) == ([17, 18, 18] if split == "train" else [11, 12])
    assert split == "val" or len({*index.labels[:18].tolist()}) == 3


def test_names_that_shards_cannot_hold_are_named(tmp_path):
    for number, (one, other, key) in enumerate(
        (
            ("c/a.jpeg", "c/a.png", "c/a"),
            ("c/a b.jpeg", "c/a.b.jpeg", "c/a_b"),
            ("c d/a.jpeg", "c_d/a.jpeg", "c_d/a"),
        )
    ):
        source = tmp_path / str(number)
        for name in (one, other):
            (source / "train" / name).parent.mkdir(parents=True, exist_ok=True)
            (source / "train" / name).write_bytes(b"\xff\xd8\xff")
        message = f"train/{one} and train/{other} would both be {key} in format=webdataset: rename"
        refused(message, prepare_folder, tmp_path / "out", source, Output("webdataset"))
        assert not (tmp_path / "out").exists()


def test_long_and_unusual_names_are_read_by_other_packages(tmp_path):
    names = [f"{'é' * 122}{i}.JPG" for i in range(3)] + ["it's 100 % odd, v1.2.png"]
    names += ["caf\udce9\n\x1b[1m.webp"]
    folder = tmp_path / "in" / "train" / "golden retriever"
    folder.mkdir(parents=True)
    for i, name in enumerate(names):
        Image.new("L", (8, 8), i).save(folder / name, "JPEG")
    prepare_folder(tmp_path / "out", tmp_path / "in", Output("webdataset"))
    path = tmp_path / "out" / "train" / "train-00000.tar"
    index = load(path.parent)
    with tarfile.open(path) as archive:
        assert tuple(archive.getnames()[::2]) == index.names
        assert "golden_retriever/it's_100_%_odd,_v1_2.png" in index.names
        assert "golden_retriever/caf%E9%0A%1B[1m.webp" in index.names
    with IndexCreator(str(path), str(tmp_path / "theirs.idx"), verbose=False) as creator:
        assert [m[0] for m in creator._get_data_tarfile()][::2] == index.offset.tolist()
    assert index.classes == ("golden retriever",)
    assert len(read_with_dali("webdataset", [path], len(index))) == len(names)
    prepare_folder(tmp_path / "copy", tmp_path / "in", Output(resize=9999))
    copies = ["caf%E9%0A%1B[1m.webp", *names[:-1]]
    assert sorted(tree(tmp_path / "copy" / "train" / "golden retriever")) == sorted(copies)
