"""Which contenders fit into the time, and the goals computed from their rows."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import drive
from benchmarks.gpu.contenders import (
    BARE,
    CONTENDERS,
    IMPORT_SECONDS,
    LARGE,
    OURS,
    SMALL,
    SMALL_GRAPH,
    SUSTAINED_SECONDS,
    SUSTAINED_SHARE,
    TIMM,
    TYPED,
    Contender,
    choose,
    cost,
)
from benchmarks.gpu.goals import RATES, SUSTAINED, best, goals
from benchmarks.gpu.loops import images_per_step, overrides_of, step_of
from benchmarks.gpu.place import Place
from largebatch.recipes.schema.load import load

EVERYONE = [*CONTENDERS.values()]
PLAIN, COMPILED = f"{BARE}: cudnn.benchmark", f"{BARE}: compiled"


def test_names_say_whose_a_contender_is():
    assert all(c.whose in (OURS, BARE, "timm's step") for c in EVERYONE)
    assert CONTENDERS[TYPED].overrides == ()
    assert (CONTENDERS[SMALL].batch, CONTENDERS[LARGE].batch) == (32, 256)
    assert CONTENDERS[SMALL].recipe == CONTENDERS[LARGE].recipe == "resnet50-jia-b65536"


def test_groups_are_in_one_piece_and_the_main_load_comes_first():
    groups = [c.group for c in EVERYONE]
    seen = list(dict.fromkeys(groups))
    assert groups == sorted(groups, key=seen.index)
    mains = [c.main for c in EVERYONE]
    assert mains == sorted(mains, reverse=True)


@given(seconds=st.floats(0, 2000))
def test_what_is_left_out_does_not_fit_beside_what_weighs_more(seconds):
    kept, left_out = choose(EVERYONE, seconds)
    assert [c for c in EVERYONE if c in kept] == kept
    assert sorted(c.name for c in [*kept, *left_out]) == sorted(c.name for c in EVERYONE)
    assert not kept or cost(kept) <= seconds
    for contender in left_out:
        heavier = [c for c in kept if c.weight > contender.weight]
        assert cost([*heavier, contender]) > seconds


def test_all_fit_into_enough_time_and_none_into_no_time():
    assert choose(EVERYONE, 5000) == (EVERYONE, [])
    assert choose(EVERYONE, 0) == ([], EVERYONE)


def chosen(seconds):
    """Return the names of those that fit into the share of ``fast``, whose own start takes some."""
    seconds = drive.PLANNED * seconds - 10
    sustained = min(SUSTAINED_SECONDS, SUSTAINED_SHARE * seconds)
    kept, _ = choose(EVERYONE, seconds - IMPORT_SECONDS - sustained)
    return {c.name for c in kept}


def test_nine_minutes_of_fast_hold_both_sides_eager_compiled_as_graphs_and_in_fp16():
    names = chosen(9 * 60)
    assert {TYPED, f"{BARE}: cudnn.benchmark"} <= names
    assert {SMALL, LARGE, SMALL_GRAPH, f"{BARE}: FP16, 256"} <= names
    for setting in ("compiled", "graph", "compiled, graph"):
        assert {f"{BARE}: {setting}", f"{OURS}: {setting}"} <= names
    # docs/results/gpu.md says so
    assert not [name for name in names if name.startswith(TIMM) or "autotune" in name]
    assert f"{BARE}: FP16, 32 x 32" not in names


def test_nine_minutes_of_the_default_hold_what_is_likely_to_be_best_of_both_sides():
    share = drive.PARTS["fast"] / sum(drive.PARTS[name] for name in drive.DEFAULT)
    names = chosen(9 * 60 * share)
    assert {TYPED, f"{BARE}: cudnn.benchmark", f"{BARE}: compiled"} <= names
    assert {f"{BARE}: compiled, graph", f"{OURS}: compiled, graph"} <= names


def test_a_graph_of_ours_that_cannot_be_captured_is_refused():
    ours = [c for c in EVERYONE if c.ours and "graph" in c.name]
    assert len(ours) == 3
    assert all("cuda_graph=true" in c.overrides for c in ours)
    assert not any("auto" in o.rpartition("=")[2].split("-") for c in EVERYONE for o in c.overrides)


def test_the_recipe_as_typed_has_no_setting_of_speed():
    keys = {o.partition("=")[0] for o in overrides_of(CONTENDERS[TYPED], Place(None), "runs/x")}
    assert keys == {
        "data.source",
        "data.path",
        "batch_size",
        "micro_batch_size",
        "evaluate_every",
        "target_accuracy",
        "checkpoint.every",
        "run_dir",
    }


@pytest.mark.parametrize("contender", [c for c in EVERYONE if c.ours], ids=lambda c: c.name)
def test_recipes_take_the_settings_of_our_contenders(contender):
    recipe = load(contender.recipe, overrides_of(contender, Place(None), "runs/x")).recipe
    assert recipe.precision == contender.precision
    assert recipe.batch_size == contender.batch * contender.steps


@pytest.mark.slow("imports timm and trains a network")
@pytest.mark.parametrize(
    "name", [f"{BARE}: cudnn.benchmark", f"{TIMM}: cudnn.benchmark", f"{BARE}: FP16, 32 x 32"]
)
def test_rivals_train(name):
    contender = CONTENDERS[name]
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    try:
        step = step_of(contender, Place(torch.device("cpu"), dry=True))
        losses = [float(step()) for _ in range(4)]
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.set_float32_matmul_precision(before[1])
    assert losses[-1] < losses[0]  # on the same images each time


@pytest.mark.slow("imports timm and takes steps of a network")
@pytest.mark.parametrize(("name", "passes"), [(f"{BARE}: FP16, 32 x 32", 2), (COMPILED, 1)])
def test_rivals_take_as_many_passes_as_ours_and_compile_the_loss(monkeypatch, name, passes):
    outputs = []

    def compiled(function, mode=None):
        def call(*arguments):
            outputs.append(function(*arguments))
            return outputs[-1]

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    precision = torch.get_float32_matmul_precision()
    contender, place = CONTENDERS[name], Place(torch.device("cpu"), dry=True)
    try:
        step_of(replace(contender, compile="default"), place)()
    finally:
        torch.set_float32_matmul_precision(precision)
    assert [loss.shape for loss in outputs] == [()] * passes
    assert images_per_step(contender, place) == 4 * passes


def row(contender, median):
    return {"contender": contender, "median": float(median)}


RATE_ROWS = [
    row(TYPED, 8400),
    row(f"{OURS}: compiled", 9000),
    row(PLAIN, 6000),
    row(COMPILED, 7500),
    row(SMALL, 2000),
    row(SMALL_GRAPH, 3000),
    row(f"{BARE}: FP16, 32 x 32", 99_999),  # another load: no rival of the main one
    row(LARGE, 5000),
]


def values(found):
    return {what: (pytest.approx(reached), least) for what, reached, least in found}


def test_goals_from_rows():
    assert values(goals({RATES: RATE_ROWS})) == {
        f"our best (compiled) / the best other ({COMPILED})": (1.2, 1.0),
        f"our best (compiled) / the best other ({COMPILED}), wanted": (1.2, 1.15),
        "our best (compiled), images/s": (9000, 8500),
        "the recipe as typed / our best setting": (8400 / 9000, 0.97),
        "micro-batches of 32 (graph) / of 256 (eager), resnet50-jia-b65536": (0.6, 0.70),
    }


def test_rows_of_two_runs_are_not_compared():
    mine = f"{OURS}: max-autotune"
    later = [row(TYPED, 100) | {"run": 2}, row(mine, 120) | {"run": 2}]
    first = {RATES: RATE_ROWS, SUSTAINED: [row(TYPED, 8000), row(COMPILED, 8100)]}
    found = goals(first | {RATES: [*RATE_ROWS, *later]})
    assert found[: -len(later)] == goals(first)
    assert values(found[-len(later) :]) == {
        "our best (max-autotune), images/s (run 2)": (120, 8500),
        "the recipe as typed / our best setting (run 2)": (100 / 120, 0.97),
    }


def test_sustained_rows_decide_where_both_sides_have_one():
    sustained = [row(TYPED, 8000), row(f"{OURS}: compiled", 8100), row(COMPILED, 8100)]
    found = values(goals({RATES: RATE_ROWS, SUSTAINED: sustained}))
    assert found[f"our best (compiled) / the best other ({COMPILED})"] == (1.0, 1.0)
    assert found["our best (compiled), images/s"] == (8100, 8500)
    assert found["the recipe as typed / our best setting"] == (8000 / 8100, 0.97)
    only_ours = {RATES: RATE_ROWS, SUSTAINED: [row(TYPED, 1.0)]}
    assert goals(only_ours) == goals({RATES: RATE_ROWS})


def test_goals_of_what_was_not_measured_are_left_out():
    assert goals({}) == []
    assert [what for what, _, _ in goals({RATES: [row(TYPED, 100)]})] == [
        "our best (recipe as typed), images/s",
        "the recipe as typed / our best setting",
    ]
    assert goals({RATES: [row(PLAIN, 100), row(SMALL, 3)]}) == []


def test_rivals_are_those_of_the_same_precision_and_batch():
    assert best(RATE_ROWS, ours=False, like=SMALL)["contender"] == f"{BARE}: FP16, 32 x 32"
    assert best(RATE_ROWS, ours=False, like=LARGE) is None


def test_a_contender_takes_part_once():
    assert len({c.name for c in EVERYONE}) == len(EVERYONE)
    assert all(isinstance(c, Contender) and c.seconds > 0 and c.weight > 0 for c in EVERYONE)
