"""The scripts of benchmarks/comm: tables from stored measurements, and predictions made again."""

import json
from functools import partial

import pytest

from benchmarks.comm import all_reduce, scaling, scaling_model, simulation
from benchmarks.comm.published import SPEED_UPS, best_groups, paper_form
from benchmarks.comm.published import steps_of_the_paper as steps
from benchmarks.comm.scaling_model import fit, predict
from benchmarks.comm.scaling_points import POINTS
from benchmarks.tables import RESULTS
from largebatch.comm import ALGORITHMS, Topology
from largebatch.recipes.predict.assumptions import PUBLISHED
from largebatch.recipes.predict.presets import GPUS, STRAGGLER_SIGMA


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


def test_latency_steps_match_the_paper():
    assert best_groups(1024) == (186, [16, 32])
    for k, count in {4: 522, 8: 282, 16: 186, 32: 186, 64: 282}.items():
        traffic = ALGORITHMS["hierarchical"].traffic(1, Topology.of(1024, k))
        assert steps(1024, k) == count == 4 * (k - 1) + 2 * (1024 // k - 1)
        # The implementation needs fewer steps in the group.
        assert traffic.intra_messages + traffic.inter_messages == count - 2 * (k - 1)


def test_predictions_are_close_to_published_speed_ups():
    with paper_form():
        for entry in SPEED_UPS:
            assert 0.5 * entry.published < entry.run()[0] < 1.5 * entry.published
    assert "paper" not in ALGORITHMS


def test_the_split_of_the_published_points_is_by_size_with_one_exception():
    assert len({point.name for point in POINTS}) == len(POINTS)
    large = [point.name for point in POINTS if point.sets and point.run.gpus > 64]
    assert large == [scaling_model.LINES["a100"]]
    assert not [point.name for point in POINTS if not point.sets and point.run.gpus <= 64]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MLPerf 3.1, H100, 64 × 50", 0.670),
        ("MLPerf 2.0, A100 (Dell), 64 × 204", 0.834),
        ("MLPerf 0.7, V100, 512 × 65", 0.891),
    ],
)
def test_efficiencies_of_mlperf_are_those_of_minutes_and_epochs(name, expected):
    (point,) = (point for point in POINTS if point.name == name)
    assert point.published == pytest.approx(expected, abs=0.002)


def test_stored_predictions_are_those_of_the_model_and_of_the_plan():
    stored = content_of("scaling")
    assert [row["name"] for row in stored["points"]] == [point.name for point in POINTS]
    for point, row in zip(POINTS, stored["points"], strict=True):
        assert (row["published"], row["sets_constants"]) == (
            pytest.approx(point.published),
            point.sets,
        )
        assert row["predicted"] == pytest.approx(predict(point), rel=1e-6)
    kept = [row for row in stored["points"] if not row["sets_constants"]]
    assert stored["kept_apart"] == pytest.approx(scaling.summary(kept))
    near = partial(pytest.approx, abs=5e-4)
    assert [(name, near(a), near(b)) for name, a, b in PUBLISHED] == [
        (row["name"], row["published"], row["predicted"]) for row in kept
    ]


def test_the_constants_are_the_best_among_their_neighbours(monkeypatch):
    sigmas = tuple(STRAGGLER_SIGMA + n / 1000 for n in (-2, -1, 0, 1, 2))
    monkeypatch.setattr(scaling_model, "SIGMAS", sigmas)
    best, *_ = fit()
    assert best.sigma == STRAGGLER_SIGMA
    for gpu, seconds in best.fixed_seconds.items():
        assert GPUS[gpu].fixed_seconds == pytest.approx(seconds, rel=0.02)
