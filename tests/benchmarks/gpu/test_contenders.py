"""Which contenders fit into the time, and the goals computed from their rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.contenders import (
    BARE,
    CONTENDERS,
    LARGE,
    OURS,
    SMALL,
    SMALL_GRAPH,
    TIMM,
    TYPED,
    Contender,
    choose,
    cost,
)
from benchmarks.gpu.goals import RATES, SUSTAINED, best, goals
from benchmarks.gpu.loops import overrides_of, step_of
from benchmarks.gpu.place import Place
from largebatch.recipes.schema.load import load
from largebatch.recipes.schema.recipe import Recipe

EVERYONE = [*CONTENDERS.values()]


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


def test_nine_minutes_hold_both_sides_eager_compiled_and_as_graphs():
    kept, _ = choose(EVERYONE, 9 * 60 * 0.92 - 25 - 95)
    names = {c.name for c in kept}
    assert {TYPED, f"{BARE}: cudnn.benchmark", SMALL, LARGE} <= names
    for setting in ("compiled", "graph", "compiled, graph"):
        assert {f"{BARE}: {setting}", f"{OURS}: {setting}"} <= names


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
    if contender.overrides and "cuda_graph" not in Recipe.model_fields:
        pytest.skip("the recipe's schema has no modes of compilation and no CUDA graphs yet")
    recipe = load(contender.recipe, overrides_of(contender, Place(None), "runs/x")).recipe
    assert recipe.precision == contender.precision
    assert recipe.batch_size == contender.batch * contender.steps


@pytest.mark.slow("imports timm and trains a network")
@pytest.mark.parametrize("whose", [BARE, TIMM])
def test_rivals_train(whose):
    contender = CONTENDERS[f"{whose}: cudnn.benchmark"]
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    try:
        step = step_of(contender, Place(torch.device("cpu"), dry=True))
        losses = [float(step()) for _ in range(4)]
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.set_float32_matmul_precision(before[1])
    assert losses[-1] < losses[0]  # on the same images each time


def row(contender, median):
    return {"contender": contender, "median": float(median)}


PLAIN, COMPILED = f"{BARE}: cudnn.benchmark", f"{BARE}: compiled"
RATE_ROWS = [
    row(TYPED, 8400),
    row(f"{OURS}: compiled", 9000),
    row(PLAIN, 6000),
    row(COMPILED, 7500),
    row(SMALL, 2000),
    row(SMALL_GRAPH, 3000),
    row(f"{BARE}: FP16, 32", 99_999),  # another load: no rival of the main one
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
        "micro-batches of 32 / of 256, resnet50-jia-b65536": (0.6, 0.70),
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
    assert best(RATE_ROWS, ours=False, like=SMALL)["contender"] == f"{BARE}: FP16, 32"
    assert best(RATE_ROWS, ours=False, like=LARGE) is None


def test_a_contender_takes_part_once():
    assert len({c.name for c in EVERYONE}) == len(EVERYONE)
    assert all(isinstance(c, Contender) and c.seconds > 0 and c.weight > 0 for c in EVERYONE)
