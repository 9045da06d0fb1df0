"""The runs of an estimate: the same recipe at another batch size and length."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.lr import learning_rates
from largebatch.recipes.training.timeline import timeline_of
from largebatch.recipes.training.watch.noise import check_measurable
from largebatch.recipes.tune.critical_batch.runs import (
    FEWEST_UPDATES,
    Base,
    Run,
    first_runs,
    further_runs,
    label_entropy,
)
from tests.recipes.tune.critical_batch.law import IMAGES, loaded

DIGITS = load("digits", ["batch_size=48", "micro_batch_size=16"])


@pytest.fixture
def base(photos, tmp_path):
    def make(*overrides, rule=None, ranks=1):
        found = Base.of(loaded(photos, *overrides), tmp_path / "out", ranks, rule)
        found.write()
        return found

    return make


def run_of(base, batch, epochs):
    """The recipe of a run, its timeline and its learning rates."""
    recipe = load(str(base.path), base.overrides(Run(batch, epochs, seed=3))).recipe
    timeline = timeline_of(recipe, base.images)
    return recipe, timeline, learning_rates(recipe, timeline)


@pytest.mark.parametrize("warmup", ["10ep", "100", "0.2dur"])
@pytest.mark.parametrize(("batch", "epochs"), [(4, 50), (8, 50), (2, 25), (8, 100)])
def test_the_schedule_is_scaled_to_the_length_of_a_run(base, warmup, batch, epochs):
    """100 steps of 4 images are 10 of 50 epochs, whatever the batch size is."""
    recipe, timeline, rates = run_of(base(f"schedule.warmup={warmup}"), batch, epochs)
    assert recipe.epochs == epochs
    assert recipe.seed == 3
    assert timeline.total_steps == epochs * IMAGES / batch
    assert rates.warmup_steps == pytest.approx(timeline.total_steps / 5, abs=0.51)


def test_all_lengths_keep_their_part_of_the_run(base):
    made = base("schedule={name: step, milestones: [20ep, 400], end: 0}")
    _, timeline, rates = run_of(made, 8, 25)
    assert timeline.total_steps == 125
    assert rates.milestones == (50, 100)
    made = base("schedule.decay=30ep", "stages=[{from: 25ep, image_size: 16}]")
    _, timeline, rates = run_of(made, 2, 10)
    assert rates.decay_steps == 120
    assert timeline.first_steps[1] == 100


@pytest.mark.parametrize(
    ("optimizer", "rule", "factor"),
    [("lars", None, 2.0), ("sgd", None, 4.0), ("lars", "linear", 4.0), ("sgd", "sqrt", 2.0)],
)
def test_the_learning_rate_follows_the_batch_by_a_rule(base, optimizer, rule, factor):
    recipe, _, rates = run_of(base(f"optimizer.name={optimizer}", rule=rule), 16, 50)
    assert recipe.optimizer.lr == factor
    assert max(rates.schedule(step) for step in range(125)) == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize(
    ("overrides", "ranks", "passes"),
    [
        (["batch_size=8", "micro_batch_size=8"], 1, {4: (4, False), 8: (4, True), 16: (4, True)}),
        (["batch_size=8", "micro_batch_size=null"], 1, {4: (4, False), 8: (4, True)}),
        (["batch_size=8", "micro_batch_size=4"], 1, {4: (4, False), 8: (4, True)}),
        (["batch_size=3", "micro_batch_size=3"], 1, {3: (3, False), 6: (3, True)}),  # not 1 image
        (["batch_size=8", "micro_batch_size=4"], 2, {4: (2, True), 8: (4, True)}),
        (["batch_size=8", "batch_norm.over=rank", "micro_batch_size=8"], 1, {8: (8, False)}),
    ],
)
def test_gradient_noise_is_measured_where_a_step_has_two_passes(base, overrides, ranks, passes):
    made = base("gradient_noise_every=1ep", *overrides, ranks=ranks)
    for batch, (images, measured) in passes.items():
        recipe = load(str(made.path), made.overrides(Run(batch, 10.0, 0))).recipe
        assert recipe.micro_batch_size == images
        assert (recipe.gradient_noise_every is not None) == measured == made.has_noise(batch)
        timeline = timeline_of(recipe, made.images, ranks)
        if measured:
            check_measurable(recipe.gradient_noise_every, timeline, timeline.total_steps)


@given(st.integers(1, 40), st.integers(1, 3))
def test_images_per_forward_pass_are_those_of_the_recipe_or_the_largest_below(share, ranks):
    found = Base(DIGITS, DIGITS.recipe, Path(), 1000, 0.0, ranks, "sqrt").micro_batch_size(
        share * ranks
    )
    assert share % found == 0
    assert found <= 16
    assert not any(share % more == 0 for more in range(found + 1, min(16, share) + 1))


@pytest.mark.parametrize(
    ("batches", "images"),
    [
        ((2, 4, 8), {2: 2, 4: 2, 8: 2}),
        ((16, 32), {16: 8, 32: 8}),
        ((12, 16), {12: 4, 16: 4}),
        ((6, 20), {6: 6, 20: 5}),  # 2 is too few for both
    ],
)
def test_batch_norm_sees_the_same_number_of_images_at_all_batches(base, batches, images):
    made = base("batch_size=16", "micro_batch_size=8").with_one_pass(batches)
    assert {batch: made.micro_batch_size(batch) for batch in batches} == images
    assert made.with_one_pass([*batches, 40], made.one_pass).one_pass == made.one_pass


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_batch_norm_has_statistics_at_all_batches_that_are_accepted(data):
    """Also where the batches have no common divisor."""
    ranks, own = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 200))
    recipe = DIGITS.recipe.model_copy(update={"batch_size": own * ranks, "micro_batch_size": own})
    base = Base(DIGITS, recipe, Path(), 1000, 0.0, ranks, "sqrt")
    batches = data.draw(st.lists(st.integers(1, 300).map(lambda n: n * ranks), min_size=2))
    with suppress(RecipeError):
        base.check_batches(batches)
        made = base.with_one_pass(batches)
        assert all(made.micro_batch_size(batch) > 1 for batch in batches)


def test_batches_that_need_other_passes_than_those_of_runs_that_were_made_are_refused(base):
    made = base("batch_size=16", "micro_batch_size=8")
    with pytest.raises(RecipeError, match=r"--batches: 4 does not divide .* of 8 .* another --out"):
        made.with_one_pass((4, 16), made.with_one_pass((16, 32)).one_pass)
    assert made.with_one_pass((8, 16), 4).one_pass == 4


def test_images_per_forward_pass_suit_the_batch_norm_of_the_recipe(base):
    """Ghost batch norm needs whole slices; statistics of a rank need one forward pass."""
    ghost = base("batch_size=24", "micro_batch_size=8", "batch_norm={over: ghost, images: 4}")
    assert [ghost.micro_batch_size(batch) for batch in (4, 12, 24)] == [4, 4, 8]
    message = "--batches: 6 gives a rank 6 images, which do not divide into slices of batch_norm"
    with pytest.raises(RecipeError, match=rf"{message}.images, 4; valid: such as 8"):
        ghost.check_batches((6, 12))
    rank = base("batch_size=8", "micro_batch_size=null", "batch_norm.over=rank", ranks=2)
    assert [rank.micro_batch_size(batch) for batch in (4, 8, 16)] == [2, 4, 8]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_the_floor_of_the_loss_is_that_of_the_best_prediction(smoothing):
    shares = torch.full((1, 10), smoothing / 10, dtype=torch.float64)
    shares[0, 3] += 1 - smoothing
    best = torch.log(shares + 1e-30)
    lowest = F.cross_entropy(best, torch.tensor([3]), label_smoothing=smoothing)
    assert label_entropy(smoothing, 10) == pytest.approx(lowest.item(), abs=1e-9)


def test_without_images_per_forward_pass_they_are_those_of_the_recipe_on_these_ranks(base):
    made = base("batch_size=8", "micro_batch_size=null", ranks=2)
    assert [made.micro_batch_size(batch) for batch in (4, 8, 16, 32)] == [2, 4, 4, 4]


def test_only_training_images_are_read(base, tmp_path, photos):
    """Images are held out of those for training, and the folder of the others may be missing."""
    alone = tmp_path / "data"
    alone.mkdir()
    (alone / "train").symlink_to(photos / "train")
    made = base(f"data.path={alone}", "data.holdout=null")
    assert made.recipe.data.holdout == 5  # a tenth of 53
    assert made.images == 48
    assert base("data.holdout=13").images == 40


def test_runs_lie_around_the_target(base):
    made = base()
    first = first_runs(made, (2, 4, 8), 30.0)
    assert [(run.batch_size, run.epochs) for run in first] == [
        *[(2, 20), (2, 30), (4, 30), (8, 30), (2, 45)]
    ]
    then = further_runs(made, (2, 4, 8), 30.0, lambda batch: batch / 3, repeat=1)
    assert [(run.batch_size, run.epochs) for run in then] == [(2, 20), (4, 40), (2, 45), (8, 80)]
    assert {run.seed for run in first} == {0}
    assert {run.seed for run in then} == {1}


def test_three_batches_are_chosen_by_the_length_of_the_run(base):
    made = base()
    assert made.default_batches(50) == (2, 4, 8)
    assert made.updates((2, 4, 8), 50) >= FEWEST_UPDATES
    assert made.default_batches(3) == (2, 4)  # batch norm has no statistics of 1 image
    assert base("batch_size=26", "micro_batch_size=2").default_batches(500) == (6, 26)  # not 13
    assert base("batch_size=24").default_batches(500) == (6, 12, 24)  # 48 of 40 images


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ((8, 41), r"--batches: 41 is larger than the data set, 40 training images; valid: at most"),
        ((8, 0), "--batches: 0 is no batch size; valid: above 0"),
        ((4,), "--batches: 4 is the only one; valid: one more, such as 4,8"),
        ((9,), "--batches: 9 does not divide into equal shares on 2 ranks; valid: a multiple of 2"),
        (
            (2, 8),
            "--batches: 2 leaves 1 image per forward pass, .* no statistics; valid: such as 4",
        ),
        ((8, 26), "--batches: 26 leaves 1 image per forward pass, .*; valid: such as 28"),  # 13
    ],
)
def test_wrong_batches_are_refused(base, batches, message):
    with pytest.raises(RecipeError, match=message):
        base(ranks=2).check_batches(batches)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages=[{from: 5ep, batch_size: 8, lr: sqrt}]", "stages: the batch size changes"),
        ("stages=[{from: 5ep, micro_batch_size: 2}]", "stages: micro_batch_size changes during"),
        ("stop_after=5ep", "stop_after: the run ends before its schedule does, .*; valid here: nu"),
        ("schedule.decay=51ep", "schedule.decay: 51ep is longer than the run, 50 epochs"),
        ("data={source: synthetic, holdout: null}", "data.source: synthetic images"),
    ],
)
def test_recipes_without_an_estimate_are_refused(base, override, message):
    with pytest.raises(RecipeError, match=message):
        base(override)
