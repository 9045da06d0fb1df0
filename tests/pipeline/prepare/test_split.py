"""Class folders divided into train and val: by class, by a seed, and by links."""

import os
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.pipeline import Output, prepare_folder
from tests.conftest import refused
from tests.pipeline.prepare.kills import tree

FOLDERS = Output(workers=1)


def write(folder, counts):
    """Write files that begin as JPEG images, each with content of its own."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.jpg").write_bytes(
                b"\xff\xd8\xff" + f"{name}{number}".encode()
            )
    return folder


def divided(source, out, split=0.25, output=FOLDERS):
    prepare_folder(out, source, output, split=split)
    return {name: tree(out / name) for name in ("train", "val")}


@settings(max_examples=20)
@given(
    counts=st.lists(st.integers(2, 15), min_size=1, max_size=3),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 99),
    below_train=st.booleans(),
)
def test_each_class_is_divided_by_its_share_and_the_seed(counts, share, seed, below_train):
    no_wait = mock.patch.multiple(os, sync=lambda: None, fsync=lambda file: None)
    with tempfile.TemporaryDirectory() as folder, no_wait:
        root = Path(folder)
        source = root / "source"
        images = source / "train" if below_train else source
        write(images, {f"class{i}": count for i, count in enumerate(counts)})
        everything, output = tree(images), Output(workers=1, seed=seed)
        found = divided(source, root / "a", share, output)
        assert found["train"] | found["val"] == everything
        assert not found["train"].keys() & found["val"].keys()
        for i, count in enumerate(counts):
            drawn = sum(name.startswith(f"class{i}/") for name in found["val"])
            assert 1 <= drawn <= count - 1
            assert abs(drawn - share * count) <= 1
        assert divided(source, root / "b", share, output) == found  # whenever and wherever


def test_another_seed_draws_other_images(tmp_path):
    source = write(tmp_path / "source", {"a": 40})
    outs = {seed: Output(seed=seed) for seed in range(3)}
    draws = {(*divided(source, tmp_path / f"{s}", output=o)["val"],) for s, o in outs.items()}
    assert len(draws) == 3
    refused(r"seed=1, not 2; valid", divided, source, tmp_path / "1", output=outs[2])
    refused(r"split=0.25, not 0.5; valid", divided, source, tmp_path / "0", 0.5)


def test_images_are_links_that_outlive_the_source(tmp_path):
    source = write(tmp_path / "source", {"a": 4})
    (tmp_path / "elsewhere.jpg").write_bytes(b"\xff\xd8\xff elsewhere")
    (source / "a" / "linked.jpg").symlink_to("../../elsewhere.jpg")
    wanted = tree(source)
    divided(source, tmp_path / "out")
    for path in (tmp_path / "out").rglob("*.jpg"):
        original = source / "a" / path.name
        assert not path.is_symlink()
        assert path.samefile(original)
    (source / "a" / "linked.jpg").unlink()
    (tmp_path / "elsewhere.jpg").unlink()
    source.rename(tmp_path / "moved")
    assert {k: v for s in ("train", "val") for k, v in tree(tmp_path / "out" / s).items()} == wanted


def test_they_are_copies_where_no_link_can_be(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(18, "Invalid cross-device link")

    source = write(tmp_path / "source", {"a": 4})
    monkeypatch.setattr(os, "link", link)
    found = divided(source, tmp_path / "out")
    assert found["train"] | found["val"] == tree(source)
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "out").rglob("*.jpg"))


def test_folders_that_cannot_be_divided_are_refused(tmp_path):
    source = write(tmp_path / "one", {"a": 4, "b": 1})
    refused("^--split: class 'b' has 1 image; valid: 2 or more", divided, source, tmp_path / "out")
    shards = Output("webdataset")
    refused("or --split 0.1 for one with", prepare_folder, tmp_path / "out", source, shards)
    write(tmp_path / "both" / "val", {"a": 2})
    refused("^--split: .*both has val/ already", divided, tmp_path / "both", tmp_path / "out")
    assert not (tmp_path / "out").exists()
