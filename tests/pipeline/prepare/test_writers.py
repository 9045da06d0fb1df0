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


def originals(photos, split):
    """Return bytes and label of each image by its name without extension."""
    return {name.rpartition(".")[0]: rest for name, *rest in images_of(photos / split)}


def load(folder):
    return Index.load((folder / INDEX_FILE).read_bytes(), "index")


@pytest.mark.parametrize("split", ["train", "val"])
def test_training_images_are_mixed_and_validation_images_in_order(shards, photos, split):
    index, wanted = load(shards / split), originals(photos, split)
    assert index.classes == ("ant", "bee", "cat")
    assert sorted(np.bincount(index.shard)) == ([17, 18, 18] if split == "train" else [11, 12])
    keys = [name.rpartition(".")[0] for name in index.names]
    assert [[crc, label] for crc, label in zip(index.crc32, index.labels, strict=True)] == [
        [zlib.crc32(wanted[key][0]), wanted[key][1]] for key in keys
    ]
    assert sorted(keys) == sorted(wanted)
    assert (keys == list(wanted)) == (split == "val")
    assert split == "val" or len({*index.labels[:18].tolist()}) == 3


def test_tarfile_and_wds2idx_agree_on_webdataset_shards(shards, photos, tmp_path):
    wanted = originals(photos, "train")
    for path in sorted((shards / "train").glob("*.tar")):
        with tarfile.open(path) as archive:
            infos = archive.getmembers()
            assert {info.mtime for info in infos} == {0}
            for image, label in zip(infos[::2], infos[1::2], strict=True):
                key = image.name.removesuffix(".jpeg")
                assert label.name == f"{key}.cls"
                content, number = wanted[key]
                assert archive.extractfile(image).read() == content
                assert archive.extractfile(label).read() == str(number).encode()
        assert path.stat().st_size % tarfile.RECORDSIZE == 0
        with IndexCreator(str(path), str(tmp_path / "theirs.idx"), verbose=False) as creator:
            creator.create_index()
        assert (tmp_path / "theirs.idx").read_text() == path.with_suffix(".idx").read_text()


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
