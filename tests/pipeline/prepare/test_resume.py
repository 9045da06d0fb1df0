"""Resuming the preparation of a data set, and refusing to resume another one."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from largebatch.pipeline import Output, prepare_folder
from tests.conftest import refused, write_images
from tests.pipeline.prepare.kills import tree

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    root = tmp_path_factory.mktemp("few")
    write_images(root / "train", {"ant": 4, "bee": 5})
    write_images(root / "val", {"ant": 2, "bee": 1}, seed=1)
    return root


@pytest.mark.parametrize("form", ["folder", "webdataset", "links"])
def test_a_preparation_killed_at_any_moment_resumes_to_the_same_bits(few, tmp_path, form):
    result = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.prepare.kills", few, tmp_path, form, "7"],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 40  # moments


class StopError(Exception):
    pass


def stop_at(images):
    def report(progress):
        if progress.what.startswith("writing") and progress.images >= images:
            raise StopError

    return report


OUTPUT = Output("webdataset", images_per_shard=2, workers=1)


@pytest.fixture
def unfinished(few, tmp_path):
    """A data set with 2 of 5 training shards written."""
    with pytest.raises(StopError):
        prepare_folder(tmp_path / "out", few, OUTPUT, report=stop_at(5))
    return tmp_path / "out"


HARM = {
    "cut": lambda path: os.truncate(path, 512),
    "another": lambda path: shutil.copy(path.with_name("train-00000.tar"), path),
    "bytes": lambda path: path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("harm", HARM)
def test_damaged_shards_are_named_and_written_again_once_removed(unfinished, few, tmp_path, harm):
    path = unfinished / "train.partial" / "train-00001.tar"
    HARM[harm](path)
    message = f"^{path}.*; remove this shard to write it again"
    refused(message, prepare_folder, unfinished, few, OUTPUT)
    assert not (unfinished / "train").exists()
    path.unlink()
    prepare_folder(unfinished, few, OUTPUT)
    prepare_folder(tmp_path / "uninterrupted", few, OUTPUT)
    assert tree(unfinished) == tree(tmp_path / "uninterrupted")


def test_images_without_content_are_written_again(few, tmp_path):
    """As a crash of the machine may leave them."""
    output = Output(resize=40, workers=1)
    with pytest.raises(StopError):
        prepare_folder(tmp_path / "out", few, output, report=stop_at(5))
    images = sorted((tmp_path / "out").rglob("*.JPEG"))
    assert len(images) == 5
    os.truncate(images[2], 0)
    prepare_folder(tmp_path / "out", few, output)
    prepare_folder(tmp_path / "uninterrupted", few, output)
    assert tree(tmp_path / "out") == tree(tmp_path / "uninterrupted")


@pytest.mark.parametrize("done", [False, True])
def test_other_settings_and_other_images_are_refused(unfinished, few, tmp_path, done):
    if done:
        prepare_folder(unfinished, few, OUTPUT)
    before = tree(unfinished)
    for changes, message in (
        ({"format": "folder", "resize": 9}, "with format=webdataset, not folder; resize=none, not"),
        ({"images_per_shard": 3}, "with images_per_shard=2, not 3"),
        ({"resize": 9}, "resize=none, not 9"),
        ({"seed": 5}, "with seed=0, not 5"),
        ({"images_per_shard": None, "shard_bytes": 9}, "images_per_shard=2, not none; shard_bytes"),
    ):
        refused(message, prepare_folder, unfinished, few, replace(OUTPUT, **changes))
    write_images(tmp_path / "other" / "train", {"ant": 4, "bee": 6})
    (tmp_path / "other" / "val").symlink_to(few / "val")
    message = f"was {'written' if done else 'started'} from other images than train has now"
    refused(message, prepare_folder, unfinished, tmp_path / "other", OUTPUT)
    (tmp_path / "other" / "val").unlink()
    message = "splits=train val, not train"
    refused(message, prepare_folder, unfinished, tmp_path / "other", OUTPUT)
    assert tree(unfinished) == before


def test_threads_and_repeated_calls_have_no_effect(few, tmp_path):
    for workers in (1, 5):
        output = Output("webdataset", images_per_shard=2, workers=workers)
        prepare_folder(tmp_path / str(workers), few, output)
    assert tree(tmp_path / "1") == tree(tmp_path / "5")
    names = tree(tmp_path / "1")
    assert prepare_folder(tmp_path / "1", few, output) == {"train": 9, "val": 3}
    assert tree(tmp_path / "1") == names


def test_a_finished_data_set_with_a_missing_part_is_refused(few, tmp_path):
    for form, lost in (("webdataset", "val-00000.tar"), ("folder", "ant/000.JPEG")):
        out, output = tmp_path / form, Output(form, images_per_shard=9, resize=40)
        prepare_folder(out, few, output)
        (out / "val" / lost).unlink()
        refused(rf"remove {out} to write it again", prepare_folder, out, few, output)


def test_two_processes_cannot_write_the_same_folder(few, tmp_path):
    out, reported = tmp_path / "out", []

    def again(progress):
        if progress.images == 3 and not reported:
            reported.append(1)
            message = f"{out} is being written by another process"
            refused(message, prepare_folder, out, few, OUTPUT)

    prepare_folder(out, few, OUTPUT, report=again)
    assert reported


def test_a_full_disk_is_reported_and_complete_shards_are_not_written_again(
    few, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    rename = os.replace

    def full(source, target):
        if "train-00002" in str(target):
            raise OSError(28, "No space left on device")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        message = f"{out} cannot be written: No space left on device"
        refused(message, prepare_folder, out, few, OUTPUT)
    complete = {path.name: path.stat().st_mtime_ns for path in out.rglob("*.tar")}
    assert sorted(complete) == ["train-00000.tar", "train-00001.tar"]
    assert prepare_folder(out, few, OUTPUT) == {"train": 9, "val": 3}
    for name, time in complete.items():
        assert (out / "train" / name).stat().st_mtime_ns == time
    assert sorted(os.listdir(out)) == ["prepare.json", "train", "val"]


RESIZED = {  # mode and size, name, and name, mode and size afterwards
    "alpha.png": (("RGBA", (300, 80)), "alpha.jpeg", ("RGB", (150, 40))),
    "cmyk.jpeg": (("CMYK", (64, 64)), "cmyk.jpeg", ("RGB", (40, 40))),
    "deep.png": (("I;16", (80, 80)), "deep.jpeg", ("RGB", (40, 40))),
    "grey.JPEG": (("L", (60, 90)), "grey.JPEG", ("L", (40, 60))),
    "small.png": (("RGB", (999, 40)), "small.png", ("RGB", (999, 40))),
    "wide.jpg": (("RGB", (200, 100)), "wide.jpg", ("RGB", (80, 40))),
}


def test_large_images_are_resized_and_small_ones_kept(tmp_path):
    folder, out = tmp_path / "in" / "train" / "a", tmp_path / "out" / "train" / "a"
    folder.mkdir(parents=True)
    for name, ((mode, size), _, _) in RESIZED.items():
        Image.new(mode, size, 0x8000 if mode == "I;16" else 0).save(folder / name)
    prepare_folder(tmp_path / "out", tmp_path / "in", Output("folder", resize=40, quality=80))
    images = {path.name: Image.open(path) for path in sorted(out.iterdir())}
    found = {name: (image.mode, image.size) for name, image in images.items()}
    assert found == {name: wanted for _, name, wanted in RESIZED.values()}
    assert abs(np.asarray(images["deep.jpeg"]).astype(int) - 0x80).max() <= 1
    assert (out / "small.png").read_bytes() == (folder / "small.png").read_bytes()


def test_a_file_that_is_not_an_image_is_named(tmp_path):
    folder = tmp_path / "in" / "train" / "a"
    folder.mkdir(parents=True)
    for content, message in (
        (b"", "is empty: remove it; largebatch data check lists all"),
        (b"<html>", "does not start as an image file: remove it"),
        (b"\xff\xd8\xff\xe0", "cannot be decoded: "),
    ):
        (folder / "bad.jpeg").write_bytes(content)
        arguments = tmp_path / "out", tmp_path / "in", Output("webdataset", resize=30)
        refused(f"train/a/bad.jpeg {message}", prepare_folder, *arguments)
        assert not (tmp_path / "out").exists()


def test_impossible_settings_and_missing_folders_are_refused(few, tmp_path):
    refused("unknown format 'tfrecord'; valid: folder, webdataset$", Output, "tfrecord")
    for name, value, valid in (
        *((name, 0, "at least 1") for name in ("images_per_shard", "shard_bytes", "resize")),
        ("quality", 101, "at most 100"),
        ("seed", -1, "at least 0"),
    ):
        refused(f"{name}: {value} is too .*; valid: {valid}", Output, **{name: value})
    refused("is not empty and is not this data set", prepare_folder, few, few, OUTPUT)
    message = r"nothing to do: .*; valid: --split, --format or --resize"
    refused(message, prepare_folder, tmp_path / "out", few, Output())
    message = r"SRC: .*/nowhere has neither a folder train nor val"
    refused(message, prepare_folder, tmp_path / "out", tmp_path / "nowhere", OUTPUT)
    assert not (tmp_path / "out").exists()
