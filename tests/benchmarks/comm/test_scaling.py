"""The published points: their split, their stored predictions and the constants fitted to them."""

import json

import pytest

from benchmarks.comm.scaling import summary
from benchmarks.comm.scaling_model import LINES, fit, predict
from benchmarks.comm.scaling_points import POINTS, XE8545, per_gpu
from benchmarks.tables import RESULTS
from largebatch.recipes.predict.assumptions import PUBLISHED
from largebatch.recipes.predict.presets import GPUS, STRAGGLER_SIGMA

STORED = json.loads((RESULTS / "scaling.json").read_text())


def test_the_split_is_by_size_with_one_exception():
    names = [point.name for point in POINTS]
    assert len(set(names)) == len(names)
    assert [p.name for p in POINTS if p.sets and p.run.gpus > 64] == [LINES["a100"]]
    assert not [p.name for p in POINTS if not p.sets and p.run.gpus <= 64]
    assert not any(p.sets for p in POINTS if "Jia et al." in p.name)


def test_efficiencies_of_mlperf_are_those_of_minutes_and_epochs():
    named = {p.name: p.published for p in POINTS}
    for name, expected in (
        ("MLPerf 3.1, H100, 64 × 50", 0.670),
        ("MLPerf 3.0, H100, 3,584 × 16", 0.358),
        ("MLPerf 2.0, A100 (Dell), 64 × 204", 0.834),
        ("MLPerf 2.0, A100, 1,024 × 35", 0.669),
        ("MLPerf 2.0, A100, 4,216 × 16", 0.419),
        ("MLPerf 0.7, V100, 512 × 65", 0.891),
    ):
        assert named[name] == pytest.approx(expected, abs=0.002)
    assert per_gpu(35, 13.34, 8) == pytest.approx(7003, rel=1e-3)
    assert XE8545.per_node == 4


@pytest.mark.slow("predicts 72 points of seven models")
def test_stored_predictions_are_those_of_the_model_and_of_the_plan():
    rows = {row["name"]: row for row in STORED["points"]}
    assert list(rows) == [point.name for point in POINTS]
    for point in POINTS:
        row = rows[point.name]
        assert row["published"] == pytest.approx(point.published)
        assert row["sets_constants"] == point.sets
        assert row["predicted"] == pytest.approx(predict(point), rel=1e-6)
        assert row["low"] <= row["predicted"] <= row["high"]
    kept = [row for row in STORED["points"] if not row["sets_constants"]]
    assert STORED["kept_apart"] == pytest.approx(summary(kept))
    assert [name for name, _, _ in PUBLISHED] == [row["name"] for row in kept]
    for (_, published, predicted), row in zip(PUBLISHED, kept, strict=True):
        assert published == pytest.approx(row["published"], abs=5e-4)
        assert predicted == pytest.approx(row["predicted"], abs=5e-4)


@pytest.mark.slow("predicts 51 points for 61 constants each")
def test_the_constants_are_those_that_the_points_give():
    best, *_ = fit()
    assert best.sigma == STRAGGLER_SIGMA
    for gpu, seconds in best.fixed_seconds.items():
        assert GPUS[gpu].fixed_seconds == pytest.approx(seconds, rel=0.02)
