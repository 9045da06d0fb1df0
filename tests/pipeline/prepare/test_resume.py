"""Going on after a kill, and refusing to go on with something else."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from largebatch.pipeline import DataError, Output, prepare_folder
from tests.conftest import write_images
from tests.pipeline.prepare.kills import tree

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    root = tmp_path_factory.mktemp("few")
    write_images(root / "train", {"ant": 4, "bee": 5})
    write_images(root / "val", {"ant": 2, "bee": 1}, seed=1)
    return root


@pytest.mark.parametrize("form", ["folder", "webdataset"])
def test_killed_at_any_moment_it_goes_on_to_the_same_bits(few, tmp_path, form):
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
def begun(few, tmp_path):
    """A data set of which 2 of 5 training shards were written."""
    with pytest.raises(StopError):
        prepare_folder(tmp_path / "out", few, OUTPUT, report=stop_at(5))
    return tmp_path / "out"


def shards(out):
    return sorted(path.name for path in out.rglob("*.tar"))


def test_whole_shards_are_not_written_again(begun, few):
    assert shards(begun) == ["train-00000.tar", "train-00001.tar"]
    before = {path: path.stat().st_mtime_ns for path in begun.rglob("*.tar")}
    prepare_folder(begun, few, OUTPUT)
    for path, time in before.items():
        assert (begun / path.relative_to(begun / ".preparing")).stat().st_mtime_ns == time
    assert not (begun / ".preparing").exists()


@pytest.mark.parametrize("harm", ["cut", "changed", "gone", "idx", "note"])
def test_shards_that_were_harmed_are_written_again(begun, few, tmp_path, harm):
    path = begun / ".preparing" / "train" / "train-00001.tar"
    if harm == "cut":
        os.truncate(path, 512)
    elif harm == "changed":
        content = bytearray(path.read_bytes())
        content[700] ^= 1
        path.write_bytes(content)
    elif harm == "gone":
        path.unlink()
    elif harm == "idx":
        path.with_suffix(".idx").write_text("v1.2 0\n")
    else:
        os.truncate(begun / ".preparing" / "notes" / "train-00001.npz", 100)
    prepare_folder(begun, few, OUTPUT)
    prepare_folder(tmp_path / "unbroken", few, OUTPUT)
    assert tree(begun) == tree(tmp_path / "unbroken")


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Output("tfrecord", images_per_shard=2), "with format=webdataset, not tfrecord: give the"),
        (Output("webdataset", images_per_shard=3), "with images_per_shard=2, not 3"),
        (Output("webdataset", images_per_shard=2, resize=9), "resize=none, not 9"),
        (Output("webdataset", images_per_shard=2, seed=5), "with seed=0, not 5"),
        (Output("webdataset", shard_bytes=9), "images_per_shard=2, not none; shard_bytes=none, n"),
    ],
)
def test_other_settings_are_refused_with_the_difference(begun, few, other, message, done):
    if done:
        prepare_folder(begun, few, OUTPUT)
    before = tree(begun)
    with pytest.raises(DataError, match=re.escape(message)):
        prepare_folder(begun, few, other)
    assert tree(begun) == before


@pytest.mark.parametrize("done", [False, True])
def test_other_images_are_refused(begun, few, tmp_path, done):
    if done:
        prepare_folder(begun, few, OUTPUT)
    write_images(tmp_path / "other" / "train", {"ant": 4, "bee": 6})
    (tmp_path / "other" / "val").symlink_to(few / "val")
    verb = "made" if done else "begun"
    with pytest.raises(DataError, match=f"was {verb} from other images than there are now in tra"):
        prepare_folder(begun, tmp_path / "other", OUTPUT)
    (tmp_path / "other" / "val").unlink()
    with pytest.raises(DataError, match="splits=train val, not train"):
        prepare_folder(begun, tmp_path / "other", OUTPUT)


def test_threads_and_the_number_of_calls_change_nothing(few, tmp_path):
    for workers in (1, 5):
        output = Output("tfrecord", images_per_shard=2, workers=workers)
        prepare_folder(tmp_path / str(workers), few, output)
    assert tree(tmp_path / "1") == tree(tmp_path / "5")
    names = tree(tmp_path / "1")
    prepare_folder(tmp_path / "1", few, output)
    assert tree(tmp_path / "1") == names


def test_a_finished_data_set_that_lost_a_part_is_told(few, tmp_path):
    for form, lost in (("webdataset", "val-00000.tar"), ("folder", "ant/000.JPEG")):
        out, output = tmp_path / form, Output(form, images_per_shard=9, resize=40)
        prepare_folder(out, few, output)
        (out / "val" / lost).unlink()
        with pytest.raises(DataError, match=rf"remove {out} to make it again"):
            prepare_folder(out, few, output)


def test_one_process_at_a_time(few, tmp_path):
    out, told = tmp_path / "out", []

    def again(progress):
        if progress.images == 3 and not told:
            told.append(1)
            with pytest.raises(DataError, match=f"{out} is being written by another process"):
                prepare_folder(out, few, OUTPUT)

    prepare_folder(out, few, OUTPUT, report=again)
    assert told


def test_a_disk_that_is_full_is_told_and_what_was_whole_stays(few, tmp_path, monkeypatch):
    out = tmp_path / "out"
    replace = os.replace

    def full(source, target):
        if "train-00002" in str(target):
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(DataError, match=f"{out} cannot be made: No space left on device"):
            prepare_folder(out, few, OUTPUT)
    assert shards(out) == ["train-00000.tar", "train-00001.tar"]
    assert prepare_folder(out, few, OUTPUT) == {"train": 9, "val": 3}


def test_what_was_written_says_how(few, tmp_path):
    prepare_folder(tmp_path / "out", few, Output("tfrecord", shard_bytes=10_000, resize=30))
    told = json.loads((tmp_path / "out" / "prepare.json").read_text())
    assert told["settings"]["resize"] == 30
    assert told["settings"]["quality"] == 90
    assert told["splits"]["train"]["images"] == 9
    assert told["splits"]["train"]["shards"] == len(list((tmp_path / "out/train").glob("*.idx")))


def test_images_are_made_smaller_and_those_that_are_small_kept(tmp_path):
    folder = tmp_path / "in" / "train" / "a"
    folder.mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (200, 100), "red").save(folder / "wide.jpg", exif=exif)
    Image.new("L", (60, 90)).save(folder / "grey.JPEG")
    Image.new("RGBA", (300, 80), "blue").save(folder / "alpha.png")
    Image.new("CMYK", (64, 64)).save(folder / "cmyk.jpeg")
    Image.new("RGB", (999, 40)).save(folder / "small.png")
    deep = np.full((80, 80), 0x8000, dtype=np.uint16)
    Image.fromarray(deep).save(folder / "deep.png")
    prepare_folder(tmp_path / "out", tmp_path / "in", Output("folder", resize=40, quality=80))
    out = tmp_path / "out" / "train" / "a"
    found = {}
    for path in sorted(out.iterdir()):
        with Image.open(path) as image:
            found[path.name] = (image.format, image.mode, image.size, image.getexif().get(0x0112))
    assert found == {
        "alpha.jpeg": ("JPEG", "RGB", (150, 40), None),
        "cmyk.jpeg": ("JPEG", "RGB", (40, 40), None),
        "deep.jpeg": ("JPEG", "RGB", (40, 40), None),
        "grey.JPEG": ("JPEG", "L", (40, 60), None),
        "small.png": ("PNG", "RGB", (999, 40), None),
        "wide.jpg": ("JPEG", "RGB", (80, 40), 6),
    }
    assert abs(np.asarray(Image.open(out / "deep.jpeg")).astype(int) - 0x80).max() <= 1
    assert (out / "small.png").read_bytes() == (folder / "small.png").read_bytes()


BAD = {
    "empty": (b"", "train/a/bad.jpeg is empty: remove it; largebatch data check lists all"),
    "text": (b"<html>", "train/a/bad.jpeg does not begin as an image does: remove it"),
    "cut": (b"\xff\xd8\xff\xe0", "train/a/bad.jpeg cannot be decoded: "),
    "folder": (None, "train/a/bad.jpeg cannot be read: Is a directory"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_a_file_that_is_no_image_is_named(few, tmp_path, content, message):
    folder = tmp_path / "in" / "train" / "a"
    folder.mkdir(parents=True)
    if content is None:
        (folder / "bad.jpeg").mkdir()
    else:
        (folder / "bad.jpeg").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare_folder(tmp_path / "out", tmp_path / "in", Output("tfrecord", resize=30))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "zip"}, "unknown format 'zip'; valid: folder, webdataset, tfrecord$"),
        ({"format": "recordio"}, "unknown format 'recordio'; valid: folder, webdataset, tfrecord$"),
        ({"images_per_shard": 0}, "images_per_shard is 0; it must be at least 1"),
        ({"shard_bytes": 0}, "shard_bytes is 0; it must be at least 1"),
        ({"resize": -1}, "resize is -1; it must be at least 1"),
        ({"quality": 101}, "quality is 101; it must be at most 100"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
    ],
)
def test_impossible_settings_are_told(options, message):
    with pytest.raises(DataError, match=message):
        Output(**options)


def test_folders_are_told_what_is_missing(few, tmp_path):
    with pytest.raises(DataError, match="nothing to do; give --format or --resize"):
        prepare_folder(tmp_path / "out", few, Output())
    with pytest.raises(DataError, match=r"--source: .*/nowhere has neither a folder train nor val"):
        prepare_folder(tmp_path / "out", tmp_path / "nowhere", OUTPUT)
    assert not (tmp_path / "out").exists()
