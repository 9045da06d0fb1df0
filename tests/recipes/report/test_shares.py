"""The shares of the time of training: they add up, and are absent where nothing recorded them."""

import itertools
import json
import re
from functools import partial
from importlib import resources

import numpy as np
import pytest

from largebatch.recipes import report
from largebatch.recipes.report import tables
from largebatch.recipes.report.charts import draw
from largebatch.recipes.report.curves import curves
from largebatch.recipes.report.groups import groups, read_runs
from largebatch.recipes.report.run import read_run
from largebatch.recipes.report.shares import TITLES, rows, stack, whole
from largebatch.recipes.training.watch.run_clock import PHASES

#: Shares of the time of a line, in percent; `written_runs` has the wait and the time.
FORWARD, BACKWARD, ALL_REDUCE, OPTIMIZER = 20, 40, 10, 5


def with_phases(line, scale=1.0):
    if line["split"] != "train":
        return line
    of = line["seconds"] / 100 * scale
    return line | {
        "input_seconds": 15 * of,
        "forward_seconds": FORWARD * of,
        "backward_seconds": BACKWARD * of,
        "all_reduce_seconds": ALL_REDUCE * of,
        "optimizer_seconds": OPTIMIZER * of,
    }


EXPECTED = {
    "input_seconds": 15,
    "forward_seconds": FORWARD,
    "backward_seconds": BACKWARD,
    "all_reduce_seconds": ALL_REDUCE,
    "optimizer_seconds": OPTIMIZER,
    "rest": 10,
}


def test_every_phase_of_a_run_has_a_name_in_the_order_of_the_clock():
    assert list(TITLES) == [*PHASES, "rest"]


def test_the_shares_of_a_run_are_those_of_its_lines(run_of):
    run = read_run(run_of("run", edit=with_phases))
    found = whole(run)
    assert found.percent == pytest.approx(EXPECTED)
    assert list(found.percent) == list(EXPECTED)
    assert (found.readings, found.of) == (12, 12)


def test_the_whole_run_weighs_each_line_by_its_time(run_of):
    """The last line is of 2 steps, the others of 10."""

    def edit(line):
        line = with_phases(line)
        if line["split"] == "train" and line["step"] == 112:
            line |= {"forward_seconds": 0.0}
        return line

    found = whole(read_run(run_of("run", edit=edit)))
    assert found.percent["forward_seconds"] == pytest.approx(FORWARD * 110 / 112)
    assert found.percent["rest"] == pytest.approx(10 + FORWARD * 2 / 112)


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.3])
def test_they_add_up_even_where_phases_exceed_the_time(run_of, scale):
    run = read_run(run_of("run", edit=partial(with_phases, scale=scale)))
    found, drawn = whole(run), stack(run)
    assert sum(found.percent.values()) == pytest.approx(100)
    assert all(sum(column) == pytest.approx(100) for column in zip(*drawn.percent, strict=True))
    if scale == 1.3:
        assert found.percent["rest"] == 0
        assert found.percent["forward_seconds"] == pytest.approx(FORWARD / 0.9)


def test_the_picture_has_a_column_for_each_reading(run_of):
    drawn = stack(read_run(run_of("run", edit=with_phases)))
    assert (drawn.keys, drawn.merged) == (list(EXPECTED), 1)
    assert drawn.edges == [0, *range(10, 111, 10), 112]
    assert drawn.percent == [[pytest.approx(share)] * 12 for share in EXPECTED.values()]


def test_a_long_picture_merges_readings_and_keeps_the_time(run_of):
    folder = run_of("run", edit=with_phases)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    line = next(line for line in map(json.loads, lines) if line["split"] == "train")
    written = [
        line | {"step": step, "epoch": step / 5, "forward_seconds": line["seconds"] * share}
        for step, share in zip(range(1, 602), itertools.cycle((0.1, 0.3)), strict=False)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    drawn = stack(read_run(folder))
    assert (drawn.merged, len(drawn.edges)) == (3, 202)
    assert (drawn.edges[1], drawn.edges[-1]) == (3, 601)
    forward = drawn.percent[drawn.keys.index("forward_seconds")]
    assert forward[:2] == pytest.approx([50 / 3, 70 / 3], abs=1e-4)


DAMAGES = {
    "a value of None": {"backward_seconds": None},
    "a value that is no number": {"optimizer_seconds": "x"},
    "a negative value": {"all_reduce_seconds": -1.0},
    "no time": {"seconds": None},
    "a time of 0": {"seconds": 0.0},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_line_has_no_shares_and_changes_no_others(run_of, damage):
    def edit(line):
        is_damaged = line["split"] == "train" and line["step"] == 30
        return with_phases(line) | (damage if is_damaged else {})

    folder = run_of("run", edit=edit)
    run = read_run(folder)
    found, drawn = whole(run), stack(run)
    assert found.percent == pytest.approx(EXPECTED)
    assert (found.readings, found.of) == (11, 12)
    assert [row[2] for row in drawn.percent] == [None] * len(EXPECTED)
    assert [row[3] for row in drawn.percent] == pytest.approx(list(EXPECTED.values()))
    data = draw(groups(read_runs([folder])))
    assert "11 of 12 readings record all parts. Older runs do not" in data["stack"]["note"]
    json.dumps(data, allow_nan=False)


def test_where_only_some_readings_have_phases_the_data_say_how_many(run_of):
    def edit(line):
        return with_phases(line) if line["step"] > 50 else line

    folder = run_of("run", edit=edit)
    (told,) = tables.as_data(groups(read_runs([folder])), None)["runs"]
    assert (told["training_time_readings"], told["readings"]) == (7, 12)
    waits = {c.label: c.steps for c in curves(read_run(folder)) if c.label.startswith("waiting")}
    assert waits == {
        "waiting for input": [*range(60, 111, 10), 112],
        "waiting for input, slowest rank": [*range(10, 111, 10), 112],
    }
    whole_run = {curve.label for curve in curves(read_run(run_of("whole", edit=with_phases)))}
    assert "waiting for input, slowest rank" not in whole_run
    chart = draw(groups(read_runs([folder])))["charts"][-1]
    assert [c["name"] for c in chart["curves"]] == ["waiting for input, slowest rank"]


def test_a_run_without_phases_is_shown_as_before_and_the_caption_says_so(run_of):
    folder = run_of("run")
    run = read_run(folder)
    assert (whole(run), stack(run)) == (None, None)
    data = draw(groups(read_runs([folder])))
    assert data["stack"] is None
    chart = next(c for c in data["charts"] if c["title"] == "Share of training time")
    assert [curve["name"] for curve in chart["curves"]] == ["waiting for input"]
    assert chart["note"] == (
        "Of the time between two readings. Forward pass, backward pass and optimizer are not told "
        "apart. Older runs do not record the phases of a step."
    )


def test_of_one_run_the_picture_takes_the_place_of_the_curves(run_of):
    def edit(line):
        line = with_phases(line)
        wait = {"all_reduce_wait_seconds": 0.1} if line["split"] == "train" else {}
        return line | wait

    data = draw(groups(read_runs([run_of("run", edit=edit)])))
    chart = next(c for c in data["charts"] if c["title"] == "Share of training time")
    assert [curve["name"] for curve in chart["curves"]] == ["waiting for the all-reduce"]
    assert chart["note"].endswith("The wait for the all-reduce is the median over the ranks.")
    drawn = data["stack"]
    assert drawn["names"] == [TITLES[key] for key in EXPECTED]
    assert drawn["whole"] == pytest.approx(list(EXPECTED.values()))
    assert drawn["colors"] == [0, 2, 3, 4, 5, 6]  # of each part the same on every page
    places = data["places"][drawn["place"]]
    assert places["step"] == drawn["edges"]
    assert places["seconds"][-1] == pytest.approx(112 * 2.56)
    assert all(len(places[axis]) == 13 for axis in data["axes"])
    assert not set(drawn["names"]) & {*data["series"]}


def test_of_several_runs_those_that_record_nothing_say_so(run_of):
    def edit(line):
        return with_phases(line) if line["step"] <= 50 else line

    folders = [
        run_of("all", edit=with_phases),
        run_of("some", edit=edit),
        run_of("none", "epochs=10"),
    ]
    every, some, none = rows(groups(read_runs(folders)))
    assert (every.name, every.percent, every.note) == ("all", pytest.approx(EXPECTED), "")
    assert (some.percent, some.note) == (pytest.approx(EXPECTED), "5 of 12 readings")
    assert (none.name, none.percent) == ("none", None)
    data = draw(groups(read_runs(folders)))
    assert data["stack"] is None
    titles = [c["title"] for c in data["charts"] if c["title"].startswith("Share of")]
    assert titles == [
        *(f"Share of training time, {TITLES[k]}" for k in EXPECTED if k != "rest"),
        "Share of training time, waiting for input, slowest rank",
    ]


def test_many_runs_are_told_by_group_as_means_that_add_up(run_of):
    folders = [
        run_of(f"a{seed}", seed=seed, steps=20, edit=partial(with_phases, scale=scale))
        for seed, scale in enumerate((0.6, 1.0))
    ]
    folders += [run_of(f"b{i}", "optimizer.lr=2.0", seed=i, steps=20) for i in range(15)]
    first, second = rows(groups(read_runs(folders)))
    assert (first.name, first.note) == ("lr 4", "")
    assert first.percent == pytest.approx(
        {k: 0.8 * v for k, v in EXPECTED.items() if k != "rest"} | {"rest": (46 + 10) / 2}
    )
    assert sum(first.percent.values()) == pytest.approx(100)
    assert (second.name, second.percent) == ("lr 2", None)


def test_memory_is_in_gb_and_a_gpu_has_charts_of_its_own(run_of):
    def edit(line):
        more = {"memory_bytes": 2.5e9, "gpu_utilisation": 97.0, "gpu_power_watts": 650.0}
        if line["step"] == 30:
            more["memory_bytes"] = None
        return line | more if line["split"] == "train" else line

    data = draw(groups(read_runs([run_of("run", edit=edit)])))
    charts = {chart["title"]: chart for chart in data["charts"]}
    (memory,) = charts["Memory"]["curves"]
    assert memory["values"] == [2.5, 2.5, None, *[2.5] * 9]
    assert charts["Memory"]["unit"] == "GB"
    assert charts["Memory"]["note"].startswith("Of the rank with most")
    for title, unit, value in (("GPU utilisation", "%", 97.0), ("GPU power", "W", 650.0)):
        assert charts[title]["unit"] == unit
        assert set(charts[title]["curves"][0]["values"]) == {value}
        assert charts[title]["note"].endswith("on the rank with the highest value.")


SPENT = {"training": 60.0, "evaluation": 0.0, "checkpoints": 10.0, "start_up": 25.0, "rest": 5.0}


def summary_of(folder, name, facts):
    path = folder / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | facts))
    return dict(tables.summary(read_run(folder), None))


def test_the_summary_tells_where_the_wall_time_went(run_of):
    folder = run_of("run")
    assert not [label for label in summary_of(folder, "summary.json", {}) if "Wall" in label]
    facts = {"time_spent": {**SPENT, "total": 100.0}, "from_step": 20}
    found = summary_of(folder, "summary.json", facts)
    space = "\N{NO-BREAK SPACE}"
    assert {label: text for label, text in found.items() if "Wall" in label} == {
        "Wall time since step 20": f"100.0{space}s",
        "Wall time, training": f"60.0{space}s, 60.0{space}%",
        "Wall time, checkpoints": f"10.0{space}s, 10.0{space}%",
        "Wall time, start-up": f"25.0{space}s, 25.0{space}%",
        "Wall time, rest": f"5.0{space}s, 5.0{space}%",
    }
    (told,) = tables.as_data(groups(read_runs([folder])), None)["runs"]
    assert (told["wall_time_seconds"], told["training_time_percent"]) == (SPENT, None)
    (told,) = tables.as_data(groups(read_runs([run_of("with", edit=with_phases)])), None)["runs"]
    assert told["training_time_percent"] == {
        key.removesuffix("_seconds"): pytest.approx(share) for key, share in EXPECTED.items()
    }


def test_of_a_run_that_was_stopped_it_is_in_the_ending_and_may_be_damaged(run_of):
    folder = run_of("run", steps=50, summary=False)
    facts = {"status": "stopped", "reason": "SIGTERM", "time": 0.0}
    found = summary_of(folder, "ending.json", facts | {"time_spent": SPENT})
    assert found["Wall time"] == "100.0\N{NO-BREAK SPACE}s"
    for damaged in (None, 3, [], {"training": None}):
        found = summary_of(folder, "ending.json", facts | {"time_spent": damaged})
        assert "Wall time" not in found


#: Vision without one kind of cones, in linear RGB (Machado, Oliveira and Fernandes, 2009).
VISIONS = {
    "all": (1, 0, 0, 0, 1, 0, 0, 0, 1),
    "protanopia": (
        *(0.152286, 1.052583, -0.204868),
        *(0.114503, 0.786281, 0.099216),
        *(-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        *(0.367322, 0.860646, -0.227968),
        *(0.280085, 0.672501, 0.047413),
        *(-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        *(1.255528, -0.076749, -0.178779),
        *(-0.078411, 0.930809, 0.147602),
        *(0.004733, 0.691367, 0.303900),
    ),
}


def lab(color, vision):
    """The color as seen, in CIELAB, where a distance of 2.3 is just noticeable."""
    srgb = np.array([int(color[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    seen = np.clip(np.reshape(VISIONS[vision], (3, 3)) @ linear, 0, 1)
    x, y, z = np.cbrt(np.maximum(np.array(to_xyz) @ seen / [0.95047, 1, 1.08883], 0.00886))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_the_colors_of_the_parts_are_told_apart(vision):
    css = resources.files(report).joinpath("page.css").read_text(encoding="utf-8")
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--part-(\d): #(\w{6})", light))
    assert list(found) == [str(i) for i in range(len(TITLES))]
    for theme in (found, found | dict(re.findall(r"--part-(\d): #(\w{6})", dark))):
        colors = [lab(color, vision) for color in theme.values()]
        pairs = itertools.combinations(colors, 2)
        assert min(np.linalg.norm(one - other) for one, other in pairs) > 15
