"""Runs that record steps, what the files hold, and the keys of a profile."""

import gzip
import json
import re

import pytest
from torch.autograd import profiler as autograd_profiler
from torch.autograd.profiler_util import EventList

from largebatch.comm import Plan, Rule
from largebatch.recipes.training.watch import clocks
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


def record_on_ranks(root, run_dir):
    keys = ["profile={steps: 2..3, ranks: [1]}", "evaluate_every=null"]
    make(root, run_dir, *keys, f"comm.plan={run_dir}/plan.json", "comm.algorithm=null").run()


@pytest.mark.slow("trains on 2 ranks")
def test_the_ranks_asked_for_record_phases_and_all_reduces(photos, tmp_path):
    rules = Rule("leader", max_bytes=200_000), Rule("hierarchical")
    Plan(rules, fusion_threshold_bytes=150_000).save(tmp_path / "plan.json")
    run_ranks(2, record_on_ranks, photos, tmp_path)
    assert files(tmp_path) == ["rank-1.json.gz", "rank-1.txt"]
    assert trace_of(tmp_path, 1)["distributedInfo"]["rank"] == 1
    found = {e["name"] for e in ranges(tmp_path, 1)}
    assert {clocks.FORWARD, clocks.BACKWARD, clocks.OPTIMIZER} <= found
    buckets = [re.match(r"all-reduce bucket \d+, [\d.]+ KiB, (\w+)", name) for name in found]
    assert {bucket[1] for bucket in buckets if bucket} == {"leader", "hierarchical"}


@pytest.mark.slow("trains a small network four times")
def test_a_run_records_what_is_left_of_the_steps_until_its_end(small, tmp_path):
    """Also where it ends before the last of them, as its target is reached."""
    keys = ["epochs=3", "checkpoint.every=4", "evaluate_every=11"]
    small_trainer(tmp_path, *keys, "stop_after=4").run()
    assert files(tmp_path) == []  # without the key
    for steps, key, recorded in (
        ("3..6", "stop_after=8", [5, 6]),
        ("3..6", "stop_after=9", [5, 6]),  # before; none are left
        ("8..12", "target_accuracy=1e-9", [10, 11]),
    ):
        small_trainer(tmp_path, *keys, "resume=true", f"profile.steps={steps}", key).run()
        assert steps_of(tmp_path) == recorded


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
