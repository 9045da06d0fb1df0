"""The dimensions of the search, its first guesses, and the recipes of its trials."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import bases, load
from largebatch.recipes.training.schedule import learning_rates
from largebatch.recipes.training.timeline import timeline_of
from largebatch.recipes.tune.learning_rate.space import (
    FURTHER,
    Dimension,
    evenly,
    guesses,
    narrowed,
    own_settings,
    space_of,
)
from largebatch.recipes.tune.learning_rate.trial_recipe import (
    fraction,
    kept,
    longest_warmup,
    setting_overrides,
)

DIGITS = load("digits").recipe


def names(space):
    return [d.name for d in space]


def by_name(space):
    return {d.name: d for d in space}


def test_the_default_range_is_a_factor_of_30_around_the_rate():
    rate, warmup = space_of(DIGITS)
    assert (rate.low, rate.high) == (0.133, 120)
    assert (warmup.low, warmup.high) == (0, 0.4)


def test_further_dimensions_include_the_recipes_values():
    space = space_of(DIGITS, FURTHER)
    assert names(space) == ["lr", "warmup", *FURTHER]
    own = own_settings(DIGITS, space, 0.2)
    assert own == {
        **{"lr": 4.0, "warmup": 0.2, "power": 2.0, "momentum": 0.9},
        **{"weight_decay": 1e-4, "trust_coefficient": 1e-3},
    }


@pytest.mark.parametrize(
    ("overrides", "also", "lr", "message"),
    [
        ([], [], (2.0, 1.0), "--lr: 2..1 is an empty range; valid: LOW..HIGH with 0 < LOW < HIGH"),
        ([], [], (1.0, 1.0), "--lr: 1..1 is an empty range"),
        ([], [], (0.0, 1.0), "--lr: 0..1 is an empty range"),
        ([], [], (math.nan, 1.0), "--lr: nan..1 is an empty range"),
        ([], [], (1e-5, 1.0), "--lr: 1e-05 is below schedule.start or schedule.end, 0.0001"),
        (["optimizer.lr=0"], [], None, "optimizer.lr: 0 gives no range of rates"),
        ([], ["gamma"], None, "--also: cannot vary 'gamma'; valid: power, momentum, weight_decay"),
        (["schedule.name=cosine", "schedule.power=2"], ["power"], None, "--also: power is of poly"),
        (
            ["optimizer.name=adamw"],
            ["momentum"],
            None,
            "--also: adamw does not take momentum; valid: power, weight_decay",
        ),
    ],
)
def test_ranges_that_cannot_be_searched_are_refused(overrides, also, lr, message):
    with pytest.raises(RecipeError) as caught:
        space_of(load("digits", overrides).recipe, also, lr)
    assert str(caught.value).startswith(message)


@given(st.floats(0, 1), st.sampled_from(space_of(DIGITS, FURTHER)))
def test_places_and_values_of_a_range_convert_into_each_other(unit, dimension):
    value = dimension.value(unit)
    assert dimension.low <= value <= dimension.high
    assert dimension.value(dimension.unit(value)) == pytest.approx(value, rel=1e-9)
    assert dimension.unit(value) == pytest.approx(unit, abs=0.01)


def test_momentum_is_spread_by_its_distance_from_one():
    momentum = Dimension("momentum", 0.0, 0.99, "log of 1 - x")
    assert momentum.value(0.5) == pytest.approx(0.9)
    assert momentum.around(0.9, 2).low == pytest.approx(0.8)
    assert momentum.around(0.9, 2).high == pytest.approx(0.95)


def test_guesses_are_the_own_values_and_rates_scaled_from_other_batches():
    recipe = load("cifar10-b2560", ["optimizer.lr=45", "schedule.warmup=0"]).recipe
    space = space_of(recipe)
    own = own_settings(recipe, space, 0.0)
    assert guesses(own, space, recipe, bases("cifar10-b2560")) == [
        {"lr": 45.0, "warmup": 0.0},
        {"lr": 45.0, "warmup": 0.15},
        {"lr": 8.0, "warmup": 0.15},
        {"lr": 2.53, "warmup": 0.15},
    ]


def test_a_batch_size_that_is_overridden_scales_the_recipes_own_rate():
    recipe = load("digits", ["batch_size=1024"]).recipe
    space = space_of(recipe)
    own = own_settings(recipe, space, 0.2)
    found = guesses(own, space, recipe, bases("digits"))
    assert [g["lr"] for g in found] == [4.0, 16.0, 8.0]
    assert {g["warmup"] for g in found} == {0.2}
    # The rate of another optimizer says nothing.
    other = load("digits", ["batch_size=1024", "optimizer.name=sgd"]).recipe
    assert guesses(own, space, other, bases("digits")) == [own]


def test_points_fill_the_range_evenly_and_do_not_depend_on_their_number():
    space = space_of(DIGITS)
    points = evenly(space, 16)
    assert points[:5] == evenly(space, 5)
    quarters = {
        (int(2 * by_name(space)["lr"].unit(p["lr"])), int(p["warmup"] >= 0.2)) for p in points[:4]
    }
    assert len(quarters) == 4
    assert evenly(space, 4, seed=1) != points[:4]


def test_the_narrowed_range_is_around_the_best_within_the_range():
    space = space_of(DIGITS, ["momentum"])
    narrow = by_name(narrowed(space, {"lr": 100.0, "warmup": 0.1, "momentum": 0.9}, 4))
    assert (narrow["lr"].low, narrow["lr"].high) == pytest.approx((25, 120))
    assert (narrow["warmup"].low, narrow["warmup"].high) == (0, 0.4)
    assert (narrow["momentum"].low, narrow["momentum"].high) == pytest.approx((0.6, 0.975))


SHAPES = {
    "digits": [],
    "resnet50-b8192": [],  # a decay of stated length, from the end of warm-up
    "decay-from-start": ["schedule.decay=18ep", "schedule.decay_from=start"],
    "cosine": ["schedule.name=cosine", "schedule.power=2", "schedule.decay=0.7dur"],
    "step": [
        *("schedule.name=step", "schedule.power=2", "schedule.end=0", "schedule.decay=null"),
        *("schedule.milestones=[10ep, 60]", "schedule.warmup=0.1dur"),
    ],
    "stages": ["stages=[{from: 10ep, batch_size: 512, lr: linear}]"],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_trial_has_the_recipes_schedule_at_its_length(shape, share):
    """With the recipe's own values, the rate at each fraction of the run is the recipe's."""
    name = shape if shape.startswith("resnet") else "digits"
    recipe = load(name, SHAPES[shape]).recipe
    images = 1437 * (100 if name != "digits" else 1)
    timeline = timeline_of(recipe, images)
    settings = {
        "lr": recipe.optimizer.lr,
        "warmup": fraction(recipe.schedule.warmup, recipe, timeline),
    }
    overrides = [*SHAPES[shape], *setting_overrides(recipe, timeline, settings, share)]
    trial = load(name, overrides).recipe
    short = timeline_of(trial, images)
    assert trial.epochs == pytest.approx(share * recipe.epochs)
    ours, theirs = (
        learning_rates(trial, short).schedule,
        learning_rates(recipe, timeline).schedule,
    )
    total = timeline.total_steps
    slack = 0.06 * recipe.optimizer.lr * 2  # lengths are whole steps, of which there are 50
    for step in range(0, total, 3):
        at = min(short.total_steps - 1, round(step * short.total_steps / total))
        near = [theirs(min(max(step + shift, 0), total - 1)) for shift in range(-3, 4)]
        assert min(near) - slack <= ours(at) <= max(near) + slack


def test_a_decay_of_stated_length_ends_where_it_did_after_a_longer_warmup():
    recipe = load("resnet50-b8192").recipe
    timeline = timeline_of(recipe, 1_281_167)
    overrides = setting_overrides(recipe, timeline, {"lr": 10.0, "warmup": 0.25})
    trial = load("resnet50-b8192", overrides).recipe
    ends = [
        rates.warmup_steps + rates.decay_steps
        for rates in (learning_rates(recipe, timeline), learning_rates(trial, timeline))
    ]
    assert ends[1] == pytest.approx(ends[0], abs=2)
    assert trial.schedule.warmup.value == pytest.approx(11)


def test_the_warmup_ends_before_the_first_drop_of_the_rate():
    recipe = load("digits", [*SHAPES["step"][:-2], "schedule.milestones=[5ep]"]).recipe
    assert longest_warmup(recipe, timeline_of(recipe, 1437)) == pytest.approx(0.225, abs=0.01)
    assert longest_warmup(DIGITS, timeline_of(DIGITS, 1437)) == 0.4


def test_a_longer_warmup_of_the_recipe_is_within_the_range():
    recipe = load("digits", ["epochs=10", "schedule.warmup=6ep"]).recipe
    assert longest_warmup(recipe, timeline_of(recipe, 10 * recipe.batch_size)) == 0.6


def test_overrides_that_the_search_sets_are_left_out():
    given = ["scale=linear", "batch_size=512", "run_dir=x", "evaluate_every=2ep", "seed=3"]
    assert kept(given) == ["batch_size=512", "seed=3"]
