"""The loop of an estimate: its budget, what it resumes and finds, on runs that obey a law."""

import json
import math
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from largebatch.recipes.errors import AgreedError, RecipeError
from largebatch.recipes.tune.critical_batch import one_run
from largebatch.recipes.tune.critical_batch.estimate import Budget, estimate
from largebatch.recipes.tune.critical_batch.journal import JOURNAL
from largebatch.recipes.tune.critical_batch.prices import prices
from largebatch.recipes.tune.critical_batch.report import (
    as_json,
    describe,
    epochs_by_noise,
    head,
    notes,
)
from largebatch.recipes.tune.trial import Outcome
from tests.recipes.runs import JOB
from tests.recipes.tune.critical_batch.law import IMAGES, Law, loaded


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


@pytest.mark.parametrize("critical", [3, 8, 30])
def test_the_law_is_found_and_predicts_larger_batches(run, monkeypatch, critical):
    law = Law(critical, noise(0.02)).install(monkeypatch)
    found = run()
    assert found.critical.batch_size == pytest.approx(critical, rel=0.2)
    assert found.critical.determined
    by_size = {price.batch_size: price for price in prices(found)}
    assert list(by_size) == [2, 4, 8, 16, 32]
    for batch, price in by_size.items():
        true = 30 * (1 + batch / critical) / (1 + 2 / critical)
        assert price.epochs[0] == pytest.approx(true, rel=0.15)
        assert price.updates[0] == pytest.approx(price.epochs[0] * IMAGES / batch)
        assert price.speed_up[0] == pytest.approx(
            batch / 4 * by_size[4].epochs[0] / price.epochs[0]
        )
        assert price.doublings == math.log2(batch / 8)
        assert (price.measured is None) == (batch > 8)
    assert by_size[8].measured.epochs == pytest.approx(by_size[8].epochs[0], rel=0.05)
    assert len(law.made) >= 7


@pytest.mark.parametrize("critical", [3, 30])
def test_the_interval_of_an_estimate_holds_the_truth_as_often_as_it_says(
    run, monkeypatch, critical
):
    """90 % of 25: 22.5, with a standard deviation of 1.5."""
    inside = 0
    for draw in range(25):
        Law(critical, noise(0.02, draw)).install(monkeypatch)
        found = run(out=str(draw)).critical
        inside += found.low < critical < found.high
    assert inside >= 19


def test_runs_near_the_target_take_the_place_of_the_first_ones(run, monkeypatch):
    """The critical batch grows along a run: larger batches are worse before the target."""

    def early(batch, seed, epochs):
        effective = epochs / (1 + batch / 8) * (1 + 2 / 8) / 30  # of the target run
        return 1.4 if batch > 2 and effective < 0.9 else 1.0

    law = Law(8, early).install(monkeypatch)
    found = run(budget=Budget(epochs=10_000))
    assert (8, 30.0) in law.made
    predicted = {price.batch_size: price.epochs[0] for price in prices(found)}
    assert predicted[16] == pytest.approx(30 * (1 + 16 / 8) / (1 + 2 / 8), rel=0.1)


def test_finished_runs_are_not_repeated(run, monkeypatch):
    first = Law(8).install(monkeypatch)
    before = run()
    again = Law(8).install(monkeypatch)
    after = run(batches=(), epochs=None)  # as chosen before
    assert len(first.made) >= 5
    assert again.made == []
    assert (after.epochs, after.batches, after.critical) == (30, (2, 4, 8), before.critical)
    more = Law(8).install(monkeypatch)
    assert run(batches=(2, 4, 8, 16)).critical.largest == 16
    assert {batch for batch, _ in more.made} >= {16}


def test_runs_with_other_images_per_pass_are_not_continued(run, monkeypatch):
    """Batch norm would see other images."""
    Law(8).install(monkeypatch)
    of_8 = ["batch_size=16", "micro_batch_size=8"]
    assert run(*of_8, batches=(8, 16)).base.one_pass == 8
    with pytest.raises(AgreedError, match=r"--batches: 4 does not divide into forward passes of 8"):
        run(*of_8, batches=(4, 8))
    assert run(*of_8, batches=(8, 16, 32)).base.one_pass == 8


def test_a_run_that_was_interrupted_is_made_again(run, monkeypatch, tmp_path):
    Law(8, stop_at=4).install(monkeypatch)
    with pytest.raises(SystemExit):
        run()
    with (tmp_path / "out" / JOURNAL).open("a") as file:
        file.write('{"run": {"batch_size"')  # by a process that was killed
    law = Law(8).install(monkeypatch)
    found = run()
    assert len(found.records) == len(law.made) + 4
    assert all(json.loads(line) for line in (tmp_path / "out" / JOURNAL).read_text().splitlines())


def test_a_signal_that_comes_late_ends_the_estimate_and_keeps_the_run(run, monkeypatch, tmp_path):
    law = Law(8).install(monkeypatch)

    def told_to_end(*arguments):
        return replace(law(*arguments), signal=15 if len(law.made) == 3 else 0)

    monkeypatch.setattr("largebatch.recipes.tune.critical_batch.one_run.measure", told_to_end)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 128 + 15
    assert len((tmp_path / "out" / JOURNAL).read_text().splitlines()) == 2 + 3  # head, choices
    before = len(law.made)
    assert len(run().records) == len(law.made)
    assert before == 3


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["optimizer.momentum=0.8"], {}, r"optimizer.momentum is now 0.8, was 0.9; valid: another"),
        ([], {"rule": "linear"}, "--rule is now linear, was sqrt"),
    ],
)
def test_runs_of_another_recipe_are_not_continued(run, monkeypatch, overrides, options, message):
    Law(8).install(monkeypatch)
    run()
    with pytest.raises(AgreedError, match=f"--out: .*another recipe: {message}"):
        run(*overrides, **options)


def test_runs_of_an_earlier_version_are_continued(run, tmp_path, monkeypatch):
    law = Law(8)
    law.install(monkeypatch)
    run()
    made = len(law.made)
    path = tmp_path / "out" / JOURNAL
    head, *rest = path.read_text().splitlines(keepends=True)
    content = json.loads(head)
    del content["recipe"]["data"]["verify"]
    path.write_text(json.dumps(content) + "\n" + "".join(rest))
    run()
    assert len(law.made) == made


def test_a_file_of_something_else_is_refused(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / JOURNAL).write_text('{"trial": 1}\n')
    with pytest.raises(AgreedError, match=r"runs.jsonl is not what this command writes"):
        run()


def test_the_budget_in_epochs_is_kept_over_all_calls(run, monkeypatch):
    Law(8).install(monkeypatch)
    found = run(budget=Budget(epochs=100))
    trained = sum(record.trained for record in found.records)
    assert 60 < trained <= 100
    assert found.left_out
    assert any("not made, as the budget does not suffice" in line for line in head(found))
    again = Law(8).install(monkeypatch)
    run(budget=Budget(epochs=100))
    assert again.made == []
    run(budget=Budget(epochs=200))
    assert again.made


def test_the_length_of_the_runs_is_chosen_by_the_time(run, monkeypatch):
    """All runs are about 13 times as long as the target run, and an epoch takes 2 s."""
    law = Law(8).install(monkeypatch)
    found = run(epochs=None, budget=Budget(minutes=10))
    assert 20 <= found.epochs <= 25
    assert found.seconds <= 600
    assert not found.left_out
    assert law.made[0][1] < 2  # the speed is measured first, by a short run
    assert [record.kind for record in found.records][:2] == ["probe", "run"]
    assert run(epochs=None, out="long", budget=Budget(minutes=1000)).epochs == 50  # the recipe's


def test_too_few_updates_are_refused_before_anything_is_trained(run, monkeypatch):
    law = Law(8).install(monkeypatch)
    with pytest.raises(RecipeError, match=r"--epochs: 3 are too few for a batch of 8, which makes"):
        run(epochs=3.0)
    assert law.made == []


def test_branches_need_as_many_updates_as_whole_runs(run, monkeypatch):
    """A batch of 8 makes 25 updates in 5 epochs, and 6 in a branch of a quarter of them."""
    law = Law(8).install(monkeypatch)
    message = r"--epochs: 5 are too few .* 6 updates in its shortest run.*; valid: at least 16 ep"
    for method in ("branches", "both"):
        with pytest.raises(RecipeError, match=message):
            run(epochs=5.0, method=method)
    assert law.made == []
    assert run(epochs=5.0).epochs == 5.0


def test_runs_are_repeated_with_other_seeds_while_the_interval_is_wide(run, monkeypatch):
    law = Law(8, noise(0.2)).install(monkeypatch)
    found = run(budget=Budget(epochs=10_000))
    assert len(law.made) == 5 + 2 + 7 * 4
    assert {record.run.seed for record in found.records} == {*range(8)}


def test_one_seed_is_not_enough_to_call_an_interval_narrow(run, monkeypatch):
    law = Law(8).install(monkeypatch)
    found = run(budget=Budget(epochs=10_000))
    assert found.critical.high < 1.05 * found.critical.low
    assert {record.run.seed for record in found.records} == {0, 1}
    assert len(law.made) == 5 + 2 + 4


def test_a_batch_that_diverges_is_said_and_left_out(run, monkeypatch):
    law = Law(8, noise(0.1), ends=(8,)).install(monkeypatch)
    found = run(budget=Budget(epochs=10_000))
    assert [batch for batch, _ in law.made].count(8) == 1  # it is not tried with other seeds
    assert found.critical.largest == 4
    measured = {price.batch_size: price.measured for price in prices(found)}
    assert measured[8].bound == "diverged"
    assert any("1 diverged" in line for line in head(found))
    runs = as_json(found, prices(found), {})["runs"]
    assert [run["loss"] for run in runs if run["run"]["batch_size"] == 8] == [None]


def test_nothing_is_repeated_where_all_larger_batches_diverge(run, monkeypatch):
    """The run that measures the speed of the recipe's own batch, 4, ends well."""
    law = Law(8, ends=(4, 8)).install(monkeypatch)
    diverges = law.ends

    def after_the_probe(*arguments):
        law.ends = diverges if law.made else ()
        return law(*arguments)

    monkeypatch.setattr("largebatch.recipes.tune.critical_batch.one_run.measure", after_the_probe)
    found = run(epochs=None, budget=Budget(minutes=100))
    assert found.critical is None
    assert {run.run.seed for run in found.records} == {0}
    assert [batch for batch, _ in law.made].count(2) == 3  # at its three lengths, once


def test_the_limit_that_is_spent_is_named(run, monkeypatch):
    Law(8).install(monkeypatch)
    with pytest.raises(AgreedError, match=r"--max-epochs: the budget is spent; valid: more"):
        run(epochs=None, budget=Budget(epochs=0.5, minutes=100))  # the first run trains 2.5
    with pytest.raises(AgreedError, match=r"--minutes: the budget is spent; valid: more"):
        run(epochs=None, budget=Budget(epochs=100, minutes=0.01))


def test_a_critical_batch_below_all_batches_needs_smaller_ones(run, monkeypatch):
    Law(0.01, noise(0.05)).install(monkeypatch)
    found = run(budget=Budget(epochs=10_000))
    text = describe(found, "whole runs")
    assert re.match(r"not determined: at most \d+ images, with no lower bound; needed: ", text)
    assert text.endswith("a batch smaller than 2")


def test_time_in_which_runs_side_by_side_wait_for_each_other_counts(run, monkeypatch, tmp_path):
    """Two runs are charged half of their time each; the longer one takes the other half alone."""
    law, clock = Law(8).install(monkeypatch), [0.0]

    def side_by_side(base, runs, overrides, folders, share, keep):
        made = [
            one_run.make_run(base, each, JOB, folder, overrides=changes, workers=share).record
            for each, changes, folder in zip(runs, overrides, folders, strict=True)
        ]
        clock[0] += max(share * record.seconds for record in made)
        for record in made:
            keep(record)

    module = "largebatch.recipes.tune.critical_batch.estimate"
    monkeypatch.setattr(f"{module}.make_side_by_side", side_by_side)
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = run(workers=2, budget=Budget(epochs=10_000))
    assert found.seconds == pytest.approx(clock[0])
    assert found.seconds > 1.1 * sum(record.seconds for record in found.records)
    before = len(law.made)
    assert run(workers=2, budget=Budget(epochs=10_000)).seconds == pytest.approx(clock[0])
    assert len(law.made) == before


def test_an_interval_that_is_too_wide_is_not_determined(run, monkeypatch):
    Law(50, noise(0.06)).install(monkeypatch)
    found = run(budget=Budget(epochs=320))
    text = describe(found, "whole runs")
    assert text.startswith("not determined: ")
    assert "images" in text.partition("needed: ")[2]
    content = as_json(found, prices(found), {})["methods"]["whole runs"]
    assert content["determined"] is False


def test_a_loss_that_does_not_fall_is_said(run, monkeypatch):
    law = Law(8).install(monkeypatch)

    def rises(*arguments):
        outcome = law(*arguments)
        return replace(outcome, training=((outcome.epochs, outcome.epochs),))

    monkeypatch.setattr("largebatch.recipes.tune.critical_batch.one_run.measure", rises)
    found = run()
    assert found.critical is None
    assert prices(found) == []
    assert any("not determined: --epochs: the loss does not fall" in line for line in head(found))


def test_a_batch_that_does_not_reach_the_target_says_so(run, monkeypatch):
    """A rate that fails at the largest batch leaves its losses above the target."""
    Law(8, lambda batch, seed, epochs: 3.0 if batch == 8 else 1.0).install(monkeypatch)
    measured = {price.batch_size: price.measured for price in prices(run())}
    assert measured[8].bound == "above"
    assert measured[4].bound == "reached"


def test_the_noise_of_runs_is_shown_beside_the_methods(run, monkeypatch):
    law = Law(8).install(monkeypatch)
    law.noise_scale = lambda epoch, epochs: 10.0 if epoch < epochs / 2 else 30.0
    found = run()
    content = as_json(found, prices(found), {})["gradient_noise"]
    assert content == pytest.approx({"first_third": 10, "last_third": 30, "mean": 20})
    (line,) = (line for line in head(found) if line.startswith("gradient noise scale"))
    assert line == (
        "gradient noise scale: 20 images along the runs (10 in their first third, 30 in their "
        "last); not measured at batches 2: one backward pass per step"
    )
    assert {record.run.batch_size for record in found.records if record.noise} == {4, 8}
    by_noise = [30 * (1 + 16 / scale) / (1 + 2 / scale) for scale in (20, 30, 10)]
    assert epochs_by_noise(found, 16) == pytest.approx(by_noise)
    assert any(
        "if the critical batch were the gradient noise scale, batch 32 would take 70.9" in line
        for line in notes(found, prices(found))
    )


def test_runs_side_by_side_do_not_go_with_several_ranks(photos, tmp_path):
    ranks = replace(JOB, world_size=2)
    object.__setattr__(ranks, "gather", lambda value: [value, value])
    with pytest.raises(AgreedError, match=r"--workers: 2 runs side by side .* 2 ranks; valid: 1"):
        estimate(loaded(photos), ranks, tmp_path, workers=2)


def test_a_diverged_run_does_not_tell_the_speed(run, monkeypatch):
    """It may end before its first step is timed."""
    law = Law(8, ends=(4,)).install(monkeypatch)
    law.seconds_per_epoch = 0.0
    with pytest.raises(AgreedError, match=r"optimizer.lr: the run of 1 epochs .* diverged; valid"):
        run(epochs=None)


def test_a_trunk_that_diverges_leaves_the_whole_runs(run, monkeypatch):
    law = Law(8).install(monkeypatch)

    def diverges(recipe, overrides, job, run_dir, *watches):
        if run_dir.name == "trunk":
            run_dir.mkdir()
            return Outcome("diverged", (), (), 1.0, 2.0)
        return law(recipe, overrides, job, run_dir)

    monkeypatch.setattr("largebatch.recipes.tune.critical_batch.one_run.measure", diverges)
    found = run(method="both", budget=Budget(epochs=10_000))
    assert found.critical is found.methods["whole runs"]
    assert found.methods["branches"] == "the recipe's own run diverges"
