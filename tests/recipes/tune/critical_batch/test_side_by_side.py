"""Runs in processes of their own: what fails, is killed or loses its parent."""

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from threading import Thread

import pytest

from largebatch.recipes.errors import RecipeError, TrainingError
from largebatch.recipes.tune.critical_batch.runs import Base, Run
from largebatch.recipes.tune.critical_batch.side_by_side import _end_with_parent, make_side_by_side
from tests.recipes.tune.critical_batch.law import loaded

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def make(photos, tmp_path):
    """Make two runs, the second one with these overrides, and return the records kept."""

    def made(kept, *overrides):
        base = Base.of(loaded(photos), tmp_path / "out", 1)
        base.write()
        runs = [Run(8, 2.0, 0), Run(8, 2.0, 1)]
        changes = [base.overrides(run) for run in runs]
        changes[1] += overrides
        folders = [tmp_path / "run-0", tmp_path / "run-1"]
        make_side_by_side(base, runs, changes, folders, 2, kept.append)

    return made


@pytest.mark.slow("starts two processes that train")
def test_a_run_is_kept_where_its_neighbour_fails(make):
    kept = []
    with pytest.raises(RecipeError, match=r"model.name: no model 'unknown'"):
        make(kept, "model.name=unknown")
    (record,) = kept
    assert (record.run.seed, record.status) == (0, "finished")


def dies(**options):
    """Take the place of a model, and kill the process."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow("starts two processes that train")
def test_a_process_that_is_killed_is_said_in_a_line(make):
    with pytest.raises(TrainingError, match=r"--workers: the process of a run was killed.*; valid"):
        make([], f"model.name={__name__}:dies")


def child(path):
    Thread(target=_end_with_parent, daemon=True).start()
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(600)


def parent(path):
    process = SPAWN.Process(target=child, args=(path,))
    process.start()
    process.join()


def wait_until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_there(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # nobody may wait for it
    return False


@pytest.mark.slow("starts two processes, one after the other")
def test_a_process_ends_when_the_one_that_started_it_is_killed(tmp_path):
    first = SPAWN.Process(target=parent, args=(tmp_path / "pid",))
    first.start()
    wait_until((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    assert is_there(pid)
    first.kill()
    first.join()
    wait_until(lambda: not is_there(pid))
