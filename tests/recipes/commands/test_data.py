"""The commands for data sets: their output, and one line for a user's mistake."""

import io
import json
import shutil
import tarfile

from rich.console import Console

from largebatch.pipeline import Progress
from largebatch.recipes.commands.data_progress import Bar, describe
from tests.recipes.commands import test_app


def run(*arguments):
    return test_app.run("data", *arguments)


def test_a_folder_becomes_shards_that_are_checked(photos, tmp_path):
    out = tmp_path / "shards"
    command = ("prepare", "folder", photos, "--format", "webdataset", "--out", out)
    for _ in range(2):
        result = run(*command, "--images-per-shard", "20")
        assert result.exit_code == 0, result.output
        assert result.stdout == f"{out}: 53 images in train, 23 images in val\n"
    assert "writing train and val: " not in result.stderr  # it was there
    result = run("check", out)
    assert result.exit_code == 0, result.output
    shards = len(list((out / "train").glob("*.tar")))
    assert shards > 2
    lines = [line.split("  ") for line in result.stdout.splitlines()]
    rows = {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    assert rows["stored as"][0] == f"webdataset, {shards} shards"
    assert rows["images"] == ["53", "23"]
    assert rows["images per class *"] == ["16, 17, 20", "1, 9, 13"]
    assert result.stdout.splitlines()[-1] == f"{out}: no problem that stops training"
    assert result.stderr.splitlines()[0].startswith("checking train: 0 of 53 images, ")
    findings = json.loads(run("check", out, "--json").stdout)
    assert findings["usable"] is True
    assert findings["splits"][0]["kinds"] == {"JPEG RGB": 53}


def test_what_stops_training_and_damaged_images_give_exit_code_1(photos, tmp_path):
    data = shutil.copytree(photos, tmp_path / "data")
    path = data / "val" / "ant" / "cut.JPEG"
    path.write_bytes((data / "train" / "ant" / "000.JPEG").read_bytes()[:-100] + b"\xff\xd9")
    result = run("check", data)
    assert result.exit_code == 1
    verdict = "damaged images: 1, refused by data.verify=strict; no problem that stops training"
    assert result.stdout.endswith(f"{data}: {verdict}\n")
    shutil.copy(data / "train/ant/000.JPEG", data / "val/ant/copy.JPEG")
    for i in range(12):
        (data / "train" / "ant" / f"empty{i:02d}.jpeg").touch()
    result = run("check", data)
    assert result.exit_code == 1
    what = "Corrupt JPEG data: premature end of data segment"
    for part in (
        "stops training (12):\n",
        f"  {data}/train/ant/empty00.jpeg: it is empty\n",
        "  and 2 more; --json has them\n",
        f"both train and val (1):\n  {data}/train/ant/000.JPEG = {data}/val/ant/copy.JPEG\n",
        f"damaged (1):\n  {path}: {what}\n",
    ):
        assert part in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("damaged "))
    assert row.split() == ["damaged", "0", "1"]
    assert result.stdout.endswith("; 12 problems that stop training\n")
    result = run("check", data, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
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


def shown(is_terminal, *progress):
    """What a bar leaves on the screen at the end of its work."""
    console = Console(force_terminal=is_terminal, width=120, record=True, file=io.StringIO())
    with Bar(console) as bar:
        for each in progress:
            bar(each)
        bar._bars.refresh()
    return console.export_text().splitlines()


WORK = [Progress("writing", images, images * 1000, 500, 500_000) for images in range(0, 501, 5)]


def test_a_terminal_has_a_bar_and_a_file_a_line_for_each_task():
    assert any("500 of 500 images, 500.0 kB of 500.0 kB, " in line for line in shown(True, *WORK))
    lines = shown(False, *WORK, Progress("verifying val"), Progress("indexing", total_bytes=10))
    assert lines == [
        "writing: 0 of 500 images, 0 bytes of 500.0 kB",
        "verifying val",
        "indexing: 0 bytes of 10 bytes",
    ]


def test_work_is_told_in_images_and_bytes():
    for progress, text in (
        (WORK[1], "5 of 500 images, 5.0 kB of 500.0 kB, 2 images/s"),
        (Progress("", bytes=4_000_000, total_bytes=10**10), "4.0 MB of 10.0 GB, 2.0 MB/s"),
        (Progress("", 3, total_images=1000), "3 of 1,000 images, 2 images/s"),
    ):
        assert describe(progress, 2.0) == text


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
