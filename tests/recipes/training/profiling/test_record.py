"""Runs that record steps, and what the files hold."""

import re
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import profiler as autograd_profiler

from largebatch.comm import Plan, Rule, spans_are_recorded
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.callback_list import CallbackList, callbacks_of
from largebatch.recipes.training.callbacks import Callback
from largebatch.recipes.training.metrics import read_metrics
from largebatch.recipes.training.phases import (
    ALL_REDUCE_WAIT,
    BACKWARD,
    FORWARD,
    INPUT_WAIT,
    METERS,
    OPTIMIZER,
)
from largebatch.recipes.training.profiling.figures import figures_of
from largebatch.recipes.training.profiling.record import StepProfiler, _Recording
from largebatch.recipes.training.profiling.trace import SPAN, STEP, read_trace, write_trace
from tests.ranks import run_ranks
from tests.recipes.runs import make
from tests.recipes.training.small import small, small_trainer

__all__ = ["small"]  # a fixture
CPU = torch.device("cpu")


def complete(path):
    return [e for e in read_trace(path)["traceEvents"] if e["ph"] == "X"]


def steps_of(path):
    return sorted(
        int(e["name"].removeprefix(STEP)) for e in complete(path) if e["name"].startswith(STEP)
    )


def files(run_dir):
    folder = run_dir / "profile"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_steps_asked_for_are_recorded_and_no_other(small, tmp_path, capsys):
    small_trainer(tmp_path, "profile.steps=3..4").run()
    assert files(tmp_path) == ["rank-0.json.gz", "summary.md", "summary.png"]
    path = tmp_path / "profile" / "rank-0.json.gz"
    assert steps_of(path) == [3, 4]
    events = complete(path)
    marks = [e for e in events if e["name"].startswith(STEP)]
    begin = min(e["ts"] for e in marks)
    end = max(e["ts"] + e["dur"] for e in marks)
    named = [e for e in events if e["name"] in (INPUT_WAIT, FORWARD, BACKWARD, OPTIMIZER)]
    assert all(begin <= e["ts"] <= e["ts"] + e["dur"] <= end for e in named)
    # three micro-batches a step; the optimizer's range is opened for the update and for its end
    counts = {name: sum(e["name"] == name for e in events) for name in (INPUT_WAIT, FORWARD)}
    assert counts == {INPUT_WAIT: 6, FORWARD: 6}
    found = figures_of(read_trace(path), 0)
    assert {INPUT_WAIT, FORWARD, BACKWARD, OPTIMIZER, METERS} <= found.phases.keys()
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    assert sum(cost.seconds for cost in found.costs) == pytest.approx(found.seconds)
    assert found.communication == 0
    page = (tmp_path / "profile" / "summary.md").read_text()
    assert "No all-reduce was seen" in page
    assert len(re.findall(r"^\| .* ms \| [\d.]+ \|$", page, re.M)) == 5  # the largest costs
    shown = capsys.readouterr().out
    assert "profile of steps 3 to 4 on rank 0" in shown
    assert "largest costs: " in shown
    assert not spans_are_recorded()
    assert not autograd_profiler._is_profiler_enabled


def test_a_run_without_the_key_records_nothing(small, tmp_path):
    small_trainer(tmp_path).run()
    assert files(tmp_path) == []


@pytest.mark.slow("records operators")
@pytest.mark.parametrize(
    ("key", "holds"),
    [
        ("shapes", lambda e: "Input Dims" in e.get("args", {})),
        ("stacks", lambda e: e.get("cat") == "python_function"),
        ("memory", lambda e: e["name"] == "[memory]"),
    ],
)
def test_what_is_recorded_of_operators_is_off_unless_asked_for(small, tmp_path, key, holds):
    for value in ("false", "true"):
        run_dir = tmp_path / value
        small_trainer(run_dir, "profile.steps=2", f"profile.{key}={value}").run()
        events = read_trace(run_dir / "profile" / "rank-0.json.gz")["traceEvents"]
        assert any(map(holds, events)) is (value == "true")


def record_on_ranks(root, run_dir, plan, *keys):
    keys = ["profile.steps=2..3", "evaluate_every=null", f"comm.plan={plan}", *keys]
    keys.append("comm.algorithm=null")
    make(root, run_dir, *keys).run()
    assert not spans_are_recorded()


TWO = Plan(
    (Rule("leader", max_bytes=200_000), Rule("hierarchical")), fusion_threshold_bytes=150_000
)


@pytest.mark.slow("trains on 2 ranks")
def test_the_phases_and_both_algorithms_of_a_plan_are_in_the_trace_of_each_rank(photos, tmp_path):
    TWO.save(tmp_path / "plan.json")
    run_ranks(2, record_on_ranks, photos, tmp_path / "run", tmp_path / "plan.json",
              "profile.ranks=all")  # fmt: skip
    assert files(tmp_path / "run") == [
        "rank-0.json.gz",
        "rank-1.json.gz",
        "summary.md",
        "summary.png",
    ]
    pids = []
    for rank in range(2):
        path = tmp_path / "run" / "profile" / f"rank-{rank}.json.gz"
        events = complete(path)
        names = {e["name"] for e in events}
        assert {INPUT_WAIT, FORWARD, BACKWARD, ALL_REDUCE_WAIT, OPTIMIZER, METERS} <= names
        spans = [e for e in events if e["cat"] == SPAN]
        buckets = {e["name"] for e in spans if re.fullmatch(
            r"all-reduce bucket \d+, [\d.]+ KiB, (leader|hierarchical)", e["name"])}  # fmt: skip
        assert {name.rpartition(" ")[2] for name in buckets} == {"leader", "hierarchical"}
        # Each bucket once a step, each of its chunks in phases of their own.
        for name in buckets:
            assert sum(e["name"] == name for e in spans) == 2
            phases = {e["name"] for e in spans if e["name"].startswith(f"{name}, chunk 1 of 1, ")}
            assert len(phases) == 3
        # The thread that carries them has ranges of the same names.
        on_threads = {e["name"] for e in events if e["cat"] == "user_annotation"}
        assert buckets <= on_threads
        inside = [e for e in events if e["name"] == BACKWARD]
        for wait in (e for e in spans if e["name"] == ALL_REDUCE_WAIT):
            assert any(b["ts"] <= wait["ts"] <= b["ts"] + b["dur"] for b in inside)
        found = figures_of(read_trace(path), rank)
        assert 0 <= found.hidden <= found.communication < found.seconds
        assert found.communication > 0
        assert found.phases[ALL_REDUCE_WAIT] <= found.idle * 1.001
        pids += [{e["pid"] for e in events}]
    assert not pids[0] & pids[1]
    page = (tmp_path / "run" / "profile" / "summary.md").read_text()
    assert "Recorded on ranks 0, 1 of 2" in page
    assert "| an all-reduce is under way |" in page


@pytest.mark.slow("trains on 2 ranks")
def test_the_all_reduce_of_the_back_end_is_named_by_its_buckets(photos, tmp_path):
    Plan.single("ring", fusion_threshold_bytes=150_000).save(tmp_path / "plan.json")
    run_ranks(2, record_on_ranks, photos, tmp_path / "run", tmp_path / "plan.json",
              "profile.ranks=1")  # fmt: skip
    assert files(tmp_path / "run") == ["rank-1.json.gz", "summary.md", "summary.png"]
    spans = [
        e for e in complete(tmp_path / "run" / "profile" / "rank-1.json.gz") if e["cat"] == SPAN
    ]
    buckets = {e["name"] for e in spans if e["name"].startswith("all-reduce bucket")}
    assert len(buckets) > 1
    assert all(name.endswith(", ring") for name in buckets)


def test_a_resumed_run_records_what_is_left_of_the_steps(small, tmp_path, capsys):
    keys = ["checkpoint.every=4", "epochs=3"]
    small_trainer(tmp_path, *keys, "stop_after=4").run()
    resumed = [*keys, "resume=true", "profile.steps=3..6", "stop_after=8"]
    small_trainer(tmp_path, *resumed).run()
    path = tmp_path / "profile" / "rank-0.json.gz"
    assert steps_of(path) == [5, 6]
    assert "of 3..6, steps 5..6 are recorded" in capsys.readouterr().out
    before = path.read_bytes()
    small_trainer(tmp_path, *keys, "resume=true", "profile.steps=3..6").run()
    assert "profile.steps: 3..6 is past: this run resumes after step 8" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_a_run_that_ends_before_the_last_step_writes_what_it_has(small, tmp_path, capsys):
    keys = ["target_accuracy=1e-9", "evaluate_every=3"]
    small_trainer(tmp_path / "half", *keys, "profile.steps=2..6").run()
    assert steps_of(tmp_path / "half" / "profile" / "rank-0.json.gz") == [2, 3]
    assert "profile of steps 2 to 3" in capsys.readouterr().out
    small_trainer(tmp_path / "none", *keys, "profile.steps=5..6").run()
    shown = capsys.readouterr()
    assert "profile.steps: the run ended at step 3; nothing is recorded of 5..6" in (
        shown.out + shown.err
    )
    assert files(tmp_path / "none") == []


def test_a_trace_that_cannot_be_written_does_not_end_the_run(small, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    # when the compressed file has been written beside the place of the trace
    monkeypatch.setattr(
        "largebatch.recipes.training.profiling.trace.os", SimpleNamespace(replace=full)
    )
    trainer = small_trainer(tmp_path, "profile.steps=2")
    trainer.run()
    assert trainer.step == trainer.last_step
    assert "cannot be written: No space left on device; training goes on" in (
        capsys.readouterr().err  # a warning, which is shown where the run is to be quiet too
    )
    assert files(tmp_path) == []


@pytest.mark.parametrize("place", ["record.figures_of", "record.draw", "record.of_rank"])
def test_a_profile_that_cannot_be_made_does_not_end_the_run(
    small, tmp_path, monkeypatch, capsys, place
):
    def fails(*_):
        raise KeyError("dur")

    monkeypatch.setattr(f"largebatch.recipes.training.profiling.{place}", fails)
    trainer = small_trainer(tmp_path, "profile.steps=2")
    trainer.run()
    assert trainer.step == trainer.last_step
    assert "KeyError: 'dur'; training goes on" in capsys.readouterr().err


def test_writing_counts_neither_as_training_nor_as_a_step(small, tmp_path, monkeypatch):
    took = 0.7
    order = []

    def slowly(*arguments):
        order.append("written")
        time.sleep(took)
        return write_trace(*arguments)

    class Watch(Callback):
        def on_step_end(self, step):
            order.append(step)

    monkeypatch.setattr("largebatch.recipes.training.profiling.record.write_trace", slowly)
    start = time.perf_counter()
    trainer = small_trainer(tmp_path, "profile.steps=3", "log_every=1", "evaluate_every=null")
    trainer.callbacks = CallbackList(
        [*callbacks_of(trainer.recipe), ("watch", Watch()), ("clock", trainer._ending.clock)],
        trainer.job,
    )
    summary = trainer.run()
    wall = time.perf_counter() - start
    assert order == [1, 2, 3, "written", *range(4, trainer.last_step + 1)]
    lines = [line for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert len(lines) == trainer.last_step
    assert sum(line["seconds"] for line in lines) <= wall - took
    assert summary["train_seconds"] <= wall - took + 0.01
    assert summary["time_spent"]["training"] <= wall - took
    assert summary["time_spent"]["rest"] >= took


def test_the_average_of_the_weights_is_a_phase_of_its_step(small, tmp_path):
    small_trainer(tmp_path, "ema.decay=0.9", "profile.steps=3..4").run()
    found = figures_of(read_trace(tmp_path / "profile" / "rank-0.json.gz"), 0)
    assert found.phases["average of the weights"] > 0


def test_an_evaluation_among_the_steps_is_announced(small, tmp_path, capsys):
    for steps, falls in (("4..5", True), ("5..8", False), ("3..4", False)):
        small_trainer(tmp_path / steps, "evaluate_every=4", f"profile.steps={steps}").run()
        assert ("an evaluation falls into" in capsys.readouterr().out) is falls


def context(tmp_path, said, *keys):
    job = Job(0, 2, 2, torch.device("cpu"))
    recipe = load("digits", keys).recipe
    return SimpleNamespace(
        recipe=recipe, job=job, run_dir=tmp_path, step=0, val_loader=None, say=said.append,
        warn=said.append, name="x", untimed=nullcontext,
    )  # fmt: skip


@pytest.mark.parametrize(("first", "line"), [(2, "other ranks have written"), (5, "nothing is")])
def test_what_other_ranks_recorded_is_not_denied(tmp_path, first, line):
    said = []
    profiler = StepProfiler()
    profiler.on_start(context(tmp_path, said, f"profile.steps={first}..6", "profile.ranks=1"))
    for step in range(3):
        profiler.on_step_begin(step)
        profiler.on_step_end(step + 1)
    profiler.on_end("stopped", {})
    assert len(said) == 1
    assert said[0].startswith("profile.steps: the run ended at step 3; ")
    assert line in said[0]


def test_a_recording_that_is_prepared_but_never_started_is_ended(tmp_path):
    profiler = StepProfiler()
    profiler.on_start(context(tmp_path, [], "profile.steps=2..3"))
    profiler.on_step_begin(0)
    profiler.on_step_end(1)
    profiler.on_end("stopped", {})
    assert not autograd_profiler._is_profiler_enabled
    assert not torch.autograd._profiler_enabled()
    with torch.profiler.profile() as other:  # another can begin
        torch.ones(2) + 1
    assert any(event.key == "aten::add" for event in other.key_averages())


def test_the_device_is_waited_for_around_the_steps_alone(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(made))
    recording = _Recording(load("digits", ["profile.steps=2..4"]).recipe.profile, CPU)
    recording._device = torch.device("cuda")
    for made in (2, 3, 4):
        recording.step_begin(made)
        recording.step_end(is_last=made == 4)
    assert waits == [2, 4]
    made = 5
    recording.stop(tmp_path / "x.json")
