"""The list of runs: their state from what is in their folders, whatever is in there."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from largebatch.recipes.commands.runs import lines
from largebatch.recipes.schema.names import RECIPE
from largebatch.recipes.training.folder.lock import locked
from largebatch.recipes.training.folder.names import ENDING, LOCK, METRICS, SUMMARY
from largebatch.recipes.training.folder.outcome import find_runs, outcome_of
from tests.recipes.commands.test_app import command, run
from tests.recipes.runs import leave_lock

TRAIN = {"split": "train", "step": 5, "epoch": 0.5, "loss": 1.25, "top1": 40.0, "seconds": 30.0}
VAL = {"split": "val", "step": 10, "epoch": 1.0, "loss": 1.0, "top1": 61.5, "seconds": 2.0}
#: The default folder of a run, in `runs`.
JIA = "resnet50-jia-b65536/2026-01-31_10-00-00"
LAST = {**TRAIN, "step": 12, "epoch": 1.2, "seconds": 60.5}


def write_run(folder, *lines, ending=None, summary=None, recipe="digits", batch=256):
    """Write the folder of a run as the trainer leaves it."""
    folder.mkdir(parents=True)
    (folder / RECIPE).write_text(
        f"# The recipe {recipe} as it ran.\nbatch_size: {batch}\nepochs: 2\n"
        "optimizer: {name: lars, lr: 1.0}\n"
    )
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, content in ((ENDING, ending), (SUMMARY, summary)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def test_a_run_is_told_from_its_files(tmp_path):
    ending = {"status": "stopped", "reason": "x"}
    folder = write_run(tmp_path / "a", {"split": "val"}, TRAIN, VAL, LAST, ending=ending)
    with (folder / METRICS).open("a") as file:
        file.write('{"split": "tr')
    found = outcome_of(folder)
    assert (found.recipe, found.batch_size, found.optimizer) == ("digits", 256, "lars")
    assert (found.state, found.reason, found.epochs) == ("stopped", "x", 2)
    assert (found.step, found.epoch, found.top1, found.train_loss) == (12, 1.2, 61.5, 1.25)
    assert found.seconds == 90.5  # of training, without that of evaluation
    assert found.changed == (folder / METRICS).stat().st_mtime
    assert found.damaged_lines == 1  # the other one is not complete yet
    assert lines([found], tmp_path, 80)[2] == "  a: x; damaged lines of metrics: 1"
    # Of a run that finished, its summary tells more.
    summary = {"step": 20, "total_steps": 40, "epoch": 2.0, "top1": 70.0, "best_top1": 71.0}
    summary |= {"ema_top1": 72.0, "train_loss": 0.5, "train_seconds": 99.0}
    found = outcome_of(write_run(tmp_path / "b", ending={"status": "finished"}, summary=summary))
    assert found.state == "finished"
    assert found.reason == "at step 20 of 40, by stop_after or target_accuracy"
    assert (found.top1, found.best_top1, found.ema_top1, found.seconds) == (70, 71, 72, 99)


def test_the_state_is_that_of_the_record_or_else_of_the_other_files(tmp_path):
    unknown, early = "its end is not recorded", {"step": 12, "total_steps": 40}
    for number, (files, *expected) in enumerate(
        (
            ({"ending": {"status": "diverged", "reason": "nan"}}, "diverged", "nan"),
            ({"ending": {"status": "failed", "reason": "disk"}}, "failed", "disk"),
            ({"summary": {"step": 12}}, "finished", ""),
            ({"summary": early, "ending": {"status": "stopped"}}, "stopped", ""),
            ({}, "stopped", unknown),
            ({"ending": ["not", "an", "object"]}, "stopped", unknown),
            ({"ending": {"status": "asleep"}}, "stopped", unknown),
        )
    ):
        found = outcome_of(write_run(tmp_path / f"{number}", TRAIN, VAL, LAST, **files))
        assert [found.state, found.reason] == expected, files


def test_a_run_whose_process_lives_is_running_whatever_else_is_there(tmp_path):
    folder = write_run(tmp_path / "a", TRAIN, VAL, LAST, summary={"step": 4})
    with locked(folder):
        found = outcome_of(folder)
    assert (found.state, found.step) == ("running", 12)
    assert found.reason.startswith("train at step 12, loss 1.250, top-1 40.00 %, ")
    assert found.reason.endswith(" s ago")
    with locked(write_run(tmp_path / "b")):
        assert outcome_of(tmp_path / "b").reason == "no metrics yet"


def test_a_run_whose_process_was_killed_has_failed(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    folder = write_run(tmp_path / "a", TRAIN, summary={"step": 4})
    leave_lock(folder, pid=child.pid)
    found = outcome_of(folder)
    where = f"process {child.pid} of {socket.gethostname()}"
    assert found.state == "failed"
    assert found.reason == f"{where} ended without a word, as if it was killed"


def test_a_process_of_another_machine_lives_by_its_signs_of_life(tmp_path):
    folder = write_run(tmp_path / "a", TRAIN)
    leave_lock(folder, host="elsewhere")
    before = sorted(folder.iterdir())
    assert outcome_of(folder).state == "running"
    os.utime(folder / LOCK, (time.time() - 200,) * 2)
    assert outcome_of(folder).state == "failed"
    assert sorted(folder.iterdir()) == before  # looking leaves no file


def test_runs_are_found_at_any_depth_and_other_folders_are_not(tmp_path):
    for name in ("b", "a/one", "a/two", "a/two/inner", "deep/er/still"):
        write_run(tmp_path / name)
    write_run(tmp_path / "b" / "checkpoints" / "copy")  # not a run of its own
    write_run(tmp_path / ".hidden")
    (tmp_path / "notes").mkdir()
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / RECIPE).write_text("extends: digits\n")  # as `tune lr` writes it
    found = [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)]
    assert found == ["a/one", "a/two", "a/two/inner", "b", "deep/er/still"]
    assert list(find_runs(tmp_path / "b")) == [tmp_path / "b"]


@pytest.fixture
def several(tmp_path):
    """Three runs under tmp_path."""
    write_run(
        tmp_path / JIA, TRAIN, VAL, LAST,
        recipe="resnet50-jia-b65536", batch=65536,
        ending={"status": "diverged", "reason": "the loss is nan at step 12 of "
                "1,740, learning rate 29"},
    )  # fmt: skip
    write_run(tmp_path / "mine", TRAIN, {**VAL, "top1": 99.0}, ending={"status": "finished"})
    write_run(tmp_path / "empty", ending={"status": "failed", "reason": "no room"})
    return tmp_path


def test_the_table_fits_its_terminal_and_a_pipe_gets_a_whole_line_for_each_run(
    several, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("runs", several).output.splitlines()
    assert max(map(len, shown)) == 80
    rows = [" ".join(line.split()) for line in shown]
    assert rows[:6] == [
        "recipe batch optimizer top-1 epochs time state",
        *("digits 256 lars – – – failed", "empty: no room"),  # noqa: RUF001
        *("digits 256 lars 99.00 % 1.0 30 s finished", "mine"),
        "resnet50-jia-b65536 65,536 lars 61.50 % 1.2 of 2 90 s diverged",
    ]
    assert shown[6].startswith(f"  {JIA}: the loss is nan at step ")
    assert shown[7:] == ["3 runs: 1 diverged, 1 failed, 1 finished"]
    monkeypatch.delenv("COLUMNS")
    _, _, _, whole, _ = run("runs", several).output.splitlines()
    assert whole.endswith(f"  {JIA}: the loss is nan at step 12 of 1,740, learning rate 29")


def test_runs_are_sorted(several):
    for options, order in {
        "": ["empty", "mine", JIA],
        "--sort top1": ["empty", JIA, "mine"],
        "--sort batch --reverse": [JIA, "mine", "empty"],
    }.items():
        found = json.loads(run("runs", several, "--json", *options.split()).output)
        assert [entry["folder"] for entry in found] == [str(several / name) for name in order]
    jia = found[0]
    assert jia["reason"] == "the loss is nan at step 12 of 1,740, learning rate 29"
    assert (jia["state"], jia["top1"], jia["batch_size"]) == ("diverged", 61.5, 65536)


def test_names_that_cannot_be_printed_are_shown_by_their_bytes(tmp_path):
    name = os.fsdecode(b"run-\xff\x1b[31m\n")
    ending = {"status": "failed", "reason": f"{name} cannot be read"}
    write_run(tmp_path / name, TRAIN, ending=ending)
    result = command("runs", tmp_path, PYTHONIOENCODING="utf-8:strict", COLUMNS="200")
    assert (result.returncode, result.stderr) == (0, "")
    shown = "run-%FF%1B[31m%0A"
    assert result.stdout.splitlines()[2:] == [
        f"  {shown}: {shown} cannot be read",
        "1 run: 1 failed",
    ]
