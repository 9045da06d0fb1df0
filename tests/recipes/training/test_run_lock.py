"""The lock of a run folder: one run at a time, and none is kept out by one that has ended."""

import json
import multiprocessing
import os
import re
import time

import pytest

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.training import run_lock
from largebatch.recipes.training.run_lock import LOCK, PATIENCE_SECONDS, locked
from tests.ranks import CONTEXT
from tests.recipes.runs import make, weights
from tests.recipes.training.test_resume import timeless

ELSEWHERE = {"machine": "elsewhere", "process": 7, "started": "1", "boot": "x", "namespace": "y"}


def left(folder, **changes):
    """Leave a lock in a folder, as another process would."""
    content = {**ELSEWHERE, "job": None, "restart": 0, "since": time.time(), **changes}
    (folder / LOCK).write_text(json.dumps(content))
    return folder / LOCK


def refused(folder):
    with pytest.raises(RecipeError) as error, locked(folder):
        pass
    return str(error.value)


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    with locked(tmp_path) as broken:
        assert broken == ""
        message = refused(tmp_path)
        assert f"run_dir: {tmp_path} is in use by process {os.getpid()} of " in message
        assert re.search(r"since \d{4}-\d\d-\d\d .*; valid: another run_dir, or this one", message)
        assert "\n" not in message
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path):
        pass


def hold(folder, held):
    with locked(folder):
        held.set()
        time.sleep(60)


@pytest.mark.slow("starts a process that imports torch")
def test_the_lock_of_a_killed_process_of_this_machine_is_taken_over(tmp_path):
    held = CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(tmp_path, held))
    process.start()
    assert held.wait(60)
    assert "is in use by process" in refused(tmp_path)
    process.kill()
    process.join()
    with locked(tmp_path) as broken:
        assert f"the lock of process {process.pid} of" in broken
    assert list(tmp_path.iterdir()) == []


def test_another_machine_is_waited_for_as_long_as_it_gives_signs_of_life(tmp_path):
    path = left(tmp_path)
    assert "process 7 of elsewhere" in refused(tmp_path)
    silent = time.time() - PATIENCE_SECONDS - 5
    os.utime(path, (silent, silent))
    with locked(tmp_path) as broken:
        assert broken == "the lock of process 7 of elsewhere is taken over: it has ended"


@pytest.mark.parametrize(
    ("theirs", "ours", "free"),
    [
        (("a", 0), ("a", 1), True),  # torchrun has restarted this job
        (("a", 1), ("a", 1), False),
        (("a", 0), ("b", 1), False),
        ((None, 0), ("none", 1), False),  # a job without a name is any job
    ],
)
def test_a_restarted_job_takes_the_lock_of_its_own_rank(tmp_path, monkeypatch, theirs, ours, free):
    left(tmp_path, job=theirs[0], restart=theirs[1])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", ours[0])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(ours[1]))
    if free:
        with locked(tmp_path):
            pass
    else:
        assert "is in use by" in refused(tmp_path)


def test_the_process_of_another_container_is_not_looked_for_here(tmp_path):
    """It may have the same name of the machine, and its numbers mean nothing here."""
    mine = run_lock._me()
    left(tmp_path, machine=mine["machine"], boot=mine["boot"], process=2**22 + 1)
    assert "is in use by" in refused(tmp_path)


def test_a_lock_that_cannot_be_read_is_replaced(tmp_path):
    (tmp_path / LOCK).write_text("{")
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()


def test_a_lock_taken_over_by_others_stays_theirs(tmp_path):
    """As after a suspended process has come back."""
    with locked(tmp_path):
        path = left(tmp_path)
    assert json.loads(path.read_text())["machine"] == "elsewhere"


def race(folder, start, results):
    start.wait()
    try:
        with locked(folder):
            results.put("held")
            time.sleep(1)
    except RecipeError:
        results.put("refused")


@pytest.mark.slow("starts six processes that import torch")
def test_one_of_many_processes_gets_a_lock_that_was_left(tmp_path):
    path = left(tmp_path)
    os.utime(path, (1, 1))
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=race, args=(tmp_path, start, results)) for _ in range(6)]
    for worker in workers:
        worker.start()
    start.set()
    found = sorted(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    assert found == ["held"] + ["refused"] * 5
    assert list(tmp_path.iterdir()) == []


RUN = ("optimizer.lr=0.1", "micro_batch_size=16", "checkpoint.every=2", "evaluate_every=null")


def test_two_runs_do_not_share_a_folder(photos, tmp_path):
    run = tmp_path / "run"
    first = make(photos, run, *RUN)
    second = make(photos, run, *RUN)
    seen = []

    class Meanwhile:
        def __call__(self, step):
            if step == 3:
                with pytest.raises(RecipeError, match="is in use by process"):
                    second.run()
                seen.append(step)

    first.callbacks.step_begin = Meanwhile()
    first.run()
    assert seen == [3]
    assert not (run / LOCK).exists()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    alone = make(photos, tmp_path / "alone", *RUN)
    alone.run()
    expected = (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()
    assert [timeless(json.loads(a)) for a in lines] == [timeless(json.loads(b)) for b in expected]
    assert all((weights(first)[k] == v).all() for k, v in weights(alone).items())


def test_a_run_that_was_trained_on_meanwhile_is_not_resumed_from_the_past(photos, tmp_path):
    make(photos, tmp_path, *RUN, "stop_after=2").run()
    late = make(photos, tmp_path, *RUN, "resume=true")
    make(photos, tmp_path, *RUN, "resume=true", "stop_after=4").run()
    with pytest.raises(RecipeError, match="was trained on while this run started; valid: the same"):
        late.run()
    again = make(photos, tmp_path, *RUN, "resume=true")
    assert again.step == 4
    again.run()
