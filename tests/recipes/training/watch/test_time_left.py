"""The time left, against simulated runs whose every duration is known."""

import random
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from largebatch.recipes.schema.load import load
from largebatch.recipes.training.timeline import timeline_of
from largebatch.recipes.training.watch.time_left import EVALUATION_SPEED, TimeLeft

IMAGES, VAL_IMAGES = 1000, 300
KEYS = [
    *("data.image_size=64", "data.eval_resize=128", "batch_size=20", "micro_batch_size=null"),
    *("epochs=8", "log_every=5", "evaluate_every=1ep", "checkpoint.every=2ep"),
]
STAGES = (
    "stages=[{from: 2ep, image_size: 96}, {from: 4ep, batch_size: 40, lr: linear}, "
    "{from: 6ep, image_size: 128, batch_size: 50, lr: keep}]"
)


class Run:
    """A simulated run: what the trainer does in which order, and how long each takes.

    Attributes:
        events: Of each, what it is, the step at which it is, and its seconds.
    """

    def __init__(self, *keys, pixels=1e-6, evaluation=7.0, checkpoint=3.0, slower=lambda step: 1.0):
        self.recipe = recipe = load("digits", [*KEYS, *keys]).recipe
        self.timeline = timeline = timeline_of(recipe, IMAGES)
        self.last = timeline.last_step(recipe)
        self.events = []

        def due(every, step):
            return step == self.last or (every is not None and timeline.due(every, step))

        for step in range(1, self.last + 1):
            phase = timeline.phases[timeline.phase_index(step - 1)]
            seconds = pixels * phase.image_size**2 * phase.batch_size * slower(step)
            self.events.append(("step", step, seconds))
            if due(recipe.log_every, step):
                self.events.append(("reading", step, 0.0))
            if recipe.evaluate_every and due(recipe.evaluate_every, step):
                self.events.append(("evaluation", step, evaluation))
            if due(recipe.checkpoint.every, step):
                self.events.append(("checkpoint", step, checkpoint))

    def time_left(self, first=0):
        """A new estimate of a run that begins at step ``first``."""
        images = range(VAL_IMAGES)
        val = SimpleNamespace(source=images) if self.recipe.evaluate_every else None
        about = {"recipe": self.recipe, "timeline": self.timeline, "last_step": self.last}
        return TimeLeft(SimpleNamespace(**about, step=first, val_loader=val))

    def estimates(self, first=0, now=0.0, told=None):
        """Run from step ``first`` on; yield each event with the estimate after it, and the truth.

        The truth is the sum of the durations of the events to come. What is announced goes to the
        list ``told``, with the step and the truth.
        """
        time_left = self.time_left(first)
        events = [event for event in self.events if event[1] > first]
        images = seconds = 0.0
        for number, (what, step, duration) in enumerate(events):
            truth = sum(duration for *_, duration in events[number + 1 :])
            if what == "step":
                images += self.timeline.batch_size(step - 1)
                seconds += duration
                continue
            if what == "reading":
                time_left.trained(step, images, seconds)
                images = seconds = 0.0
                if told is not None and (line := time_left.announcement(step, now)):
                    told.append((line, step, truth))
            elif what == "evaluation":
                time_left.evaluated(step, duration)
            else:
                time_left.saved(step, duration)
            yield what, step, time_left.seconds(step), truth


SHAPES = [
    (),
    (STAGES,),
    (STAGES, "stop_after=5ep"),
    (STAGES, "log_every=0.02dur", "checkpoint.every=7"),
    ("checkpoint.every=null", "evaluate_every=3"),
    ("evaluate_every=0.001dur", "log_every=1"),  # shorter than a step: due after each
    ("evaluate_every=null", STAGES),
]


@pytest.mark.parametrize("keys", SHAPES, ids=str)
@pytest.mark.parametrize("first", [0, 37])
def test_it_is_exact_once_each_part_was_seen(keys, first):
    run = Run(*keys)
    seen, exact, readings = set(), 0, 0
    wanted = {"checkpoint"} | ({"evaluation"} if run.recipe.evaluate_every else set())
    for what, step, estimate, truth in run.estimates(first):
        seen.add(what)
        readings += what == "reading"
        assert (estimate is None) == (readings < 2), step
        if estimate is not None and seen >= wanted:
            assert estimate == pytest.approx(truth, rel=1e-9, abs=1e-9), (what, step)
            exact += 1
    assert exact > 2 or "checkpoint.every=null" in keys  # whose only checkpoint is the last event
    assert truth == 0


@pytest.mark.parametrize("keys", [(), (STAGES,), ("ema.decay=0.9",)], ids=str)
def test_before_an_evaluation_it_takes_the_time_of_its_forward_passes(keys):
    pixels = load("digits", [*KEYS, *keys]).recipe.eval_size ** 2
    passes = VAL_IMAGES * (2 if "ema.decay=0.9" in keys else 1)
    evaluation = passes * 1e-6 * pixels / EVALUATION_SPEED
    run = Run(*keys, evaluation=evaluation, checkpoint=0.0)
    found = [(estimate, truth) for _, _, estimate, truth in run.estimates() if estimate is not None]
    assert len(found) > 60
    for estimate, truth in found:
        assert estimate == pytest.approx(truth, rel=1e-9, abs=1e-9)


def test_a_stage_that_takes_another_time_than_its_pixels_say_is_learned_from_its_readings():
    after = 100  # steps in the first two epochs
    run = Run(STAGES, slower=lambda step: 2.0 if step > after else 1.0)
    found = {step: (e, t) for what, step, e, t in run.estimates() if what == "reading"}
    estimate, truth = found[after]
    assert estimate < 0.7 * truth
    for step in (after + 10, after + 15, run.last):
        estimate, truth = found[step]
        assert estimate == pytest.approx(truth, rel=1e-9)


def test_the_first_reading_does_not_count_however_slow_it_is():
    run = Run(slower=lambda step: 1000.0 if step <= 5 else 1.0, evaluation=0.0, checkpoint=0.0)
    for what, step, estimate, truth in run.estimates():
        if step > 50 and what == "reading":
            assert estimate == pytest.approx(truth, rel=1e-9)


def test_a_long_first_reading_counts_until_there_is_another():
    slow = {"slower": lambda step: 2.0 if step <= 25 else 1.0, "evaluation": 0.0, "checkpoint": 0.0}
    run = Run("log_every=25", **slow)
    found = [(e, t) for what, _, e, t in run.estimates() if what == "reading"]
    assert found[0][0] > found[0][1]
    for estimate, truth in found[2:]:
        assert estimate == pytest.approx(truth, rel=1e-9)
    assert next(run.estimates())[2] is not None
    assert next(Run("log_every=19").estimates())[2] is None


def announcements(*keys, **options):
    """Each line that says how long the run takes, with its step, and the truth."""
    told = []
    assert [*Run(*keys).estimates(told=told, **options)]
    return told


def test_the_time_left_is_told_once_after_20_steps_of_the_process():
    now = time.mktime((2026, 3, 1, 13, 8, 0, 0, 0, -1))
    ((line, step, truth),) = announcements("evaluate_every=10", "checkpoint.every=10", now=now)
    assert step == 20
    until = time.strftime("%H:%M", time.localtime(now + truth + 10))  # the one that is due now
    assert line == (
        f"time left: about {truth / 60:.1f} min, until {until}, for 380 steps, 39 evaluations and "
        "39 checkpoints"
    )
    assert [step for _, step, _ in announcements("log_every=30")] == [30]
    assert [step for _, step, _ in announcements(first=37)] == [60]


@pytest.mark.parametrize(
    ("key", "end"),
    [
        ("seed=1", " for 380 steps and 8 evaluations, not counting 4 checkpoints"),
        ("evaluate_every=null", " for 380 steps, not counting 4 checkpoints"),
        ("target_accuracy=75", ", not counting 4 checkpoints, or sooner, at 75 % top-1"),
    ],
)
def test_what_has_not_been_timed_is_named(key, end):
    ((line, *_),) = announcements(key)
    assert line.endswith(end)


@pytest.mark.parametrize("key", ["stop_after=19", "stop_after=20", "log_every=500"])
def test_nothing_is_told_of_a_short_run_or_at_its_end(key):
    assert announcements(key) == []


def test_noise_and_single_slow_readings_hardly_move_it():
    draw = random.Random(0)
    noise = {step: draw.lognormvariate(0, 0.1) for step in range(1, 401)}
    stalls = dict.fromkeys(range(50, 400, 61), 20.0)  # a step that waits for something
    run = Run(slower=lambda step: noise[step] * stalls.get(step, 1.0))
    total = sum(seconds for *_, seconds in run.events)
    ends = []
    for what, step, estimate, truth in run.estimates():
        if what == "reading" and step > 100:  # an evaluation and a checkpoint were made
            ends.append(total - truth + estimate)
            assert abs(estimate - truth) < 0.1 * total
    moves = [abs(after - before) for before, after in pairwise(ends)]
    stall = 20 * 20 * 64**2 * 1e-6
    assert max(moves) < 1.2 * stall  # no more than what has really passed
    assert sorted(moves)[len(moves) // 2] < 0.01 * total


def test_what_is_due_now_is_still_to_come_until_it_is_done():
    left = Run().time_left()
    assert left.ahead(100).images == (6000,)
    assert (left.ahead(100).evaluations, left.ahead(100).checkpoints) == (7, 4)
    left.evaluated(100, 1.0)
    left.saved(100, 1.0)
    assert (left.ahead(100).evaluations, left.ahead(100).checkpoints) == (6, 3)
    left.evaluated(400, 1.0)
    left.saved(400, 1.0)
    found = left.ahead(400)
    assert (found.images, found.evaluations, found.checkpoints) == ((0,), 0, 0)
    # The best checkpoint may follow each evaluation.
    left = Run("checkpoint.keep_best=true", "checkpoint.every=4ep").time_left().ahead(0)
    assert (left.evaluations, left.checkpoints) == (8, 8)
