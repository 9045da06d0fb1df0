"""The loop of an estimate: its time, what it resumes and finds, on runs that obey a law."""

import math
import random
import re

import pytest
import torch
import torch.distributed as dist

from largebatch.recipes.ranks import Job
from largebatch.recipes.tune.critical_batch import estimate as module
from largebatch.recipes.tune.critical_batch.estimate import estimate
from largebatch.recipes.tune.critical_batch.report import as_json, describe, head
from tests.ranks import run_ranks
from tests.recipes.runs import JOB
from tests.recipes.tune.critical_batch.law import IMAGES, Law, loaded

LONG = 10_000.0


@pytest.fixture
def run(photos, tmp_path):
    def estimated(*overrides, out="out", **options):
        options = {"batches": (2, 4, 8), "epochs": 30.0, **options}
        return estimate(loaded(photos, *overrides), JOB, tmp_path / out, **options)

    return estimated


def noise(size, draw=""):
    """Return factors that are normal around 1 with this standard deviation, the same each time."""

    def factor(*run):
        return 1 + size * random.Random(f"{draw}{run!r}").gauss(0, 1)

    return factor


@pytest.mark.parametrize("critical", [3, 30])
def test_the_law_is_found_and_predicts_larger_batches(run, monkeypatch, critical):
    Law(critical, noise(0.02)).install(monkeypatch)
    found = run()
    assert found.critical.batch_size == pytest.approx(critical, rel=0.2)
    assert found.critical.determined
    by_size = {row.batch_size: row for row in found.rows()}
    assert list(by_size) == [2, 4, 8, 16]
    for batch, row in by_size.items():
        true = 30 * (1 + batch / critical) / (1 + 2 / critical)
        assert row.epochs[0] == pytest.approx(true, rel=0.15)
        assert row.updates == pytest.approx(row.epochs[0] * IMAGES / batch)
        assert row.speed_up[0] == pytest.approx(batch / 4 * by_size[4].epochs[0] / row.epochs[0])
        assert row.doublings == math.log2(batch / 8)


def test_the_interval_of_an_estimate_holds_the_truth_as_often_as_it_says(run, monkeypatch):
    """90 % of 25: 22.5, with a standard deviation of 1.5."""
    inside = 0
    for draw in range(25):
        Law(8, noise(0.02, draw)).install(monkeypatch)
        found = run(out=str(draw)).critical
        inside += found.low < 8 < found.high
    assert inside >= 19


def test_runs_near_the_target_take_the_place_of_the_first_ones(run, monkeypatch):
    """The critical batch grows along a run: larger batches are worse before the target."""

    def early(batch, seed, epochs):
        effective = epochs / (1 + batch / 8) * (1 + 2 / 8) / 30  # of the target run
        return 1.4 if batch > 2 and effective < 0.9 else 1.0

    law = Law(8, early).install(monkeypatch)
    found = run(minutes=LONG)
    assert (8, 30.0) in law.made
    predicted = {row.batch_size: row.epochs[0] for row in found.rows()}
    assert predicted[16] == pytest.approx(30 * (1 + 16 / 8) / (1 + 2 / 8), rel=0.1)


def test_an_estimate_that_is_stopped_keeps_its_runs_and_goes_on(run, monkeypatch):
    whole = Law(8).install(monkeypatch)
    expected = run(out="whole").critical
    law = Law(8, stop_at=3).install(monkeypatch)
    with pytest.raises(SystemExit):
        run()
    rest = Law(8, kept=law.kept).install(monkeypatch)
    assert run().critical == expected
    assert law.made + rest.made == whole.made
    more = Law(8, kept=rest.kept).install(monkeypatch)
    assert run(batches=(2, 4, 8, 16)).critical.largest == 16
    assert (16, 30.0) in more.made
    assert (2, 30.0) not in more.made


def test_the_time_is_kept(run, monkeypatch):
    law = Law(8).install(monkeypatch)
    found = run(minutes=5)
    assert 200 < law.seconds <= 300
    assert found.left_out
    assert any("not made, as the time does not suffice" in line for line in head(found))


def test_runs_are_repeated_with_other_seeds_while_the_interval_is_wide(run, monkeypatch):
    law = Law(8, noise(0.2)).install(monkeypatch)
    found = run(minutes=LONG)
    assert len(law.made) == 5 + 2 + 7 * 4
    assert {record.run.seed for record in found.records} == {*range(8)}


def test_one_seed_is_not_enough_and_all_runs_have_the_recipes_length_and_one_precision(
    run, monkeypatch
):
    Law(8).install(monkeypatch)
    monkeypatch.setattr(module, "auto_precision", lambda device: "bf16")
    found = run("precision=auto", epochs=None, minutes=LONG)
    assert found.critical.high < 1.05 * found.critical.low
    assert {record.run.seed for record in found.records} == {0, 1}
    assert found.epochs == 50
    assert found.base.recipe.precision == "bf16"


def test_a_batch_that_diverges_is_said_and_left_out(run, monkeypatch):
    law = Law(8, noise(0.1), ends=(8,)).install(monkeypatch)
    found = run(minutes=LONG)
    assert [batch for batch, _ in law.made].count(8) == 1  # it is not tried with other seeds
    assert found.critical.largest == 4
    assert any("diverged: 8" in line for line in head(found))
    runs = as_json(found)["runs"]
    assert [run["loss"] for run in runs if run["run"]["batch_size"] == 8] == [None]
    law = Law(8, ends=(4, 8)).install(monkeypatch)
    found = run(out="all", minutes=LONG)
    assert (found.critical, found.rows()) == (None, [])
    assert law.made == [(2, 20.0), (2, 30.0), (4, 30.0), (8, 30.0), (2, 45.0)]


@pytest.mark.parametrize(
    ("law", "minutes", "message"),
    [
        ((0.01, noise(0.05)), LONG, "at most .* images .* needed: a smaller batch than 2$"),
        ((10_000, noise(0.05)), LONG, "at least .* images .* needed: a larger batch than 8$"),
        ((10, noise(0.08, 3)), 11, ".* wider than a factor of 4; needed: more --minutes, or a la"),
        ((8, lambda batch, seed, epochs: epochs**2), 15, "--epochs: the loss does not fall with"),
    ],
)
def test_what_is_not_determined_says_what_is_needed(run, monkeypatch, law, minutes, message):
    Law(*law).install(monkeypatch)
    found = run(minutes=minutes)
    assert re.search(f"^not determined: {message}", describe(found))
    assert as_json(found)["determined"] is False


def on_a_rank(photos, out):
    """Begin an estimate by the trainer: its first two runs."""
    job = Job(dist.get_rank(), 2, 2, torch.device("cpu"))
    runs_of = module.runs_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "runs_of", lambda *given, **first: runs_of(*given, **first)[:2])
        patch.setattr(module, "_MOST_SEEDS", 0)
        patch.setattr(module, "FEWEST_UPDATES", 1)
        recipe = loaded(photos, "micro_batch_size=2")
        return estimate(recipe, job, out, batches=(4, 8), epochs=1.0)


@pytest.mark.slow("starts two processes that train")
def test_two_ranks_share_the_runs_and_find_the_same(photos, tmp_path):
    ours, theirs = run_ranks(2, on_a_rank, photos, tmp_path / "out")
    assert ours == theirs
    assert [record.status for record in ours.records] == ["finished"] * 2
