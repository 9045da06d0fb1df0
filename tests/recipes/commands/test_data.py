"""The commands for data sets: their output, and one line for a user's mistake."""

import io
import json
import shutil
import tarfile

import pytest
from rich.console import Console
from typer.testing import CliRunner

from largebatch.pipeline import Progress
from largebatch.recipes.commands.data_progress import Bar, size
from largebatch.recipes.commands.tree import app


def run(*arguments):
    return CliRunner().invoke(app, ["data", *(str(a) for a in arguments)])


@pytest.fixture
def data(photos, tmp_path):
    """A copy of the photos."""
    return shutil.copytree(photos, tmp_path / "data")


NAMES = ("digits", "cifar10", "imagenet", "folder")


@pytest.mark.parametrize("words", [["check"], ["index"], *(["prepare", name] for name in NAMES)])
def test_every_command_has_help(words):
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "--workers" in result.output or words == ["index"]


def test_a_folder_becomes_shards_that_are_checked(photos, tmp_path):
    out = tmp_path / "shards"
    command = ("prepare", "folder", photos, "--format", "webdataset", "--out", out)
    for _ in range(2):
        result = run(*command, "--shard-bytes", "20kB")
        assert result.exit_code == 0, result.output
        assert result.stdout == f"{out}: 53 images in train, 23 images in val\n"
    assert "writing train and val: 76 images, " not in result.stderr  # it was there
    result = run("check", out, "--json", tmp_path / "found.json")
    assert result.exit_code == 0, result.output
    findings = json.loads((tmp_path / "found.json").read_text())
    shards = len(list((out / "train").glob("*.tar")))
    assert shards > 2
    lines = [line.split("  ") for line in result.stdout.splitlines()]
    rows = {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    assert rows["stored as"][0] == f"webdataset, {shards} shards"
    assert rows["images"] == ["53", "23"]
    assert rows["images per class *"] == ["16, 17, 20", "1, 9, 13"]
    assert result.stdout.splitlines()[-1] == f"{out}: no problem that stops training"
    assert findings["usable"] is True
    assert findings["splits"][0]["kinds"] == {"JPEG RGB": 53}
    assert result.stderr.splitlines()[0].startswith("checking train: 53 images, ")


def test_what_stops_training_and_damaged_images_give_exit_code_1(data, tmp_path):
    path = data / "val" / "ant" / "cut.JPEG"
    path.write_bytes((data / "train" / "ant" / "000.JPEG").read_bytes()[:-100] + b"\xff\xd9")
    result = run("check", data)
    assert result.exit_code == 1
    verdict = "damaged images: 1, refused by data.verify=strict; no problem that stops training"
    assert result.stdout.endswith(f"{data}: {verdict}\n")
    shutil.copy(data / "train/ant/000.JPEG", data / "val/ant/copy.JPEG")
    for i in range(12):
        (data / "train" / "ant" / f"empty{i:02d}.jpeg").touch()
    result = run("check", data, "--json", tmp_path / "found.json")
    assert result.exit_code == 1
    what = "Corrupt JPEG data: premature end of data segment"
    for part in (
        "stops training (12):\n",
        f"  {data}/train/ant/empty00.jpeg: it is empty\n",
        "  and 2 more; --json FILE has them\n",
        f"both train and val (1):\n  {data}/train/ant/000.JPEG = {data}/val/ant/copy.JPEG\n",
        f"damaged (1):\n  {path}: {what}\n",
    ):
        assert part in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("damaged "))
    assert row.split() == ["damaged", "0", "1"]
    assert result.stdout.endswith("; 12 problems that stop training\n")
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["corrupt"]) == 12
    assert found["damaged"] == [{"name": str(path), "what": what}]
    assert found["usable"] is False


def test_archives_are_taken_by_their_options(photos, tmp_path):
    with tarfile.open(tmp_path / "files.tar.xz", "w:xz") as archive:
        archive.add(photos / "train", "train")
        archive.add(photos / "val", "test")
    command = ("prepare", "cifar10", "--archive", tmp_path / "files.tar.xz", "--allow-partial")
    result = run(*command, "--format", "webdataset", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path}/out: 53 images in train, 23 images in val\n"


FOLDER = ("prepare", "folder", "--out", "{tmp}/x", "{photos}")
BAD = {
    "data set": (("prepare", "mnist"), "'mnist'; valid: digits, cifar10, imagenet, folder"),
    "format": ((*FOLDER, "--format", "zip"), "unknown format 'zip'; valid: folder, webdataset"),
    "size": ((*FOLDER, "--shard-bytes", "big"), "--shard-bytes: 'big' is not a size; valid: such"),
    "no size": ((*FOLDER, "--shard-bytes", "0"), "shard_bytes: 0 is too small; valid: at least 1"),
    "nothing to do": (
        FOLDER,
        "the output would be the same folders; valid: --split, --format or --resize",
    ),
    "no train archive": (
        ("prepare", "imagenet", "--out", "{tmp}/x"),
        "--train-archive is missing: download ILSVRC2012_img_train.tar, 138 GB, from https://",
    ),
    "no archive": (
        ("prepare", "cifar10", "--out", "{tmp}/x", "--archive", "nowhere.tar"),
        "--archive: there is no file nowhere.tar: download cifar-10-python.tar.gz from",
    ),
    "no data": (("check", "{tmp}/nowhere"), "nowhere; valid: a data set, or its folder train or v"),
    "workers": (("check", "{photos}", "--workers", "0"), "--workers: 0 is too small; valid: at"),
    "json": (("check", "{photos}", "--json", "no/x.json"), "--json: there is no folder "),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_a_mistake_is_reported_in_one_line(photos, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = run(*(a.format(tmp=tmp_path, photos=photos) for a in arguments))
    assert result.exit_code == 2
    assert message.format(photos=photos) in result.output
    assert result.output.startswith("largebatch: error: ")
    assert len(result.output.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_bar_shows_images_bytes_and_rates():
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    with Bar(console) as bar:
        for images in (0, 250, 500):
            bar._shown = 0.0  # as if time had passed
            bar(Progress("writing", images, images * 1000, 500, 500_000))
        bar._bars.refresh()
    text = console.export_text()
    assert "500 of 500 images, 500 kB of 500 kB, " in text
    assert "images/s" in text


def test_without_a_terminal_a_line_is_shown_at_the_start_and_after_a_while():
    console = Console(force_terminal=False, width=120, record=True, file=io.StringIO())
    with Bar(console) as bar:
        for images in range(0, 501, 5):
            bar(Progress("writing", images, images * 1000, 500, 500_000))
        bar._shown -= 31
        bar(Progress("writing", 500, 500_000, 500, 500_000))
        bar(Progress("verifying val"))
    lines = console.export_text().splitlines()
    assert lines[0] == "writing: 500 images, 500 kB"
    assert lines[1].startswith("writing: 500 of 500 images, 500 kB of 500 kB, ")
    assert lines[2:] == ["verifying val"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (147_897_477_120, "148 GB")],
)
def test_sizes_are_readable(count, text):
    assert size(count) == text


def test_shards_of_other_tools_get_an_index(photos, tmp_path):
    out = tmp_path / "shards"
    assert run("prepare", "folder", photos, "--format", "webdataset", "--out", out)
    (out / "train" / "index.npz").unlink()
    result = run("index", out / "train", "--checksums")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        f"{out}/train/index.npz: 53 images of 3 classes in 1 shards of webdataset\n"
    )
    (tmp_path / "names.txt").write_text("ant\nbee\ncat\n")
    result = run("index", out / "train", "--classes", tmp_path / "names.txt")
    assert result.exit_code == 0, result.output
    assert run("check", out).exit_code == 0
    for arguments, what in (
        ((tmp_path / "nowhere",), "nowhere"),
        ((out / "train", "--format", "zip"), "zip"),
        ((out / "train", "--pattern", "no-*.tar"), "no-*.tar"),
        ((out / "train", "--classes", tmp_path / "none.txt"), "--classes: "),
        ((out / "train", "--label-offset", "1"), "label"),
    ):
        result = run("index", *arguments)
        assert result.exit_code == 2
        assert what in result.stderr.splitlines()[-1]
        assert (out / "train" / "index.npz").exists()
