"""The curves of a run are its metrics, its learning rate is its schedule's."""

import json

from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.report.curves import Chart, Curve, charts, cut
from largebatch.recipes.report.figures import kept, of_curves, of_trust_ratios
from largebatch.recipes.report.groups import groups, read_runs
from largebatch.recipes.report.run import read_run
from largebatch.recipes.training.schedule import learning_rates
from largebatch.recipes.training.watch.stragglers import RankTimes, metrics_of
from tests.recipes.report.test_shares import EXPECTED, with_phases
from tests.recipes.report.written_runs import write_run


def of(*folders):
    """The curves of some runs by chart, label and run, and the charts in order."""
    found = charts(groups(read_runs(folders)[0]))
    every = {(chart.title, c.label): c for chart in found for c in chart.curves}
    return every, found


def figure_of(*folders):
    found = groups(read_runs(folders)[0])
    return of_curves(found, charts(found))


def test_they_are_the_values_of_the_lines(tmp_path):
    timeline, lines = write_run(tmp_path / "run")
    found, _ = of(tmp_path / "run")
    for title, label, split, key in (
        ("Loss", "training", "train", "loss"),
        ("Loss", "validation", "val", "loss"),
        ("Top-1 accuracy", "validation", "val", "top1"),
        ("Throughput", "training", "train", "images_per_second"),
    ):
        of_split = [line for line in lines if line["split"] == split]
        assert found[title, label].steps == [line["step"] for line in of_split]
        assert found[title, label].values == [line[key] for line in of_split]
    waits = [100 * n["wait_seconds"] / n["seconds"] for n in lines if n["split"] == "train"]
    wait = found["Wait for input, slowest rank", "training"]
    assert wait.values == [round(share, 4) for share in waits]
    rate = found["Learning rate", "training"]
    schedule = learning_rates(rate.run.recipe, timeline).schedule
    assert (rate.steps, rate.values) == ([*range(112)], [schedule(s) for s in range(112)])
    assert max(rate.values) == 4.0 > max(line["lr"] for line in lines if "lr" in line)


def test_the_learning_rate_is_as_logged_where_the_recipe_does_not_give_it(run_of):
    def edit(line):  # as of a run that was resumed with another one
        return line | {"lr": 2 * line["lr"]} if "lr" in line and line["step"] <= 50 else line

    resumed, without = run_of("resumed", edit=edit), run_of("without")
    (without / "recipe.yaml").unlink()
    for folder in (resumed, without):
        curve = of(folder)[0]["Learning rate", "training"]
        assert curve.values == [line["lr"] for line in curve.run.train]
    assert [n for n in read_run(resumed).notes if "drawn as logged, not at each step" in n]


def test_units_and_values_of_other_versions(run_of):
    meters = metrics_of([RankTimes(10.0, 1.0, wait) for wait in (1.0, 2.0, 6.0)])

    def edit(line):
        if line["split"] != "train":
            return line
        line |= {key: value * line["seconds"] / 10 for key, value in meters.items()}
        line |= {"memory_bytes": None if line["step"] == 30 else 2.5e9, "gpu_power_watts": 650.0}
        return line | {"new_seconds": line["seconds"] / 4, "new": 3, "words": "x"}

    found, drawn = of(run_of("run", edit=edit))
    assert found["Memory", "training"].values == [2.5, 2.5, None, *[2.5] * 9]
    assert {*found["GPU power", "training"].values} == {650.0}
    assert {*found["Wait for the all-reduce", "training"].values} == {20.0}
    assert {*found["new_seconds", "training"].values} == {25.0}
    assert [(chart.title, chart.unit) for chart in drawn][-2:] == [
        ("new_seconds", "% of time"),
        ("new", ""),
    ]


def test_one_menu_moves_all_curves_to_another_axis(tmp_path):
    _, lines = write_run(tmp_path / "run", edit=with_phases)
    figure = figure_of(tmp_path / "run")
    layout, data = figure["layout"], figure["data"]
    menu = layout["updatemenus"][0]
    assert [button["label"] for button in menu["buttons"]] == [
        "steps",
        "epochs",
        "images",
        "seconds",
    ]
    assert menu["active"] == 0
    at = next(i for i, one in enumerate(data) if one.get("meta") == "Loss")
    steps = [line["step"] for line in lines if line["split"] == "train"]
    assert data[at]["x"] == steps
    moved = {button["label"]: button["args"][0]["x"] for button in menu["buttons"]}
    assert moved["epochs"][at] == [line["epoch"] for line in lines if line["split"] == "train"]
    assert moved["images"][at] == [256 * step for step in steps]
    assert all(
        len(one["x"]) == len(x) for xs in moved.values() for one, x in zip(data, xs, strict=True)
    )
    cells = {one.get("xaxis", "x") for one in data}
    assert {f"x{name[5:]}" for name in layout if name.startswith("xaxis")} == cells


def test_the_shares_of_one_run_are_stacked_over_its_steps(run_of):
    def edit(line):
        return with_phases(line) | ({"forward_seconds": None} if line["step"] == 30 else {})

    data = figure_of(run_of("run", edit=edit))["data"]
    stack = [one for one in data if one.get("stackgroup")]
    assert [one["name"].split(" ")[-2] for one in stack] == [f"{n:.1f}" for n in EXPECTED.values()]
    assert all(one["x"] == [0, *range(10, 111, 10), 112] for one in stack)
    for column in range(13):
        values = [one["y"][column] for one in stack]
        assert values == [None] * 6 if column == 3 else round(sum(values), 6) == 100
    assert not [one for one in figure_of(run_of("bare"))["data"] if one.get("stackgroup")]


def test_several_runs_are_overlaid_in_a_colour_for_each_group(run_of):
    folders = [run_of(f"a{s}", seed=s) for s in (0, 1)] + [run_of("b", "optimizer.lr=2.0")]
    data = figure_of(*folders)["data"]
    drawn = [(o["name"], o["legendgroup"]) for o in data if o.get("meta") == "Loss, training"]
    assert drawn == [("lr 4, seed 0", "0"), ("lr 4, seed 1", "0"), ("lr 2", "1")]
    assert [o["name"] for o in data if o.get("showlegend", True)] == ["lr 4", "lr 2"]
    titles = {o["meta"] for o in data if "meta" in o}
    assert "Top-1 accuracy, validation" in titles
    assert "Top-1 accuracy, training" not in titles


def test_a_cross_marks_the_last_finite_loss_of_a_run_that_diverged(run_of):
    def edit(line):
        return line | {"loss": None} if line["step"] == 30 and line["split"] == "train" else line

    data = figure_of(run_of("run", steps=30, summary=False, edit=edit))["data"]
    crosses = [one for one in data if one.get("marker", {}).get("symbol") == "x"]
    assert [(one["meta"], one["name"]) for one in crosses] == [("Loss", "training")]
    assert crosses[0]["marker"]["size"] == [0, 10, 0]


# --- what bounds a chart ---------------------------------------------------------------------

LOSSES = st.lists(st.none() | st.floats(1e-3, 1e12), max_size=8)


def losses(*curves):
    """A chart of curves, each with whether its run diverged and its losses."""

    class _Run:
        def __init__(self, diverged):
            self.status = "diverged" if diverged else "finished"

    made = [Curve("training", "", _Run(d), [*range(len(of))], of) for d, of in curves]
    return Chart("Loss", "", made)


@given(st.lists(st.tuples(st.booleans(), LOSSES), max_size=5))
def test_the_first_losses_of_healthy_runs_are_never_cut(curves):
    top = cut(losses(*curves))
    known = [(diverged, [v for v in of if v is not None]) for diverged, of in curves]
    every = [value for _, of in known for value in of]
    if top is None:
        return
    assert top < max(every)
    assert all(of[0] <= top for diverged, of in known if of and not diverged)


def test_an_axis_is_cut_only_where_a_loss_runs_away():
    training, validation = [6.9, 2.0, 1.0], [1.4, 0.9]
    assert cut(losses((False, training), (False, validation), (False, [1.3]))) is None
    assert cut(losses((False, [2.0, 1.0]), (True, [2.5, 1e9]))) == 4.0
    assert cut(losses((True, [2.0, 1e9]))) == 4.0
    assert cut(losses((False, [None]), (False, []))) is None


@given(
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=300),
    st.integers(8, 60),
)
def test_thinning_keeps_ends_and_extremes_within_the_limit(values, most):
    points = kept(values, most)
    assert points == sorted({*points})
    if len(values) <= most:
        assert points == list(range(len(values)))
        return
    assert len(points) <= most
    assert (points[0], points[-1]) == (0, len(values) - 1)
    finite = [value for value in values if value is not None]
    drawn = [values[i] for i in points if values[i] is not None]
    if finite:
        assert (min(drawn), max(drawn)) == (min(finite), max(finite))
    assert (None in values) == any(values[i] is None for i in points)


# --- trust ratios --------------------------------------------------------------------------------


def ratio_line(step, **layers):
    return json.dumps({"split": "trust_ratio", "step": step, "epoch": step / 5, **layers}) + "\n"


def test_the_heat_map_has_a_row_for_each_layer_and_a_column_for_each_reading(run_of):
    folder = run_of("run")
    assert of_trust_ratios(read_run(folder)) is None
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(ratio_line(10, conv=[0.01, 0.1, 0.3], fc=[1.0, 10.0, 30.0]))
        file.write(ratio_line(30, conv=[0.4, 1.0, 2.0]))
    (trace,) = of_trust_ratios(read_run(folder))["data"]
    assert (trace["y"], trace["x"]) == (["conv", "fc"], [0, 10, 30])
    assert trace["z"] == [[-1.0, 0.0], [1.0, None]]
    assert trace["customdata"][0] == [[0.1, 0.01, 0.3], [1.0, 0.4, 2.0]]


def test_a_long_heat_map_merges_readings(run_of):
    folder = run_of("run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(ratio_line(s, conv=[s, s + 1, s + 2]) for s in range(1, 601))
    (trace,) = of_trust_ratios(read_run(folder))["data"]
    assert trace["x"] == list(range(0, 601, 2))
    assert trace["customdata"][0][0] == [2.5, 1, 4]
