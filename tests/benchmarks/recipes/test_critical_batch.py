"""benchmarks/recipes/critical_batch.py measures what it claims, on runs that obey a law."""

import json
import sys

import pytest

from benchmarks.recipes import critical_batch
from tests.recipes.tune.critical_batch.law import SMALL, Law


@pytest.fixture
def bench(photos, tmp_path, monkeypatch):
    """Run the benchmark on the photos, and return what it stored."""
    result = tmp_path / "result.json"

    def run(*options):
        arguments = ["--data", str(photos), "--out", str(tmp_path / "out"), "--seeds", "2"]
        sizes = ["--batches", "2", "4", "8", "--epochs", "30", "--result", str(result)]
        monkeypatch.setattr(sys, "argv", ["x", *arguments, *sizes, *options, "--set", *SMALL])
        critical_batch.main()
        return json.loads(result.read_text())["digits"]

    return run


def test_predictions_are_compared_with_runs_of_larger_batches(bench, monkeypatch, capsys):
    law = Law(8).install(monkeypatch)
    found = bench()
    assert [row["batch_size"] for row in found["rows"]] == [16, 32]
    assert [row["times_largest"] for row in found["rows"]] == [2, 4]
    for row in found["rows"]:
        true = 30 * (1 + row["batch_size"] / 8) / (1 + 2 / 8)
        assert row["predicted_epochs"][0] == pytest.approx(true, rel=0.02)
        assert row["measured_epochs"][0] == pytest.approx(true, rel=0.02)
    assert len(law.made) >= 7 + 18
    assert "within 15% at 2 and 4 times the largest batch: yes" in capsys.readouterr().out
    again = Law(8).install(monkeypatch)
    assert bench()["rows"] == found["rows"]
    assert again.made == []


def test_a_check_is_kept_where_a_new_prediction_lies_within_it(bench, monkeypatch):
    Law(8).install(monkeypatch)
    found = bench()
    law = Law(8).install(monkeypatch)
    monkeypatch.setattr(critical_batch, "LENGTHS", (0.8, 1.01, 1.3))
    assert bench()["rows"] == found["rows"]
    assert law.made == []
    monkeypatch.setattr(critical_batch, "FIRST_SEED", 200)
    bench()
    assert len(law.made) == 18


def test_a_law_that_breaks_beyond_the_largest_batch_is_seen(bench, monkeypatch, capsys):
    Law(8, lambda batch, seed, epochs: 1.5 if batch > 16 else 1.0).install(monkeypatch)
    near, far = bench()["rows"]
    assert near["predicted_over_measured"] == pytest.approx(1, abs=0.02)
    assert far["predicted_over_measured"] == pytest.approx(1 / 1.5, abs=0.02)
    assert capsys.readouterr().out.endswith(": no\n")


@pytest.mark.parametrize(("batches", "ends"), [((4, 8, 16), ()), ((2, 4, 8), (32,))])
def test_without_both_larger_batches_nothing_is_claimed(bench, monkeypatch, capsys, batches, ends):
    """Four times 16 are more than there are images; a batch of 32 diverges."""
    Law(8, ends=ends).install(monkeypatch)
    rows = bench("--batches", *map(str, batches))["rows"]
    assert [row["batch_size"] for row in rows] == ([16, 32] if ends else [32])
    assert [row["diverged"] for row in rows] == ([0, 6] if ends else [0])
    assert capsys.readouterr().out.endswith(": no\n")


def test_a_smallest_batch_that_diverges_in_the_check_leaves_a_result(bench, monkeypatch, capsys):
    law = Law(8).install(monkeypatch)
    law.ends = ()

    def later(*arguments):
        given = dict(override.split("=", 1) for override in arguments[1])
        law.ends = (2,) if int(given["seed"]) >= critical_batch.FIRST_SEED else ()
        return law(*arguments)

    monkeypatch.setattr("largebatch.recipes.tune.critical_batch.one_run.measure", later)
    assert not any("measured_epochs" in row for row in bench()["rows"])
    assert "not known: runs diverged" in capsys.readouterr().out
