"""The command line: readable help, and one line with exit code 2 for a user's mistake."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from largebatch import __version__
from largebatch.recipes.commands.tree import app
from largebatch.recipes.schema.keys import all_keys, schema
from largebatch.recipes.schema.names import recipe_names
from tests.recipes.runs import BASE

ROOT = Path(__file__).parents[3]


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def command(*arguments, module="largebatch.recipes", cwd=None, timeout=300, **environment):
    """Run a command in a new process, as a user does."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def listed(output):
    """The recipes in a list, of which those of one family stand in one row."""
    names = []
    for word in re.findall(r"^[a-z][\w-]+(?=  |,)|-b\d+(?=,|  )", output, re.MULTILINE):
        family = names[-1].rpartition("-b")[0] if names else ""
        names.append(family + word if word.startswith("-b") else word)
    return sorted(name for name in names if name in recipe_names())


def test_recipes_are_listed_and_shown(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # a pipe of no stated width
    result = run("recipes")
    assert result.exit_code == 0
    assert listed(result.output) == sorted(recipe_names())
    assert result.output.startswith("ImageNet ")
    family = r"\ncifar10-b256, -b1024, -b2560, -b4096, -b8192 +LARS, .* 79.0 to 72.0 %"
    assert re.search(family, result.output)
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = run("recipes", "list").output.splitlines()
        assert max(map(len, lines)) <= columns
        large = [name for name in recipe_names() if name.startswith(("resnet50", "alexnet"))]
        assert {*large} <= {line.split()[0] for line in lines if line}
        [flagship] = [line for line in lines if line.startswith("resnet50-b65536 ")]
        assert "75.9 %" in flagship
    shown = run("recipes", "show", "resnet50-b65536", "schedule.warmup=40ep")
    assert shown.exit_code == 0
    assert shown.output.startswith("# ResNet-50 v1.5 on ImageNet at batch 65,536")
    assert "batch_size: 65536" in shown.output
    assert "warmup: 40ep" in shown.output


def test_keys_are_explained_within_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    every = {key.name for key in all_keys()}
    of_optimizer = {name for name in every if name.startswith("optimizer.")}
    for section, expected in {(): every, ("optimizer",): of_optimizer}.items():
        lines = run("recipes", "keys", *section).output.splitlines()
        assert max(map(len, lines)) <= 80
        assert every & {line.partition(":")[0] for line in lines} == expected
        assert "optimizer.lr: number >= 0; required" in lines
    (first, *_) = run("recipes", "keys", "batch_size").output.splitlines()
    assert first == "batch_size: integer > 0; required"
    assert json.loads(run("recipes", "keys", "--json").output) == schema()
    assert run("--version").output == f"largebatch {__version__}\n"


def test_a_schedule_is_printed_without_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, _, *lines = run("schedule", "resnet50-b65536").stdout.splitlines()
    assert first == (
        "resnet50-b65536: 1,281,167 images (data.train_images, as there is no folder "
        "data/imagenet), batch 65,536, 19.55 steps per epoch, 1,740 steps"
    )
    assert list(tmp_path.iterdir()) == []
    points = {line.rsplit(maxsplit=3)[0].strip(): line.split()[-3:] for line in lines}
    assert [*points] == [
        *("start", "end of warm-up", "1/4 of decay", "1/2 of decay", "3/4 of decay"),
        *("last update", "end"),
    ]
    assert points["end of warm-up"] == ["606", "31.00", "24.699"]
    assert float(points["1/2 of decay"][2]) == pytest.approx(1e-4 + 24.6989 / 4, rel=1e-5)
    assert points["end"] == ["1,740", "89.01", "0.0001"]


def test_a_schedule_counts_the_images_that_are_there(photos, tmp_path):
    keys = [f"data.path={photos}", "batch_size=53", "micro_batch_size=53", "stop_after=12ep"]
    keys += ["schedule.name=step", "schedule.end=0", "schedule.milestones=[10ep,15ep]"]
    result = run("schedule", "digits", *keys, "--out", tmp_path / "mine.svg")
    assert result.stdout.startswith(f"digits: 53 images (in {photos}/train), batch 53, 1.00 steps")
    assert (tmp_path / "mine.svg").read_text().startswith("<?xml")
    assert re.search(r"\nmilestone 2 +\d+ +15.00 +0.04\n", result.stdout)
    assert re.search(r"\nstop_after +\d+ +12.00 ", result.stdout)


def test_the_loss_scale_to_use_is_printed(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = [f"data.path={photos}", *BASE, "batch_size=8"]
    result = run("tune", "precision", "digits", *keys, "--steps", 3)
    assert result.exit_code == 0, result.stderr
    assert result.output.startswith("digits, 3 steps in FP32")
    best, largest = (
        float(re.search(f"{words}([0-9.e+]+)", result.output)[1])
        for words in ("use: loss_scale=", r"\(a factor of [0-9]+\): ")
    )
    assert 1 <= best <= largest
    for name in ("fc", "all layers"):
        assert len(re.search(f"\n{name} (.*)", result.output)[1].split()) == 5  # shares
    assert list(tmp_path.iterdir()) == []  # nothing of the run is kept


def test_a_run_that_diverges_ends_with_one_line_and_exit_code_1(photos, tmp_path):
    keys = [f"data.path={photos}", *BASE, f"run_dir={tmp_path}", "optimizer.name=sgd"]
    keys += ["optimizer.lr=1e30", "schedule.warmup=0", "log_every=1", "evaluate_every=null"]
    result = run("train", "digits", *keys)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("largebatch: error: training diverged: the loss is nan at step")


@pytest.mark.slow("trains to 97 % on two processes")
def test_the_main_job_through_all_rooms(tmp_path, monkeypatch):
    """A short digits run as a user starts it: two processes, two nodes, then its page."""
    result = command("data", "prepare", "digits", "--out", "data/digits", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    options = ["epochs=8", "schedule.warmup=2ep", "run_dir=runs/short"]
    result = command("train", "digits", "--nproc", "2", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    batch = "  batch       256 = 64 images x 2 accumulated x 2 ranks on 2 nodes of 1; "
    assert batch in result.stdout
    assert "  all-reduce  hierarchical; buckets of 25 MiB; nodes by ranks_per_node" in result.stdout
    assert "runs/short/report.png" in result.stdout
    summary = json.loads((tmp_path / "runs/short/summary.json").read_text())
    assert (summary["world_size"], summary["backend"]) == (2, "dali-cpu")
    assert summary["precision"] in ("fp32", "bf16")
    assert summary["top1"] >= 97  # 98.5 and more in the whole recipe: main_job.py
    assert Image.open(tmp_path / "runs/short/report.png").size[0] > 800
    monkeypatch.chdir(tmp_path)
    assert run("report", "runs/short").stdout == "runs/short/report.html\n"
    assert "finished" in (tmp_path / "runs/short/report.html").read_text()


@pytest.mark.slow("trains twice")
def test_resume_takes_up_the_last_run_of_a_recipe(photos, tmp_path, monkeypatch, capsys):
    from largebatch.recipes.train import main

    monkeypatch.chdir(tmp_path)
    short = [f"data.path={photos}", "model.name=test_resnet", "precision=fp32"]
    short += ["batch_size=16", "micro_batch_size=null", "evaluate_every=null"]
    first = run("train", "digits", *short, "stop_after=5")
    assert first.exit_code == 0, first.output
    capsys.readouterr()
    main(["digits", *short, "--resume", "stop_after=8"])
    assert "step-00000005 at step 5" in capsys.readouterr().out
    [folder] = (tmp_path / "runs" / "digits").iterdir()
    assert json.loads((folder / "summary.json").read_text())["step"] == 8
