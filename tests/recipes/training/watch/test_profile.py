"""Runs that record steps, what the files hold, and the keys of a profile."""

import gzip
import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import profiler as autograd_profiler
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from largebatch.comm import Plan, Rule
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.watch import clocks
from largebatch.recipes.training.watch import profile as module
from tests.ranks import run_ranks
from tests.recipes.runs import make
from tests.recipes.training.small import small, small_trainer

__all__ = ["small"]  # a fixture
STEP = "ProfilerStep#"


def trace_of(run_dir, rank=0):
    packed = (run_dir / "profile" / f"rank-{rank}.json.gz").read_bytes()
    return json.loads(gzip.decompress(packed))


def ranges(run_dir, rank=0):
    return [e for e in trace_of(run_dir, rank)["traceEvents"] if e.get("ph") == "X"]


def steps_of(run_dir):
    names = [e["name"] for e in ranges(run_dir) if e["name"].startswith(STEP)]
    return sorted(int(name.removeprefix(STEP)) for name in names)


def files(run_dir):
    folder = run_dir / "profile"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_steps_asked_for_are_recorded_and_no_other(small, tmp_path, capsys):
    small_trainer(tmp_path, "profile.steps=3..4", "ema.decay=0.9").run()
    assert files(tmp_path) == ["rank-0.json.gz", "rank-0.txt"]
    assert steps_of(tmp_path) == [3, 4]
    marks = [e for e in ranges(tmp_path) if e["name"].startswith(STEP)]
    begin, end = min(e["ts"] for e in marks), max(e["ts"] + e["dur"] for e in marks)
    for name in ("INPUT_WAIT", "FORWARD", "BACKWARD", "OPTIMIZER", "METERS", "AVERAGE"):
        found = [e for e in ranges(tmp_path) if e["name"] == getattr(clocks, name)]
        assert all(begin <= e["ts"] <= e["ts"] + e["dur"] <= end for e in found)
        assert len(found) == 6 if name in ("INPUT_WAIT", "FORWARD") else found  # 3 micro-batches
    table = (tmp_path / "profile" / "rank-0.txt").read_text()
    shares = [float(row[1]) for row in re.finditer(r"^ *\S.*? {2,}([\d.]+)% ", table, re.M)]
    assert len(shares) > 20
    assert shares == sorted(shares, reverse=True)
    assert "aten::convolution_backward" in table
    [line] = [line for line in capsys.readouterr().out.splitlines() if "profile" in line]
    assert line.endswith(" of rank 0")
    assert trace_of(tmp_path)["distributedInfo"]["rank"] == 0  # by which that tells ranks apart
    assert not autograd_profiler._is_profiler_enabled


def record_on_ranks(root, run_dir, plan, *keys):
    keys = ["profile.steps=2..3", "evaluate_every=null", f"comm.plan={plan}", *keys]
    make(root, run_dir, *keys, "comm.algorithm=null").run()


@pytest.mark.slow("trains on 2 ranks")
def test_the_ranks_asked_for_record_phases_and_all_reduces(photos, tmp_path):
    rules = Rule("leader", max_bytes=200_000), Rule("hierarchical")
    Plan(rules, fusion_threshold_bytes=150_000).save(tmp_path / "plan.json")
    keys, ranks = (tmp_path / "plan.json", "profile.ranks=[1]"), [1]
    run_ranks(2, record_on_ranks, photos, tmp_path / "run", *keys)
    kinds = ("json.gz", "txt")
    assert files(tmp_path / "run") == [f"rank-{n}.{kind}" for n in ranks for kind in kinds]
    for rank in ranks:
        assert trace_of(tmp_path / "run", rank)["distributedInfo"]["rank"] == rank
        found = {e["name"] for e in ranges(tmp_path / "run", rank)}
        assert {clocks.FORWARD, clocks.BACKWARD, clocks.OPTIMIZER} <= found
        buckets = [re.match(r"all-reduce bucket \d+, [\d.]+ KiB, (\w+)", name) for name in found]
        assert {bucket[1] for bucket in buckets if bucket} == {"leader", "hierarchical"}


def test_a_resumed_run_records_what_is_left_of_the_steps(small, tmp_path):
    keys = ["checkpoint.every=4", "epochs=3"]
    small_trainer(tmp_path, *keys, "stop_after=4").run()
    assert files(tmp_path) == []  # without the key
    resumed = [*keys, "resume=true", "profile.steps=3..6"]
    small_trainer(tmp_path, *resumed, "stop_after=8").run()
    assert steps_of(tmp_path) == [5, 6]
    before = (tmp_path / "profile" / "rank-0.json.gz").read_bytes()
    small_trainer(tmp_path, *resumed).run()
    assert (tmp_path / "profile" / "rank-0.json.gz").read_bytes() == before


def test_a_run_that_ends_before_the_last_step_writes_what_it_has(small, tmp_path, capsys):
    keys = ["target_accuracy=1e-9", "evaluate_every=3"]
    small_trainer(tmp_path / "half", *keys, "profile.steps=2..6").run()
    assert steps_of(tmp_path / "half") == [2, 3]
    assert "half/profile has the trace" in capsys.readouterr().out
    small_trainer(tmp_path / "none", *keys, "profile.steps=4..6").run()
    assert files(tmp_path / "none") == []
    with profile() as other:  # which can begin
        torch.ones(2) + 1
    assert any(event.key == "aten::add" for event in other.key_averages())


def test_a_gpu_is_waited_for_before_the_steps_and_orders_the_table(tmp_path, monkeypatch):
    waits, kinds, orders = [], [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(step + 1))
    table = EventList.table

    def ordered(events, **options):
        orders.append(options["sort_by"])
        return table(events, **options)

    def on_cpu(activities, **options):
        kinds.extend(activities)
        return profile(activities=[ProfilerActivity.CPU], **options)

    monkeypatch.setattr(EventList, "table", ordered)
    monkeypatch.setattr(module, "profile", on_cpu)
    profiler, job = module.StepProfiler(), Job(0, 1, 1, torch.device("cuda"))
    recipe = load("digits", ["profile.steps=' 2 .. 4 '"]).recipe
    assert recipe.profile.steps == "2..4"
    run = {"recipe": recipe, "job": job, "run_dir": tmp_path, "step": 0, "untimed": nullcontext}
    profiler.on_start(SimpleNamespace(**run, say=print, warn=print))
    for step in range(5):
        profiler.on_step_begin(step)
        profiler.on_step_end(step + 1)
    assert waits == [2]  # torch.profiler waits when it stops
    assert kinds == [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    assert orders == ["self_device_time_total"]
    assert steps_of(tmp_path) == [2, 3, 4]


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(gzip, "open", OSError(28, "No space left")), (EventList, "table", KeyError("dur"))],
)
def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    small, tmp_path, monkeypatch, capsys, owner, name, fault
):
    def fails(*arguments, **options):
        raise fault

    trainer = small_trainer(tmp_path, "profile.steps=2")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        trainer.run()
    assert trainer.step == trainer.last_step
    warned = capsys.readouterr().err  # which is shown where the run is to be quiet, too
    assert warned.count("training goes on") == 1
    assert str(fault) in warned
    assert files(tmp_path) == []
