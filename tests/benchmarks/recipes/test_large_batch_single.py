"""Single runs in addition to the grid, as large_batch_trust and large_batch_tried report them."""

import json

import pytest

from benchmarks.recipes import large_batch, large_batch_single, large_batch_tried, large_batch_trust
from benchmarks.recipes.large_batch_single import Single, find, run_missing
from largebatch.recipes.schema.load import load


@pytest.fixture
def trained(monkeypatch):
    """The recipes and overrides of the requested runs, none of which is trained."""
    requested = []

    def train(recipe, data, overrides, more):
        assert more([]) == {}
        requested.append((recipe, *overrides))
        return {"top1": 70.0 + len(requested), "date": "2026-11-22"}

    monkeypatch.setattr(large_batch_single, "train", train)
    return requested


def singles(*rates):
    return [Single("cifar10-nesterov-b256", [f"optimizer.lr={lr}"], {"lr": lr}) for lr in rates]


def test_stored_runs_are_not_repeated(tmp_path, trained):
    path = tmp_path / "singles.json"
    first = run_missing(path, "Claim: one\nline.\n\nmore", singles(1.0, 2.0), "nowhere", 2)
    assert {row["lr"] for row in first} == {1.0, 2.0}
    assert json.loads(path.read_text())["claim"] == "Claim: one line."
    rows = run_missing(path, "", singles(1.0, 2.0, 3.0), "nowhere", 2)
    assert rows[:2] == first
    assert len(trained) == 3
    assert trained[-1] == ("cifar10-nesterov-b256", "optimizer.lr=3.0")
    assert find(rows, {"lr": 3.0})["top1"] == 73.0
    assert find(rows, {"lr": 4.0}) is None


def test_each_change_differs_from_the_tuned_run():
    wanted = [(b, run) for b in large_batch_tried.CHANGES for run in large_batch_tried.runs(b)]
    for batch_size, run in wanted:
        recipe = run.recipe
        plain = large_batch.Run(**{k: v for k, v in run.identity.items() if k != "change"})
        tuned, changed = (load(recipe, list(o)).recipe for o in (plain.overrides(), run.overrides))
        assert changed != tuned
        assert changed.batch_size == batch_size
        assert changed.data.holdout == large_batch.HELD_OUT


def test_tables_show_only_finished_runs():
    wanted = large_batch_tried.runs(4096)
    rows = [{**wanted[0].identity, "top1": 12.34}]
    lines = large_batch_tried.table(rows, 4096).splitlines()
    assert len(lines) == 4
    assert lines[0].count("|") == 2 + len({run.identity["optimizer"] for run in wanted})
    assert lines[3].startswith(f"| {wanted[0].identity['change']} | 12.34 (-")
    rows = [{**large_batch_trust.identity(6.4, 0.01), "top1": 56.78}]
    line = next(s for s in large_batch_trust.table(rows).splitlines() if "56.78" in s)
    assert line == "| 0.064 |  | 56.78 |  |"
