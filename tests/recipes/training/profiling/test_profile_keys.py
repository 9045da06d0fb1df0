"""The keys of a profile: their forms, and what is refused."""

import json

import pytest
import torch

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.callback_list import CallbackList, callbacks_of
from tests.recipes.training.small import small, small_trainer

__all__ = ["small"]  # a fixture


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["profile.steps=15..10"], r"profile\.steps: 15\.\.10 runs backwards; valid: .*10\.\.15"),
        (["profile.steps=0..3"], r"profile\.steps: 0\.\.3 begins before the first step; valid"),
        (["profile.steps=ten"], r"profile\.steps: 'ten' is not a range of steps; valid: such as"),
        (["profile.steps=1.5"], r"profile\.steps: 1\.5 is not a range of steps; valid"),
        (["profile.steps=true"], r"profile\.steps: True is not a range of steps; valid"),
        (["profile.ranks=some"], r"profile\.ranks: 'some' does not name ranks; valid"),
        (["profile.ranks=[]"], r"profile\.ranks: \[\] does not name ranks; valid"),
        (["profile.ranks=[-1]"], r"profile\.ranks: \[-1\] does not name ranks; valid"),
        (["profile.shapes=2"], r"profile\.shapes: "),
        (["profile.step=2"], r"unknown key 'profile\.step'; did you mean 'profile\.steps'"),
    ],
)
def test_bad_values_are_refused_by_key(keys, message):
    with pytest.raises(RecipeError, match=message):
        load("digits", keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["profile.steps=5..9"],
            r"profile\.steps: 5\.\.9 goes beyond the end of the run, step 8; valid: 1\.\.8",
        ),
        (
            ["profile.steps=2", "profile.ranks=[0,1]"],
            r"profile\.ranks: there is no rank 1 among 1; valid: 0",
        ),
    ],
)
def test_steps_and_ranks_that_a_run_does_not_have_are_refused(small, tmp_path, keys, message):
    with pytest.raises(RecipeError, match=message):
        small_trainer(tmp_path / "run", *keys)
    assert not (tmp_path / "run").exists()


def test_a_rank_that_does_not_exist_is_named_before_a_run_is_started():
    recipe = load("digits", ["profile.steps=2", "profile.ranks=[0, 4]"]).recipe
    job = Job(0, 4, 4, torch.device("cpu"))
    with pytest.raises(RecipeError, match=r"no rank 4 among 4; valid: 0 to 3, or all"):
        CallbackList(callbacks_of(recipe), job).check(recipe, None)


def test_a_folder_that_cannot_be_written_is_refused(small, tmp_path):
    trainer = small_trainer(tmp_path / "run", "profile.steps=2")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("")
    with pytest.raises(RecipeError, match=r"profile\.steps: .*/profile cannot be written: .*valid"):
        trainer.run()


@pytest.mark.parametrize(
    ("value", "first", "last", "plain"),
    [("10..15", 10, 15, "10..15"), ("10", 10, 10, "10"), ("' 3 .. 4 '", 3, 4, "3..4")],
)
def test_the_forms_of_a_range(value, first, last, plain):
    recipe = load("digits", [f"profile.steps={value}"]).recipe
    assert recipe.profile.first_and_last == (first, last)
    assert json.loads(recipe.model_dump_json())["profile"]["steps"] == plain


def test_keys_without_steps_have_no_effect_and_say_so():
    loaded = load("digits", ["profile.ranks=all", "profile.memory=true"])
    assert loaded.notices == (
        "profile.ranks has no effect: profile.steps is null",
        "profile.memory has no effect: profile.steps is null",
    )
    assert loaded.recipe.profile.records(7)
    one = load("digits", ["profile.ranks=2", "profile.steps=1"]).recipe.profile
    assert [one.records(rank) for rank in range(4)] == [False, False, True, False]
