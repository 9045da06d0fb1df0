"""The scripts of benchmarks/comm: tables from stored measurements, and predictions made again."""

import json

import pytest

from benchmarks.comm import all_reduce, scaling, scaling_model, simulation
from benchmarks.comm.scaling_model import fit, predict
from benchmarks.comm.scaling_points import LINES, POINTS
from benchmarks.tables import RESULTS
from largebatch.recipes.predict.presets import (
    GPUS,
    PUBLISHED_OVER_PREDICTED,
    PUBLISHED_RUNS,
    STRAGGLER_SIGMA,
)


def content_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def tables_of_all_reduce(found):
    cases = found["cases"]
    return (
        all_reduce.contenders_and_goals(cases, all_reduce.goals(cases))
        + "\n\n"
        + all_reduce.races(cases)
    )


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("all_reduce", tables_of_all_reduce),
        ("simulation", lambda found: "\n".join(simulation.table(found["emulated"]))),
        ("scaling", lambda found: "\n".join(scaling.table(found))),
    ],
)
def test_the_stored_table_is_that_of_the_stored_measurements(name, table):
    written = table(content_of(name)).strip()
    assert written.count("\n|") > 5
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8").startswith(written)


def test_the_split_of_the_published_points_is_by_size_but_for_lines_of_two_batches():
    assert len({point.name for point in POINTS}) == len(POINTS)
    large = [point.name for point in POINTS if point.sets and point.run.gpus > 64]
    names = [f"MLPerf {name}, " for names in LINES.values() for name in names]
    assert all(name.startswith(tuple(names)) for name in large)
    assert not [point.name for point in POINTS if not point.sets and point.run.gpus <= 64]
    tests = {point["name"] for point in scaling.TESTS}
    assert len(tests) == 20
    assert not tests & {point.name for point in POINTS}


def test_stored_predictions_are_those_of_the_model_and_its_range_that_of_its_runs():
    stored = content_of("scaling")
    for place, (point, row) in enumerate(zip(POINTS, stored["points"]["runs"], strict=True)):
        assert row["name"] == point.name
        assert row["published"] == pytest.approx(point.published)
        if place % 6 == 0:  # simulated again
            assert row["predicted"] == pytest.approx(predict(point), rel=1e-6)
    summary = stored["points"]["summary"]
    assert summary == scaling.summary(stored["points"]["runs"])
    least, _, most = summary["published_over_predicted"]
    assert pytest.approx((least, most), abs=5e-3) == PUBLISHED_OVER_PREDICTED
    assert summary["runs"] == PUBLISHED_RUNS


def test_the_stored_test_of_the_forecast_is_that_of_the_command():
    stored = content_of("scaling")["tests"]
    assert stored["summary"] == scaling.summary(stored["runs"])
    assert [row["name"] for row in stored["runs"]] == [point["name"] for point in scaling.TESTS]
    before = {row["name"]: row for row in content_of("forecast_before")["points"]}
    for row in stored["runs"]:
        assert row["published"] == pytest.approx(before[row["name"]]["published"])
    assert scaling.tested(scaling.TESTS[16]) == stored["runs"][16]


def test_the_constants_are_the_best_among_their_neighbours(monkeypatch):
    sigmas = tuple(STRAGGLER_SIGMA + n / 1000 for n in (-4, 0, 4))
    monkeypatch.setattr(scaling_model, "SIGMAS", sigmas)
    best, *_ = fit()
    assert best.sigma == STRAGGLER_SIGMA
    for gpu, seconds in best.fixed_seconds.items():
        assert GPUS[gpu].fixed.seconds == pytest.approx(seconds, rel=0.02)
