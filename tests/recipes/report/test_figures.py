"""The curves of a page are the values of the lines, on one of four axes."""

import plotly.graph_objects
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.report.figures import charts, figure, thinned
from largebatch.recipes.report.runs import read_runs
from tests.recipes.report.written_runs import append, diverge, write_run


def figure_of(*folders):
    return figure(read_runs(folders)[0])


def test_curves_are_the_values_of_the_lines_and_a_menu_moves_them_to_another_axis(tmp_path):
    _, lines = write_run(tmp_path / "run")
    train, val = ([line for line in lines if line["split"] == of] for of in ("train", "val"))
    drawn = charts(read_runs([tmp_path / "run"])[0])
    curves = {(chart.title, curve.name): curve for chart in drawn for curve in chart.curves}
    for title, label, of, key in (
        ("Loss", "training", train, "loss"),
        ("Loss", "validation", val, "loss"),
        ("Top-1 accuracy", "validation", val, "top1"),
        ("Learning rate", "training", train, "lr"),
    ):
        curve = curves[title, label]
        assert curve.values == [line[key] for line in of]
        assert curve.at["steps"] == [line["step"] for line in of]
    waits = [round(100 * line["wait_seconds"] / line["seconds"], 4) for line in train]
    assert curves["Wait for input, slowest rank", "training"].values == waits
    found = figure_of(tmp_path / "run")
    layout, data = found["layout"], found["data"]
    (menu,) = layout["updatemenus"]
    moved = {button["label"]: button["args"][0]["x"] for button in menu["buttons"]}
    assert list(moved) == ["steps", "epochs", "images", "seconds"]
    at = next(i for i, one in enumerate(data) if one.get("meta") == "Loss")
    assert menu["active"] == 0
    assert data[at]["x"] == moved["steps"][at] == [line["step"] for line in train]
    assert moved["epochs"][at] == [line["epoch"] for line in train]
    for xs in moved.values():
        assert [len(one["x"]) for one in data] == [*map(len, xs)]
    cells = {one.get("xaxis", "x") for one in data}
    assert {f"x{name[5:]}" for name in layout if name.startswith("xaxis")} == cells


def test_units_and_values_that_are_not_numbers(run_of):
    def edit(line):
        memory = {"memory_bytes": None if line["step"] == 30 else 2.5e9, "gradient_norm": "x"}
        return line | memory if line["split"] == "train" else line

    folder = run_of("run", edit=edit)
    for step in (5, 9):
        append(folder, {"split": "trust_ratio", "step": step, "epoch": 1, "fc": [1, step, 9]})
    found = {chart.title: chart.curves[0].values for chart in charts(read_runs([folder])[0])}
    assert found["Memory"] == [2.5, 2.5, None, *[2.5] * 9]
    assert found["Trust ratio of each layer"] == [5, 9]
    plotly.graph_objects.Figure(figure_of(folder))


def test_several_runs_are_overlaid_in_a_colour_for_each_group(run_of):
    folders = [run_of(f"a{s}", seed=s) for s in (0, 1)] + [run_of("b", "optimizer.lr=2.0")]
    found = figure_of(*folders)
    plotly.graph_objects.Figure(found)
    drawn = [
        (o["name"], o["legendgroup"]) for o in found["data"] if o.get("meta") == "Loss, training"
    ]
    assert drawn == [("lr 4, seed 0", "0"), ("lr 4, seed 1", "0"), ("lr 2", "1")]
    assert [o["name"] for o in found["data"] if o.get("showlegend", True)] == ["lr 4", "lr 2"]
    assert found["layout"]["updatemenus"][0]["active"] == 1


@pytest.mark.parametrize("last", [1.0, 1e9])
def test_no_loss_is_outside_and_one_that_runs_away_hides_no_other(run_of, last):
    def edit(line):
        return diverge(line | {"loss": last} if line["step"] == 20 else line)

    layout = figure_of(run_of("run", steps=30, summary=False, edit=edit), run_of("b"))["layout"]
    assert not [axis for axis in layout.values() if "range" in axis]
    assert (layout["yaxis"].get("type") == "log") == (last == 1e9)


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=2000))
def test_thinning_keeps_ends_and_extremes(values):
    points = thinned(values)
    assert points == sorted({*points})
    assert len(points) <= 901
    drawn = [values[i] for i in points]
    finite = [value for value in values if value is not None]
    if values:
        assert (drawn[0], drawn[-1]) == (values[0], values[-1])
    if finite:
        kept = [value for value in drawn if value is not None]
        assert (min(kept), max(kept)) == (min(finite), max(finite))
