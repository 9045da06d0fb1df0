"""The curves of a run are its metrics, its learning rate is its schedule's."""

import json

from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.report.captions import caption, cut
from largebatch.recipes.report.curves import Chart, charts, curves, not_recorded
from largebatch.recipes.report.run import read_run
from largebatch.recipes.report.thinning import kept
from largebatch.recipes.report.trust_ratios import heat_map
from largebatch.recipes.training.lr import learning_rates
from largebatch.recipes.training.stragglers import RankTimes, metrics_of
from tests.recipes.report.written_runs import write_run


def of(folder):
    return {(curve.chart, curve.label): curve for curve in curves(read_run(folder))}


def test_they_are_the_values_of_the_lines(tmp_path):
    _, lines = write_run(tmp_path / "run")
    found = of(tmp_path / "run")
    for chart, label, split, key in (
        ("loss", "training", "train", "loss"),
        ("loss", "validation", "val", "loss"),
        ("top1", "validation", "val", "top1"),
        ("throughput", "training", "train", "images_per_second"),
    ):
        curve = found[chart, label]
        of_split = [line for line in lines if line["split"] == split]
        assert curve.steps == [line["step"] for line in of_split]
        assert curve.values == [line[key] for line in of_split]
    waits = [100 * n["wait_seconds"] / n["seconds"] for n in lines if n["split"] == "train"]
    assert found["time", "waiting for input"].values == [round(wait, 4) for wait in waits]


def test_the_learning_rate_is_that_of_each_step(tmp_path):
    timeline, lines = write_run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    schedule = learning_rates(run.recipe, timeline).schedule
    curve = of(tmp_path / "run")["lr", "training"]
    assert curve.steps == list(range(112))
    assert curve.values == [schedule(step) for step in range(112)]
    logged = [line["lr"] for line in lines if line["split"] == "train"]
    assert max(curve.values) == 4.0 > max(logged)


def test_without_the_recipe_it_is_as_logged(tmp_path):
    _, lines = write_run(tmp_path / "run")
    (tmp_path / "run" / "recipe.yaml").unlink()
    curve = of(tmp_path / "run")["lr", "training"]
    assert curve.values == [line["lr"] for line in lines if line["split"] == "train"]


def test_a_run_that_was_resumed_with_another_learning_rate_has_it_as_logged(run_of):
    def edit(line):
        return line | {"lr": 2 * line["lr"]} if "lr" in line and line["step"] <= 50 else line

    folder = run_of("run", edit=edit)
    run = read_run(folder)
    curve = of(folder)["lr", "training"]
    assert (curve.steps, curve.values) == (
        [line["step"] for line in run.train],
        [line["lr"] for line in run.train],
    )
    assert [note for note in run.notes if "they are drawn as logged, not at each step" in note]
    told = caption(Chart("lr", "Learning rate"), None, [run], None, thinned=False)
    assert told == "As logged."


def test_parts_of_the_time_and_values_of_other_versions_are_shown(run_of):
    def edit(line):
        if line["split"] == "train":
            line |= {"forward_seconds": line["seconds"] / 4, "peak_memory_bytes": 2**30}
        return line

    found = of(run_of("run", edit=edit))
    assert set(found["time", "forward"].values) == {25.0}
    assert set(found["peak_memory_bytes", "training"].values) == {2**30}
    assert [chart.key for chart in charts(list(found.values()))][-2:] == [
        "time",
        "peak_memory_bytes",
    ]


def test_of_the_meters_of_ranks_the_wait_for_the_all_reduce_is_a_share_of_the_time(run_of):
    meters = metrics_of([RankTimes(10.0, 1.0, wait) for wait in (1.0, 2.0, 6.0)])

    def edit(line):
        more = {key: value * line["seconds"] / 10 for key, value in meters.items()}
        return line | more if line["split"] == "train" else line

    found, without = of(run_of("run", edit=edit)), of(run_of("bare"))
    assert found.keys() - without.keys() == {("time", "waiting for the all-reduce")}
    assert set(found["time", "waiting for the all-reduce"].values) == {20.0}
    missing = not_recorded([read_run(run_of("again", edit=edit))])
    assert any(line.startswith("time of forward pass") for line in missing)


def test_what_is_missing_is_named(run_of):
    bare = not_recorded(
        [read_run(run_of("bare", edit=lambda x: x if x["split"] == "train" else None))]
    )
    assert [line.split(" (")[0] for line in bare[:5]] == [
        "accuracy and loss on the validation images",
        "gradient norm",
        "loss scale",
        "gradient noise scale",
        "trust ratios",
    ]
    assert bare[5].startswith("time of forward pass")
    assert bare[6].startswith("memory")

    def full(line):
        more = {"gradient_norm": 1.0, "loss_scale": 2.0, "noise_scale": 3.0, "memory_bytes": 4}
        phases = ("input_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")
        more |= dict.fromkeys(phases, 0.1)
        return line | more if line["split"] == "train" else line

    folder = run_of("full", edit=full)
    assert [line.split(" (")[0] for line in not_recorded([read_run(folder)])] == ["trust ratios"]
    about = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(about | {"device": "cuda"}))
    assert not_recorded([read_run(folder)])[1:] == [
        "utilisation and power of the GPU (the package nvidia-ml-py)"
    ]


def ratio_line(step, **layers):
    return json.dumps({"split": "trust_ratio", "step": step, "epoch": step / 5, **layers}) + "\n"


def test_the_heat_map_has_a_row_for_each_layer_and_a_column_for_each_reading(run_of):
    folder = run_of("run")
    assert heat_map(read_run(folder)) is None
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(ratio_line(10, conv=[0.1, 0.2, 0.3], fc=[1.0, 2.0, 3.0]))
        file.write(ratio_line(30, conv=[0.4, 0.5, None]))
    found = heat_map(read_run(folder))
    assert (found.layers, found.edges, found.merged) == (["conv", "fc"], [0, 10, 30], 1)
    assert found.least == [[0.1, 0.4], [1.0, None]]
    assert found.median == [[0.2, 0.5], [2.0, None]]
    assert found.greatest == [[0.3, None], [3.0, None]]


def test_a_long_heat_map_merges_readings(run_of):
    folder = run_of("run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(ratio_line(s, conv=[s, s + 1, s + 2]) for s in range(1, 601))
    found = heat_map(read_run(folder))
    assert found.merged == 2
    assert found.edges == list(range(0, 601, 2))
    assert (found.least[0][0], found.median[0][0], found.greatest[0][0]) == (1, 2.5, 4)


@given(
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=300),
    st.integers(8, 60),
)
def test_thinning_keeps_ends_and_extremes_within_the_limit(values, most):
    points = kept(values, most)
    assert len(points) <= max(most, 0) or len(values) <= most
    assert points == sorted({*points})
    if len(values) <= most:
        assert points == list(range(len(values)))
        return
    assert (points[0], points[-1]) == (0, len(values) - 1)
    finite = [value for value in values if value is not None]
    drawn = [values[i] for i in points if values[i] is not None]
    if finite:
        assert (min(drawn), max(drawn)) == (min(finite), max(finite))
    assert (None in values) == any(values[i] is None for i in points)


def test_an_axis_is_cut_only_where_a_loss_runs_away():
    assert cut([[2.3, 1.0, None], [2.4, 0.5]]) is None
    assert cut([[2.0, 1.0], [2.5, 1e9]]) == 4.0
    assert cut([[2.0, 1e9]]) == 4.0
    assert cut([[None], []]) is None
    assert cut([]) is None
