"""The ranges of a search, its first settings, and the recipes of its trials."""

import math

import pytest
from optuna.distributions import FloatDistribution

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.timeline import learning_rates, timeline_of
from largebatch.recipes.tune.learning_rate.space import (
    Settings,
    first_settings,
    space_of,
    trial_overrides,
)


def of(*overrides, name="digits", images=1437, lr=None):
    """The recipe, its timeline, its ranges and the first settings."""
    recipe = load(name, overrides).recipe
    timeline = timeline_of(recipe, images)
    space = space_of(recipe, timeline, lr)
    return recipe, timeline, space, first_settings(recipe, timeline, space)


def test_the_ranges_are_around_the_recipes_values():
    _, _, space, (own, *_) = of()
    assert space["lr"] == FloatDistribution(0.133, 120, log=True)
    assert space["warmup"] == FloatDistribution(0.0, 0.4)
    assert own == (4.0, 0.2)


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        ([], 0.4),
        (["schedule.warmup=12ep"], 0.601),  # the recipe's own, of 112 updates
        (["epochs=2"], 0.4),  # whose own warm-up of 4 epochs does not fit
        (["schedule={name: step, milestones: [5ep], warmup: 0, end: 0}"], 0.225),
        (["schedule.decay=8ep", "schedule.decay_from=start"], 0.36),
    ],
)
def test_the_longest_warmup_ends_before_the_rate_falls(overrides, longest):
    _, _, space, (own, *_) = of(*overrides)
    assert space["warmup"].high == pytest.approx(longest, abs=0.005)
    assert 0 <= own.warmup <= space["warmup"].high


def test_the_first_settings_are_the_recipes_own_then_rates_over_the_whole_range():
    *_, first = of("optimizer.lr=40", "schedule.warmup=0")
    assert first == [(40, 0), *((lr, 0.15) for lr in (10.2, 156, 2.63, 608))]
    *_, first = of(lr=(0.1, 1.0))  # which does not hold the recipe's rate
    assert all(0.1 <= s.lr <= 1.0 and s.warmup == 0.2 for s in first)


@pytest.mark.parametrize(
    ("overrides", "lr", "message"),
    [
        ([], (2.0, 1.0), "--lr: 2..1 is an empty range; valid: LOW..HIGH with 0 < LOW < HIGH"),
        ([], (0.0, 1.0), "--lr: 0..1 is an empty range"),
        ([], (math.nan, 1.0), "--lr: nan..1 is an empty range"),
        ([], (1e-5, 1.0), "--lr: 1e-05 is below schedule.start or schedule.end, 0.0001"),
        (["optimizer.lr=0"], None, "optimizer.lr: 0 gives no range of rates"),
    ],
)
def test_ranges_that_cannot_be_searched_are_refused(overrides, lr, message):
    with pytest.raises(RecipeError) as caught:
        of(*overrides, lr=lr)
    assert str(caught.value).startswith(message)


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
def test_a_trial_has_the_recipes_schedule_at_its_length(shape):
    """With the recipe's own values, the rate at each share of the run is the recipe's."""
    name = shape if shape.startswith("resnet") else "digits"
    images = 1437 * (100 if name != "digits" else 1)
    recipe, timeline, _, (own, *_) = of(*SHAPES[shape], name=name, images=images)
    share = 0.5
    overrides = [*SHAPES[shape], *trial_overrides(recipe, timeline, own, share)]
    trial = load(name, overrides).recipe
    short = timeline_of(trial, images)
    assert trial.epochs == pytest.approx(share * recipe.epochs)
    ours, theirs = learning_rates(trial, short).schedule, learning_rates(recipe, timeline).schedule
    total = timeline.total_steps
    slack = 0.06 * recipe.optimizer.lr * 2  # lengths are whole steps, of which there are 50
    for step in range(0, total, 3):
        at = min(short.total_steps - 1, round(step * short.total_steps / total))
        near = [theirs(min(max(step + shift, 0), total - 1)) for shift in range(-3, 4)]
        assert min(near) - slack <= ours(at) <= max(near) + slack


def test_a_decay_of_stated_length_ends_where_it_did_after_a_longer_warmup():
    recipe, timeline, _, (own, *_) = of(name="resnet50-b8192", images=1_281_167)
    overrides = trial_overrides(recipe, timeline, Settings(own.lr, 0.25))
    trial = load("resnet50-b8192", overrides).recipe
    ends = [
        rates.warmup_steps + rates.decay_steps
        for rates in (learning_rates(recipe, timeline), learning_rates(trial, timeline))
    ]
    assert ends[1] == pytest.approx(ends[0], abs=2)
    assert str(trial.schedule.warmup) == "0.25dur"
