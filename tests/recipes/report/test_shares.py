"""The shares of the time of training: they add up, and are absent where nothing recorded them."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.report.figures import COLORS, PARTS, of_shares
from largebatch.recipes.report.groups import groups, read_runs
from largebatch.recipes.report.shares import TITLES, by_run, recording, shares
from largebatch.recipes.training.watch.clocks import PHASES

#: Shares of the time of a line, in percent.
EXPECTED = {
    "input_seconds": 15,
    "forward_seconds": 20,
    "backward_seconds": 40,
    "all_reduce_seconds": 10,
    "optimizer_seconds": 5,
    "rest": 10,
}


def with_phases(line, scale=1.0):
    """A line of training with the phases of :data:`EXPECTED`; others unchanged."""
    if line["split"] != "train":
        return line
    of = line["seconds"] / 100 * scale
    return line | {key: share * of for key, share in EXPECTED.items() if key != "rest"}


def lines(*edits, scale=1.0):
    line = with_phases({"split": "train", "seconds": 2.0}, scale)
    return [line | edit for edit in edits]


def grouped(*folders):
    return groups(read_runs(folders)[0])


def test_every_phase_of_a_run_has_a_name_in_the_order_of_the_clock():
    assert list(TITLES) == [*PHASES, "rest"]


def test_each_line_weighs_by_its_time():
    found = shares(lines({}, {"seconds": 6.0}))
    assert found["forward_seconds"] == pytest.approx(100 * 2 * 0.4 / 8)
    assert list(shares(lines({}))) == list(EXPECTED)
    assert shares(lines({})) == pytest.approx(EXPECTED)


@given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=5))
def test_they_add_up_even_where_phases_exceed_the_time(scales):
    found = shares([line for scale in scales for line in lines({}, scale=scale)])
    assert sum(found.values()) == pytest.approx(100)
    assert min(found.values()) >= 0


@pytest.mark.parametrize(
    "damage",
    [
        {"backward_seconds": None},
        {"optimizer_seconds": "x"},
        {"all_reduce_seconds": -1.0},
        {"seconds": None},
        {"seconds": 0.0},
    ],
    ids=str,
)
def test_a_damaged_line_has_no_shares_and_changes_no_others(damage):
    found = lines({}, damage)
    assert shares(found) == pytest.approx(EXPECTED)
    assert len(recording(found)) == 1


def test_a_bar_for_each_run_says_which_recorded_nothing(run_of):
    found = grouped(run_of("a", edit=with_phases), run_of("b", "epochs=10"))
    rows = by_run(found)
    assert rows == {"epochs 20": pytest.approx(EXPECTED), "epochs 10": {}}
    figure = of_shares(rows)
    assert [(bar["name"], bar["x"]) for bar in figure["data"]] == [
        (TITLES[key], [pytest.approx(share), None]) for key, share in EXPECTED.items()
    ]
    assert [bar["y"] for bar in figure["data"]] == [["epochs 20", "epochs 10: not recorded"]] * 6
    json.dumps(figure, allow_nan=False)


def test_many_runs_are_shown_by_group_as_means_that_add_up(run_of):
    folders = [
        run_of(f"a{seed}", seed=seed, steps=20, edit=lambda line, s=scale: with_phases(line, s))
        for seed, scale in enumerate((0.6, 1.0))
    ]
    folders += [run_of(f"b{i}", "optimizer.lr=2.0", seed=i, steps=20) for i in range(15)]
    rows = by_run(grouped(*folders))
    assert rows["lr 4"] == pytest.approx(
        {k: 0.8 * v for k, v in EXPECTED.items() if k != "rest"} | {"rest": (46 + 10) / 2}
    )
    assert rows["lr 2"] == {}


# --- colours -------------------------------------------------------------------------------------

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


def linear(color):
    srgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def lab(color, vision):
    """The color as seen, in CIELAB, where a distance of 2.3 is just noticeable."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    seen = np.clip(np.reshape(VISIONS[vision], (3, 3)) @ linear(color), 0, 1)
    x, y, z = np.cbrt(np.maximum(np.array(to_xyz) @ seen / [0.95047, 1, 1.08883], 0.00886))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_the_colors_of_the_parts_are_distinct(vision):
    assert len(PARTS) == len(TITLES)
    pairs = itertools.combinations([lab(color, vision) for color in PARTS], 2)
    assert min(np.linalg.norm(one - other) for one, other in pairs) > 15


@pytest.mark.parametrize("paper", ["#ffffff", "#14171b"])
def test_curves_are_seen_on_a_light_and_a_dark_page(paper):
    """By a contrast of 3, which WCAG 2 asks for of graphics."""
    luminance = [0.2126, 0.7152, 0.0722]
    for color in COLORS:
        low, high = sorted((linear(color) @ luminance, linear(paper) @ luminance))
        assert (high + 0.05) / (low + 0.05) >= 3, color
