"""Single runs beside the grid of large_batch.py, which trust and tried tell of."""

import json

import pytest

from benchmarks.recipes import large_batch, large_batch_single, large_batch_tried, large_batch_trust
from benchmarks.recipes.large_batch_report import NAMES
from benchmarks.recipes.large_batch_single import Single, find, make
from largebatch.recipes.schema.load import load


@pytest.fixture
def trained(monkeypatch):
    """What is trained, without training it."""
    made = []

    def train(recipe, data, overrides):
        made.append((recipe, *overrides))
        return {"top1": 70.0 + len(made), "date": "2026-11-22"}

    monkeypatch.setattr(large_batch_single, "train", train)
    return made


def singles(*rates):
    return [Single("nesterov", [f"optimizer.lr={lr}"], {"lr": lr}) for lr in rates]


def test_runs_that_are_kept_are_not_made_again(tmp_path, trained):
    path = tmp_path / "singles.json"
    first = make(path, "Claim: one\nline.\n\nmore", singles(1.0, 2.0), "nowhere", 2)
    assert {row["lr"] for row in first} == {1.0, 2.0}
    assert json.loads(path.read_text())["claim"] == "Claim: one line."
    rows = make(path, "", singles(1.0, 2.0, 3.0), "nowhere", 2)
    assert rows[:2] == first
    assert len(trained) == 3
    assert trained[-1] == ("cifar10-nesterov-b256", "optimizer.lr=3.0")
    assert find(rows, {"lr": 3.0})["top1"] == 73.0
    assert find(rows, {"lr": 4.0}) is None


def test_each_change_is_of_the_tuned_run_and_changes_it():
    wanted = [(b, run) for b in large_batch_tried.CHANGES for run in large_batch_tried.runs(b)]
    for batch_size, run in wanted:
        recipe = large_batch.RECIPES[run.optimizer]
        plain = large_batch.Run(**{k: v for k, v in run.told.items() if k != "change"})
        tuned, changed = (load(recipe, list(o)).recipe for o in (plain.overrides(), run.overrides))
        assert changed != tuned
        assert changed.batch_size == batch_size
        assert changed.data.holdout == large_batch.HELD_OUT


def test_tables_have_what_was_run_and_leave_out_what_was_not():
    wanted = large_batch_tried.runs(4096)
    rows = [{**wanted[0].told, "top1": 12.34}]
    lines = large_batch_tried.table(rows, 4096).splitlines()
    assert len(lines) == 4
    assert lines[0].count("|") == 2 + len(NAMES)
    assert lines[3].startswith(f"| {wanted[0].told['change']} | 12.34 (-")
    rows = [{**large_batch_trust.told(6.4, 0.01), "top1": 56.78}]
    line = next(s for s in large_batch_trust.table(rows).splitlines() if "56.78" in s)
    assert line == "| 0.064 |  | 56.78 |  |"
