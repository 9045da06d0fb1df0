"""The learning rates of a recipe's schedule."""

import pytest

from largebatch.lars import polynomial
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.timeline import learning_rates, timeline_of

TOTAL = 90 * 100  # 100 steps per epoch


def of(*overrides, recipe="digits"):
    keys = ["epochs=90", "optimizer.lr=3.2", "schedule.warmup=5ep", *overrides]
    recipe = load(recipe, keys).recipe
    return learning_rates(recipe, timeline_of(recipe, 100 * recipe.batch_size))


@pytest.mark.parametrize(
    ("name", "images", "peak", "warmup", "decay"),
    [("digits", 1437, 4.0, 22, 90), ("resnet50-b65536", 1281167, 24.699, 606, 1134)],
)
def test_the_recipes_of_the_package_have_the_polynomial_to_the_last_bit(
    name, images, peak, warmup, decay
):
    recipe = load(name).recipe
    found = learning_rates(recipe, timeline_of(recipe, images))
    total = round(recipe.epochs * images / recipe.batch_size)
    assert (found.warmup_steps, found.decay_steps) == (warmup, decay)
    theirs = polynomial(peak, total, warmup_steps=warmup, decay_steps=decay, end=1e-4)
    steps = range(total + 5)
    assert [found.schedule(s) for s in steps] == [theirs(s) for s in steps]


def test_a_step_decay_counts_milestones_from_the_start_of_the_run():
    milestones = "schedule.milestones=[30ep,6000,80ep]"
    found = of("schedule.name=step", milestones, "schedule.end=0", "schedule.start=0.1")
    assert found.milestones == (3000, 6000, 8000)
    assert found.schedule(0) == 0.1
    expected = {500: 3.2, 2999: 3.2, 3000: 0.32, 6000: 0.032, 7999: 0.032, 8000: 0.0032}
    assert {s: found.schedule(s) for s in expected} == pytest.approx(expected)


def test_a_decay_is_counted_from_the_end_of_warmup_or_the_start():
    added = of("schedule.decay=60ep")
    counted_in = of("schedule.decay=60ep", "schedule.decay_from=start")
    assert (added.decay_steps, counted_in.decay_steps) == (6000, 5500)
    assert added.schedule(6499) > added.schedule(6500) == 1e-4
    assert counted_in.schedule(5999) > counted_in.schedule(6000) == 1e-4


def test_cosine_constant_and_the_shapes_of_warmup():
    cosine = of("schedule.name=cosine", "schedule.end=0.2").schedule
    assert [cosine(s) for s in (0, 500, 4750, TOTAL)] == pytest.approx([0, 3.2, 1.7, 0.2])
    constant = of("schedule.name=constant", "schedule.end=0").schedule
    assert [constant(s) for s in (250, 500, TOTAL)] == [1.6, 3.2, 3.2]
    quadratic = of("schedule.warmup_shape=quadratic").schedule
    assert quadratic(250) == pytest.approx(0.8)
    exponential = of("schedule.warmup_shape=exponential", "schedule.start=0.2").schedule
    assert exponential(250) == pytest.approx(0.8)


@pytest.mark.parametrize("name", ["polynomial", "cosine"])
def test_a_warmup_may_take_the_whole_run(name):
    found = of(f"schedule.name={name}", "schedule.warmup=1dur")
    assert found.schedule(TOTAL // 2) == pytest.approx(1.6)
    assert found.schedule(TOTAL - 1) == pytest.approx(3.2, rel=1e-3)


STEP = ["schedule.name=step", "schedule.end=0"]
WRONG = {
    "schedule.warmup: 91ep (9100 steps) is longer than the run, 90 epochs (9000 steps)": [
        "schedule.warmup=91ep"
    ],
    "schedule.milestones: 30ep (3000 steps) does not come after 60ep (6000 steps)": [
        *STEP, "schedule.milestones=[60ep,30ep]",
    ],
    "schedule.milestones: 5ep (500 steps) does not come after 5ep (500 steps)": [
        *STEP, "schedule.milestones=[5ep]",
    ],
    "schedule.decay: 5ep (500 steps) from the start of the run is not longer than the warm-up": [
        "schedule.decay=5ep", "schedule.decay_from=start",
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_lengths_that_do_not_fit_are_named(message):
    with pytest.raises(RecipeError) as error:
        of(*WRONG[message])
    assert str(error.value).startswith(message)
