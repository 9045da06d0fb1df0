"""The timeline of a run and its learning rates, which agree also where stages change the batch."""

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from largebatch import pipeline
from largebatch.lars import Span
from largebatch.pipeline import Loader, Synthetic, Transform
from largebatch.recipes.schema.load import load
from largebatch.recipes.schema.sections import Stage
from largebatch.recipes.training.timeline import learning_rates, timeline_of

BASE = load("digits", ["micro_batch_size=null"]).recipe


def recipe(batch, epochs=3.0, stages=()):
    changed = {"batch_size": batch, "epochs": epochs, "stages": tuple(stages)}
    return BASE.model_copy(update=changed)


def stage(where, batch, lr="keep", **more):
    return Stage(**{"from": where, "batch_size": batch, "lr": lr, **more})


@st.composite
def runs(draw):
    """Training images, and a recipe with up to three changes of its batch."""
    images = draw(st.integers(1, 500))
    epochs = draw(st.floats(0.1, 6))
    starts = sorted(draw(st.lists(st.integers(1, 600), max_size=3, unique=True)))
    batches = draw(st.lists(st.integers(1, 90), min_size=4, max_size=4))
    rules = draw(st.lists(st.sampled_from(["keep", "linear", "sqrt"]), min_size=3, max_size=3))
    stages = [
        stage(f"{start / 100}ep", batch, lr)
        for start, batch, lr in zip(starts, batches[1:], rules, strict=False)
    ]
    assume(epochs * images > max(batches))
    return images, recipe(batches[0], epochs, stages)


@given(runs())
def test_the_loader_follows_the_timeline(drawn):
    images, run = drawn
    found = timeline_of(run, images)
    given = Synthetic(images, 2), Transform(image_size=run.data.image_size, eval_resize=64)
    source = Loader(*given, batch_size=run.batch_size, timeline=found)
    for step in range(found.total_steps):
        assert (found.position(step), found.epoch(step)) == (source._position, source.epoch)
        assert found.batch_size(step) == source.phase.batch_size
        source._position += source.phase.batch_size  # as iterating does, without the pixels
    assert found.position(found.total_steps) == source._position == found.end
    sizes = [found.batch_size(step) for step in range(found.total_steps)]
    assert list(found.changes) == [s for s in range(1, len(sizes)) if sizes[s] != sizes[s - 1]]
    # Outside a run, ``epochs`` and ``stages`` give the phases that the timeline has.
    stages = [pipeline.Stage(s.from_.value, batch_size=s.batch_size) for s in run.stages]
    bare = Loader(*given, batch_size=run.batch_size, epochs=run.epochs, stages=stages).timeline
    for name in ("phases", "end", "total_steps", "steps_per_epoch"):
        assert getattr(bare, name) == getattr(found, name)


@given(runs(), st.floats(0, 6), st.sampled_from(["ep", "dur"]), st.integers(0, 40))
def test_a_length_is_the_number_of_steps_nearest_in_images(drawn, value, unit, after):
    images, run = drawn
    found = timeline_of(run, images)
    value = value / 6 if unit == "dur" else value
    length = found.steps(Span(value, unit), after)
    wanted = found.position(after) + value * (images if unit == "ep" else found.end)
    reached = after + length
    error = abs(found.position(reached) - wanted)
    for other in (reached - 1, reached + 1):
        if other >= after:
            assert error <= abs(found.position(other) - wanted) + 1e-6
    assert found.steps(Span(length, ""), after) == length


@given(runs(), st.integers(1, 300), st.sampled_from(["ep", "dur", ""]), st.data())
def test_a_period_is_due_once_for_each_multiple(drawn, hundredths, unit, data):
    images, run = drawn
    found = timeline_of(run, images)
    every = Span(hundredths if not unit else hundredths / 100, unit)
    period = Fraction(hundredths, 1 if not unit else 100)
    period *= {"ep": images, "dur": found.end, "": 1}[unit]
    at = (lambda s: s) if not unit else found.position
    for step in range(1, min(found.total_steps, 60) + 1):
        assert found.due(every, step) == (at(step) // period > at(step - 1) // period)
    after, until = sorted(data.draw(st.integers(0, found.total_steps)) for _ in range(2))
    due = sum(found.due(every, step) for step in range(after + 1, until + 1))
    assert found.times_due(every, after, until) == due


SCHEDULES = {
    "polynomial": ["schedule.decay=5ep"],
    "cosine": ["schedule.name=cosine"],
    "step": ["schedule.name=step", "schedule.end=0", "schedule.milestones=[3ep,0.75dur]"],
    "quadratic": ["schedule.warmup_shape=quadratic", "schedule.decay=6ep"],
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rule", ["keep", "linear", "sqrt"])
def test_the_learning_rate_over_epochs_does_not_depend_on_the_batch(name, rule):
    keys = ["epochs=8", "schedule.warmup=2ep", "batch_size=10", *SCHEDULES[name]]
    one = load("digits", ["micro_batch_size=5", *keys]).recipe
    growing = one.model_copy(
        update={"stages": (stage("1ep", 20, rule), stage("4ep", 40, rule), stage("7ep", 10, rule))}
    )
    plain, staged = timeline_of(one, 400), timeline_of(growing, 400)
    before, after = learning_rates(one, plain), learning_rates(growing, staged)
    assert staged.total_steps == 40 + 60 + 30 + 40
    for step in range(staged.total_steps + 3):
        batch = staged.batch_size(step)
        factor = (batch / 10) ** {"keep": 0, "linear": 1, "sqrt": 0.5}[rule]
        same_epoch = staged.position(step) // 10
        assert plain.epoch(same_epoch) == staged.epoch(step)
        expected = factor * before.schedule(same_epoch)
        assert after.schedule(step) == pytest.approx(expected, rel=1e-12)
    epochs = []
    for found, rates in ((plain, before), (staged, after)):
        ends = rates.warmup_steps, rates.warmup_steps + rates.decay_steps
        epochs.append([found.epoch(step) for step in (*ends, *rates.milestones)])
    assert epochs[0] == epochs[1]


def test_a_stage_may_begin_at_steps_epochs_or_a_fraction_of_the_run():
    """53 images: 3.3 steps an epoch, then 1.7."""
    for first, second in (("3", "5"), ("0.9ep", "2.1ep"), ("0.225dur", "0.525dur")):
        run = recipe(16, 4, [stage(first, 32), stage(second, 8)])
        found = timeline_of(run, 53)
        assert (found.changes, found.total_steps) == ((3, 5), 5 + 12)
    found = timeline_of(recipe(16, 2, [stage("5ep", 32, "linear")]), 53)  # after the end
    assert (found.changes, found.total_steps, found.factor(10**6)) == ((), 7, 1)


def test_a_stage_keeps_the_micro_batch_or_takes_what_a_rank_has_of_its_batch():
    keys, stages = ["batch_size=16", "epochs=5"], (stage("1ep", 64), stage("2ep", 32))
    for micro, wanted in ((8, [8, 8, 8]), ("null", [16, 64, 32])):
        run = load("digits", [*keys, f"micro_batch_size={micro}"]).recipe
        found = timeline_of(run.model_copy(update={"stages": stages}), 100)
        assert [phase.micro_batch_size for phase in found.phases] == wanted


# --- the learning rates -----------------------------------------------------------------------

TOTAL = 90 * 100  # 100 steps per epoch


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        (["name=cosine", "end=0.2"], {0: 0, 500: 3.2, 4750: 1.7, TOTAL: 0.2}),
        # Milestones count from the start of the run.
        (
            ["name=step", "milestones=[30ep,6000,80ep]", "end=0", "start=0.1"],
            {0: 0.1, 500: 3.2, 2999: 3.2, 3000: 0.32, 6000: 0.032, 7999: 0.032, 8000: 0.0032},
        ),
        (["warmup_shape=quadratic"], {250: 0.8}),
        (["warmup_shape=exponential", "start=0.2"], {250: 0.8}),
        (["name=constant", "end=0"], {250: 1.6, 500: 3.2, TOTAL: 3.2}),
        # A decay counts from the end of warm-up, or from the start of the run.
        (["decay=60ep", "power=1"], {6400: 3.2 / 60 + 1e-4 * 59 / 60, 6500: 1e-4}),
        (["decay=60ep", "power=1", "decay_from=start"], {5999: 3.1999 / 5500 + 1e-4, 6000: 1e-4}),
        # A warm-up may take the whole run.
        (["name=polynomial", "warmup=1dur"], {TOTAL // 2: 1.6, TOTAL - 1: 3.2 - 3.2 / TOTAL}),
        (["name=cosine", "warmup=1dur"], {TOTAL // 2: 1.6, TOTAL - 1: 3.2 - 3.2 / TOTAL}),
    ],
)
def test_schedules_and_shapes_of_warmup_give_their_learning_rates(keys, rates):
    keys = ["epochs=90", "optimizer.lr=3.2", *(f"schedule.{key}" for key in ("warmup=5ep", *keys))]
    recipe = load("digits", keys).recipe
    timeline = timeline_of(recipe, 100 * recipe.batch_size)
    assert [timeline.progress(step) for step in rates] == [*rates]  # without stages, the steps
    schedule = learning_rates(recipe, timeline).schedule
    assert {step: schedule(step) for step in rates} == pytest.approx(rates)
