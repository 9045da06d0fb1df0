"""The lock of a run folder: one run at a time, and none is kept out by one that has ended."""

import os
import time

import pytest

from largebatch.recipes.errors import RecipeError, StorageError
from largebatch.recipes.training.folder import lock as run_lock
from largebatch.recipes.training.folder.lock import is_held_here, locked
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.folder.names import LOCK
from tests.ranks import CONTEXT
from tests.recipes.runs import checkpoints, leave_lock, make, refused


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(run_lock, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "_BEAT_SECONDS", 0.1)


def kept_out(folder, say=print):
    """The message for a run that may not write into a folder."""
    return refused(locked(folder, say).__enter__)


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    for _ in range(2):
        with locked(tmp_path) as held:
            assert (held.notice, held.is_lost) == ("", False)
            assert is_held_here(tmp_path)
            message = kept_out(tmp_path)
            assert f"run_dir: {tmp_path} is in use by process {os.getpid()} of " in message
            assert "; valid: another run_dir, or this one" in message
        assert list(tmp_path.iterdir()) == []


def hold(folder, held):
    with locked(folder):
        held.set()
        while True:
            time.sleep(60)


@pytest.mark.slow("starts a process that imports torch")
def test_the_lock_of_a_killed_process_of_this_machine_is_taken_over(tmp_path):
    held = CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(tmp_path, held))
    process.start()
    assert held.wait(300)
    assert f"is in use by process {process.pid} of " in kept_out(tmp_path)
    process.kill()
    process.join()
    with locked(tmp_path) as taken:
        assert f"the lock of process {process.pid} of" in taken.notice
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ages", [0, 1e6, -1e6])  # by a clock that differs from this machine's
def test_another_machine_counts_as_gone_only_without_a_sign_of_life(tmp_path, monkeypatch, ages):
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 1.0)
    path, said = leave_lock(tmp_path, host="elsewhere", pid=7), []
    at = time.time() - ages
    os.utime(path, (at, at))

    def beats(line):
        said.append(line)
        os.utime(path, (at + 1, at + 1))

    assert "is in use by process 7 of elsewhere; valid: another" in kept_out(tmp_path, beats)
    with locked(tmp_path, said.append) as taken:
        assert taken.notice == "the lock of process 7 of elsewhere is taken over: it has ended"
        assert is_held_here(tmp_path)
    who = f"run_dir: {tmp_path} is locked by process 7 of elsewhere"
    assert said == [f"{who}; waiting up to 1 s for a sign of life"] * 2


def test_a_lock_that_another_process_has_just_taken_is_left_to_it(tmp_path):
    path = leave_lock(tmp_path, host="elsewhere", pid=7)
    other = path.read_text().replace("elsewhere", "quicker")
    assert "process 7 of quicker" in kept_out(tmp_path, lambda line: path.write_text(other))
    assert "host=quicker" in (tmp_path / LOCK).read_text()


def test_a_damaged_lock_keeps_nobody_out(tmp_path):
    (tmp_path / LOCK).write_text("{")
    os.utime(tmp_path / LOCK, (1, 1))
    with locked(tmp_path) as taken:
        assert taken.notice == "the lock of a process that left no name is taken over: it has ended"


def race(folder, start, gave_up, results):
    start.wait()
    try:
        with locked(folder):
            results.put("held")
            for _ in range(start.parties - 1):
                gave_up.acquire(timeout=300)
    except RecipeError:
        results.put("refused")
        gave_up.release()


@pytest.mark.slow("starts four processes")
def test_one_of_many_processes_gets_a_lock_that_was_left(tmp_path):
    leave_lock(tmp_path, pid=2**31 - 1)  # which no process has
    start, gave_up, results = CONTEXT.Barrier(4), CONTEXT.Semaphore(0), CONTEXT.Queue()
    arguments = (tmp_path, start, gave_up, results)
    workers = [CONTEXT.Process(target=race, args=arguments) for _ in range(4)]
    for worker in workers:
        worker.start()
    found = sorted(results.get(timeout=300) for _ in workers)
    for worker in workers:
        worker.join()
    assert found == ["held"] + ["refused"] * 3
    assert list(tmp_path.iterdir()) == []


RUN = ("optimizer.lr=0.1", "micro_batch_size=16", "checkpoint.every=2", "evaluate_every=null")


def test_a_run_keeps_others_out_and_ends_where_its_lock_is_taken_over(photos, tmp_path):
    """It leaves the folder as it is."""
    first, second = make(photos, tmp_path, *RUN), make(photos, tmp_path, *RUN)
    begin = first.callbacks.step_begin

    def step_begin(step):
        if step == 3:
            assert "is in use by process" in refused(second.run)
        if step == 5:
            (tmp_path / LOCK).unlink()
            leave_lock(tmp_path, host="elsewhere")
        begin(step)

    first.callbacks.step_begin = step_begin
    message = refused(first.run, kind=StorageError)
    assert f"another process has taken {tmp_path} over" in message
    assert checkpoints(tmp_path) == [2, 4]
    assert "host=elsewhere" in (tmp_path / LOCK).read_text()
    steps = [line["step"] for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert steps == sorted({*steps})


def test_a_run_that_was_trained_on_meanwhile_is_not_resumed_from_the_past(photos, tmp_path):
    make(photos, tmp_path, *RUN, "stop_after=2").run()
    late = make(photos, tmp_path, *RUN, "resume=true")
    make(photos, tmp_path, *RUN, "resume=true", "stop_after=4").run()
    assert "was trained on while this run started; valid: the same c" in refused(late.run)
    again = make(photos, tmp_path, *RUN, "resume=true")
    assert again.step == 4
    again.run()


def test_a_folder_with_checkpoints_is_not_begun_anew(photos, tmp_path):
    (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000002/state.json").touch()
    assert "already holds a run" in refused(make, photos, tmp_path, *RUN)
