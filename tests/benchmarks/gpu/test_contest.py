"""Contenders: their turns, the goals, and what happens if one fails or takes too long."""

import os
import time
from functools import partial

import pytest
import torch

from benchmarks.gpu import contest
from benchmarks.gpu.contenders import (
    BARE,
    COMPILED,
    CONTENDERS,
    CONTESTS,
    EAGER,
    OURS,
    TIMM,
    TYPED,
    Contender,
)
from benchmarks.gpu.contest import RATES, SUSTAINED
from benchmarks.gpu.loops import overrides_of, step_of
from benchmarks.gpu.place import Place
from largebatch.recipes.schema.load import load

CPU = Place(torch.device("cpu"), call="a")
MINE, PLAIN, FAST = Contender(OURS, TYPED), Contender(BARE, EAGER), Contender(BARE, COMPILED)
RATES_OF = {MINE.name: 1200.0, PLAIN.name: 900.0, FAST.name: 1000.0}


def serve(behaviours, pipe, contender, place):
    """A contender without a loop, which behaves as told by its name."""
    behaviour = behaviours[contender.name]
    if behaviour == "refused":
        pipe.send({"refused": "RecipeError: compile: 'fast' is not valid"})
        return
    pipe.send({"ready": True})
    while True:
        command = pipe.recv()
        if command["do"] == "warm":
            if behaviour == "dies":
                os.abort()
            pipe.send({"step_seconds": 0.01, "peak_GiB": 1.0})
        if command["do"] == "block":
            if behaviour == "hangs":
                time.sleep(600)
            seconds = command["steps"] * 256 / RATES_OF[contender.name]
            pipe.send({"seconds": seconds, "steps": command["steps"], "sensors": {"watts": 650.0}})
        if command["do"] == "profile":
            kinds = [{"kind": "optimizer", "launches": 2, "ms": 1.0, "percent": 2.0}]
            pipe.send({"busy_ms": 50.0, "kinds": kinds, "longest": []})


@pytest.fixture
def arena(report_of, monkeypatch, quick_processes):
    """Run a group of contenders that behave as told; the other groups are left out."""

    def run(call="a", seconds_left=10_000.0, **behaviours):
        of = {"mine": MINE, "plain": PLAIN, "fast": FAST}
        told = {of[name].name: how for name, how in behaviours.items()}
        monkeypatch.setattr(contest, "serve", partial(serve, told))
        group = tuple(of[name] for name in behaviours)
        monkeypatch.setattr(contest, "CONTESTS", {call: (group,)})
        monkeypatch.setattr(contest, "counted_memory", lambda contender, place: {})
        if "hangs" in behaviours.values():
            monkeypatch.setattr(contest, "REPLY_SECONDS", -3.0)
        report = report_of("contest", seconds_left)
        contest.run(report, Place(torch.device("cpu"), call=call))
        return report.content

    return run


def medians(content, table=RATES):
    return {row["contender"]: row["median"] for row in content["tables"].get(table, [])}


def test_contenders_take_turns_and_the_goals_are_computed(arena):
    content = arena(plain="works", mine="works", fast="works")
    assert content["checks"] == content["skipped"] == []
    assert medians(content) == pytest.approx(RATES_OF)
    assert SUSTAINED not in content["tables"]
    row = next(row for row in content["tables"][RATES] if row["contender"] == MINE.name)
    assert row["median_ratio"] == pytest.approx(1.2)
    assert (row["watts"], row["peak_GiB"], row["device"]) == (650.0, 1.0, "cpu")
    [step] = content["tables"]["a step"]  # our best is the recipe as typed
    assert step["wall_ms"] == pytest.approx(1e3 * 256 / 1200)
    assert step["idle_percent"] == pytest.approx(100 * (1 - 50 * 1200 / 256e3))
    reached = {goal["goal"]: (goal["reached"], goal["met"]) for goal in content["goals"]}
    against = f"{MINE.name} / {FAST.name} (1.200 to 1.200)"
    assert reached[against] == (pytest.approx(1.2), "met")
    [share] = [reached[goal] for goal in reached if goal.startswith("LARS")]
    assert share == (pytest.approx(100 * 1200 / 256e3), "met")


def test_call_b_ends_with_long_turns_and_contenders_without_time_are_left_out(arena):
    content = arena(call="b", plain="works", mine="works", fast="works")
    assert {*medians(content, SUSTAINED)} == {MINE.name, FAST.name}
    content = arena(seconds_left=40.0, plain="works", fast="works")
    assert medians(content) == pytest.approx({PLAIN.name: 900})
    [skip] = content["skipped"]
    assert (skip["what"], skip["reason"][:9]) == (FAST.name, "no time: ")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("dies", "failed: ended by signal 6"),
        ("hangs", "late: no reply within 0 s"),
        ("refused", "refused: RecipeError: compile: 'fast' is not valid"),
    ],
)
def test_a_contender_that_fails_is_reported_and_the_others_go_on(arena, behaviour, reason):
    content = arena(plain="works", mine=behaviour, fast="works")
    [check] = content["checks"]
    assert (check["check"], check["state"]) == (MINE.name, "failed")
    assert check["reason"] == reason
    assert medians(content) == pytest.approx({PLAIN.name: 900, FAST.name: 1000})
    content = arena(plain="works", fast=behaviour)  # one of the others is only missing
    assert content["checks"] == []
    assert [skip["what"] for skip in content["skipped"]] == [FAST.name]


def test_goals_of_a_given_table():
    small = Contender(OURS, TYPED, batch=32, passes=32).name
    eager = Contender(OURS, EAGER).name
    ratios = {"median_ratio": 1.1, "least_ratio": 1.0, "most_ratio": 1.2}
    rows = [
        {"contender": MINE.name, "median": 6000.0} | ratios,
        {"contender": eager, "median": 6200.0} | ratios,
        {"contender": FAST.name, "median": 5500.0},
        {"contender": small, "median": 4500.0},
    ]
    assert contest.goals(rows, "NVIDIA H200") == [
        (f"{eager} / {FAST.name} (1.000 to 1.200)", 1.1, 0.98),
        (f"{MINE.name} / our best setting", pytest.approx(6000 / 6200), 0.97),
        (f"{small} / our best setting", 1.0, 0.97),
        (f"{small} / 256 images", 0.75, 0.75),
        (f"{eager}, images/s", 6200.0, 6500),
        (f"{eager}, images/s", 6200.0, 8500),
        (f"{eager}, images/s", 6200.0, 10000),
    ]
    asked = contest.goals(rows, "NVIDIA H100 80GB HBM3")
    assert [least for what, _, least in asked if "images/s" in what] == [5200, 7100]
    assert contest.goals([], "NVIDIA H200") == []


@pytest.mark.parametrize("name", [name for name, c in CONTENDERS.items() if c.ours])
def test_recipes_take_the_settings_of_our_contenders(name):
    contender = CONTENDERS[name]
    recipe = load(contender.recipe, overrides_of(contender, Place(None), "runs/x")).recipe
    assert recipe.precision == contender.precision
    assert recipe.batch_size == contender.batch * contender.passes
    assert recipe.log_every.value == 50


@pytest.mark.slow("imports timm and trains a network")
@pytest.mark.parametrize(
    "contender", [PLAIN, Contender(TIMM, EAGER), Contender(BARE, EAGER, "fp16", 32, 32)]
)
def test_rivals_train(contender):
    assert contender in {c for groups in CONTESTS.values() for group in groups for c in group}
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    try:
        step = step_of(contender, Place(torch.device("cpu"), dry=True))
        losses = [float(step()) for _ in range(4)]
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.set_float32_matmul_precision(before[1])
    assert losses[-1] < losses[0]  # on the same images each time
