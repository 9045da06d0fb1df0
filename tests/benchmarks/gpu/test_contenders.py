"""The contenders: which of them fit into the time, and the steps that they take."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.contenders import (
    BARE,
    CONTENDERS,
    TIMM,
    TYPED,
    choose,
    cost,
)
from benchmarks.gpu.loops import overrides_of, step_of
from benchmarks.gpu.place import Place
from largebatch.recipes.schema.load import load

EVERYONE = [*CONTENDERS.values()]


@given(seconds=st.floats(0, 2000))
def test_what_is_left_out_does_not_fit_beside_what_weighs_more(seconds):
    kept, left_out = choose(EVERYONE, seconds)
    assert [c for c in EVERYONE if c in kept] == kept
    assert sorted(c.name for c in [*kept, *left_out]) == sorted(c.name for c in EVERYONE)
    assert not kept or cost(kept) <= seconds
    for contender in left_out:
        heavier = [c for c in kept if c.weight > contender.weight]
        assert cost([*heavier, contender]) > seconds


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
