"""The lock of a run folder: one run at a time, and none is kept out by one that has ended."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from largebatch.recipes.errors import RecipeError, StorageError
from largebatch.recipes.training.folder import lock as run_lock
from largebatch.recipes.training.folder.lock import heartbeat, locked, this_process
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.folder.names import LOCK
from tests.ranks import CONTEXT
from tests.recipes.runs import checkpoints, make, refused

ELSEWHERE = {"machine": "elsewhere", "process": 7, "started": "1", "boot": "x", "namespace": "y"}


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(run_lock, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "_BEAT_SECONDS", 0.2)
    monkeypatch.setattr(run_lock, "_SETTLE_SECONDS", 0.0)


def left(folder, **changes):
    """Leave a lock in a folder, as another process would."""
    content = {**ELSEWHERE, "id": "z", **changes}
    (folder / LOCK).write_text(json.dumps(content))
    return folder / LOCK


def kept_out(folder):
    """The message for a run that may not write into a folder."""
    return refused(locked(folder).__enter__)


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    for _ in range(2):
        with locked(tmp_path) as held:
            assert held.notice == ""
            assert not held.is_lost
            message = kept_out(tmp_path)
            assert f"run_dir: {tmp_path} is in use by process {os.getpid()} of " in message
            assert "; valid: another run_dir, or this one" in message
        assert list(tmp_path.iterdir()) == []


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
    assert "is in use by process" in kept_out(tmp_path)
    process.kill()
    process.join()
    with locked(tmp_path) as taken:
        assert f"the lock of process {process.pid} of" in taken.notice
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("beat", "seconds"), [(0, 25), (-20, 5), (-1e6, 4), (1e6, 25)])
def test_another_machine_counts_as_gone_only_without_a_sign_of_life(
    tmp_path, monkeypatch, beat, seconds
):
    """Two beats of 2 s are waited for even if its last one was long ago by this machine's clock."""
    clock, said = [0.0], []
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 25.0)
    monkeypatch.setattr(run_lock, "_BEAT_SECONDS", 2.0)
    times = SimpleNamespace(time=lambda: 2e9, monotonic=lambda: clock[0])
    monkeypatch.setattr(run_lock, "time", times)
    path = left(tmp_path)
    os.utime(path, (2e9 + beat, 2e9 + beat))
    times.sleep = lambda _: os.utime(path, (2e9 + beat + 1, 2e9 + beat + 1))
    assert "process 7 of elsewhere; valid: another" in kept_out(tmp_path)
    os.utime(path, (2e9 + beat, 2e9 + beat))
    times.sleep = lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    with locked(tmp_path, said.append) as taken:
        assert taken.notice == "the lock of process 7 of elsewhere is taken over: it has ended"
    assert clock == [seconds]
    who = f"run_dir: {tmp_path} is locked by process 7 of elsewhere"
    assert said == [f"{who}; waiting up to {seconds} s for a sign of life"]


@pytest.mark.parametrize(
    "changes",
    [
        # of another container, whose numbers mean nothing here
        {"namespace": "other", "process": 2**22 + 1},
        # damaged
        *({"started": 5}, {"process": 2**70}),
        None,
    ],
)
def test_a_process_that_cannot_be_looked_for_is_judged_by_its_heartbeat(tmp_path, changes):
    path = left(tmp_path, **{**this_process(), **(changes or {})})
    if changes is None:
        path.write_text("{")  # as one that is being written
    with heartbeat(path, 0.1):
        assert "is in use by " in kept_out(tmp_path)
    os.utime(path, (1, 1))
    with locked(tmp_path) as taken:
        assert taken.notice.endswith(" is taken over: it has ended")
        assert json.loads(path.read_text())["process"] == os.getpid()


def test_a_process_sees_that_its_lock_is_lost_and_leaves_it(tmp_path):
    """As after it was suspended."""
    with locked(tmp_path) as held:
        path = left(tmp_path)
        assert held.is_lost
    assert json.loads(path.read_text())["machine"] == "elsewhere"
    with locked(tmp_path) as held:
        (tmp_path / LOCK).unlink()
        assert held.is_lost


def test_a_lock_that_another_process_has_just_taken_is_left_to_it(tmp_path, monkeypatch):
    path = left(tmp_path)
    judge = run_lock._check_ended

    def overtaken(path, seen, say):
        if seen[0]["machine"] != "elsewhere":
            return judge(path, seen, say)
        left(tmp_path, machine="quicker", id="q")  # between this judgement and the next step

    monkeypatch.setattr(run_lock, "_check_ended", overtaken)
    with heartbeat(path, 0.1):
        assert "process 7 of quicker" in kept_out(tmp_path)
    assert json.loads(path.read_text())["machine"] == "quicker"
    assert [file.name for file in tmp_path.iterdir()] == [LOCK]


def test_the_last_of_those_that_judged_a_lock_holds_it(tmp_path, monkeypatch):
    path = left(tmp_path)
    judged, mine = run_lock._look(path), {"id": "mine"}
    later = SimpleNamespace(sleep=lambda _: left(tmp_path, id="later"))
    monkeypatch.setattr(run_lock, "time", later)  # while this one waits
    assert not run_lock._take_over(path, judged, mine)
    later.sleep = lambda _: None
    assert run_lock._take_over(path, run_lock._look(path), mine)
    assert not run_lock._take_over(path, judged, {"id": "too late"})
    assert json.loads(path.read_text()) == mine
    assert list(tmp_path.iterdir()) == [path]


def race(folder, start, gave_up, results):
    start.wait()
    try:
        with locked(folder):
            results.put("held")
            for _ in range(start.parties - 1):
                gave_up.acquire(timeout=60)
    except RecipeError:
        results.put("refused")
        gave_up.release()


@pytest.mark.slow("starts four processes")
def test_one_of_many_processes_gets_a_lock_that_was_left(tmp_path):
    os.utime(left(tmp_path), (1, 1))
    start, gave_up, results = CONTEXT.Barrier(4), CONTEXT.Semaphore(0), CONTEXT.Queue()
    arguments = (tmp_path, start, gave_up, results)
    workers = [CONTEXT.Process(target=race, args=arguments) for _ in range(4)]
    for worker in workers:
        worker.start()
    found = sorted(results.get(timeout=60) for _ in workers)
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
            left(tmp_path)
        begin(step)

    first.callbacks.step_begin = step_begin
    message = refused(first.run, kind=StorageError)
    assert f"another process has taken {tmp_path} over" in message
    assert checkpoints(tmp_path) == [2, 4]
    assert json.loads((tmp_path / LOCK).read_text())["machine"] == "elsewhere"
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
