"""Disks that are full, and folders that vanish: training goes on, and nothing is lost."""

import errno
import os
import resource
from contextlib import contextmanager
from unittest import mock

import pytest

from largebatch.recipes.errors import StorageError
from largebatch.recipes.training import trainer as trainer_module
from largebatch.recipes.training.folder.checkpoint import newest_intact
from largebatch.recipes.training.trainer import Trainer
from largebatch.recipes.training.watch.trackers import TensorBoard
from largebatch.recipes.tune.trial import measure
from tests.ranks import run_ranks
from tests.recipes.runs import (
    BASE,
    JOB,
    assert_same,
    checkpoints,
    make,
    refused,
    timeless,
    train,
    weights,
)

KEYS = ("optimizer.lr=0.1", "micro_batch_size=16", "checkpoint.every=2", "checkpoint.keep=9")
KEYS += ("log_every=1",)
FULL = 100_000  # bytes: less than a checkpoint takes, and more than all other files


@contextmanager
def full_disk(size=FULL):
    """No file may grow beyond a size, as on a disk that is full or a quota that is used up."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def full_from(trainer, first, last, size=FULL):
    """Let the disk be full while the checkpoints of steps ``first`` to ``last`` are written."""
    save = trainer._save

    def saves(**options):
        if first <= trainer.step <= last:
            with full_disk(size):
                save(**options)
        else:
            save(**options)

    trainer._save = saves


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    """The weights and the metrics of a run that finds room."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(photos, folder, *KEYS), timeless(folder)


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow("trains until a disk is full")
def test_a_run_goes_on_and_writes_what_found_no_room_later(
    photos, whole, tmp_path, monkeypatch, capsys
):
    """A checkpoint is left out, lines of metrics wait, and a tracker fails twice and at the end."""
    run, tries, pwrite, on_log = tmp_path / "run", [], os.pwrite, TensorBoard.on_log

    def nearly_full(file, content, offset):
        if os.readlink(f"/proc/self/fd/{file}").endswith("metrics.jsonl"):
            tries.append(offset)
            if 3 <= len(tries) <= 8:
                if len(tries) % 2 == 0:
                    no_space()
                content = content[: len(content) // 2]  # a part of a line fits
        return pwrite(file, content, offset)

    def logs(tracker, metrics):
        if 2 < metrics.step < 5:
            no_space()
        on_log(tracker, metrics)

    monkeypatch.setattr(os, "pwrite", nearly_full)
    monkeypatch.setattr(TensorBoard, "on_log", logs)
    monkeypatch.setattr(TensorBoard, "on_end", no_space)
    trainer = make(photos, run, *KEYS, "track=[tensorboard]")
    full_from(trainer, 4, 5)
    trainer.run()
    monkeypatch.undo()
    assert_same(weights(trainer), whole[0])
    assert timeless(run) == whole[1]
    assert checkpoints(run) == [2, 6, 7]
    assert (run / "weights.pt").exists()
    output = " ".join(capsys.readouterr().err.split())
    assert "checkpoint: that of step 4 is not written: " in output
    assert "MB are needed, " in output
    assert f"the newest checkpoint is {run}/checkpoints/step-00000002" in output
    warning = f"No space left on device: '{run}/metrics.jsonl'; training goes on"
    assert (output.count(warning), output.count("callback tensorboard: ")) == (1, 2)


@pytest.mark.slow("trains until a disk is full")
def test_a_last_checkpoint_that_finds_no_room_ends_the_run_with_one_line(photos, whole, tmp_path):
    trainer = make(photos, tmp_path / "run", *KEYS)
    full_from(trainer, 5, 9)
    message = refused(trainer.run, kind=StorageError)
    assert message.startswith("checkpoint: that of step 7 is not written: ")
    assert "step-00000004; make room, and continue with resume=true" in message
    path, _, damaged = newest_intact(tmp_path / "run" / "checkpoints")
    assert (path.name, damaged) == ("step-00000004", [])
    assert not list((tmp_path / "run" / "checkpoints").glob(".*partial"))
    # With room again, the run ends as if nothing had been.
    assert_same(train(photos, tmp_path / "run", *KEYS, "resume=true"), whole[0])


def train_while_full(root, run_dir):
    trainer = make(root, run_dir, *KEYS, "micro_batch_size=8")
    if trainer.job.rank == 1:  # one of the ranks alone finds no room
        full_from(trainer, 4, 4, size=1000)
    trainer.run()
    return checkpoints(run_dir)


@pytest.mark.slow("two ranks, each a process that imports torch")
def test_all_ranks_go_on_when_one_finds_no_room(photos, tmp_path):
    found, same = run_ranks(2, train_while_full, photos, tmp_path / "run")
    assert found == same == [2, 6, 7]


def test_results_that_find_no_room_end_the_run_with_one_line(photos, tmp_path):
    trainer = make(photos, tmp_path / "run", *KEYS)
    finish = trainer._finish

    def without_room():
        with full_disk():
            return finish()

    trainer._finish = without_room
    message = refused(trainer.run, kind=StorageError)
    assert message.startswith(f"run_dir: the results cannot be written: {tmp_path}/run/weights.pt")
    assert "step-00000007; make room, and run the same command with resume=true" in message
    assert not list((tmp_path / "run").glob("*weights*"))
    # Once there is room, the same command writes them.
    assert make(photos, tmp_path / "run", *KEYS, "resume=true").run()["step"] == 7
    assert (tmp_path / "run" / "weights.pt").exists()


def test_a_search_does_not_take_a_full_disk_for_divergence(photos, tmp_path, monkeypatch):
    error = StorageError("checkpoint: that of step 7 is not written")
    monkeypatch.setattr(Trainer, "run", mock.Mock(side_effect=error))
    here = [*BASE, f"data.path={photos}", "data.holdout=13"]
    with pytest.raises(StorageError):
        measure("digits", here, JOB, tmp_path / "run")


def test_a_start_without_room_is_one_line(photos, tmp_path, monkeypatch):
    trainer = make(photos, tmp_path / "run", *KEYS)
    replace = os.replace

    def full(source, target):
        if str(target).endswith("metrics.jsonl"):
            no_space()
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    assert "metrics.jsonl cannot be written: No space left on device" in refused(trainer.run)


def test_the_best_checkpoint_stays_when_a_better_one_finds_no_room(photos, tmp_path, monkeypatch):
    found = iter([30.0, 40.0, 80.0, 50.0, 60.0, 60.0, 70.0])
    monkeypatch.setattr(
        trainer_module, "evaluate", lambda *_: {"loss": 1.0, "top1": next(found), "top5": 90.0}
    )
    keys = ["evaluate_every=1", "checkpoint.every=3", "checkpoint.keep=1"]
    trainer = make(photos, tmp_path, *KEYS, *keys, "checkpoint.keep_best=true")
    full_from(trainer, 3, 4)
    with open("/dev/full", "w") as full:  # nor is there room for lines that are printed
        trainer.display.console.file = full
        trainer.run()
        monkeypatch.setattr(full, "close", lambda: None, raising=False)
    assert checkpoints(tmp_path) == [7]  # 70 %; at 80 % there was no room
