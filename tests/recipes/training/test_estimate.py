"""The time that a run has left: what is left to do, how long it takes, and how that is told."""

import time

import pytest

from largebatch.recipes.schema.load import load
from largebatch.recipes.training.estimate import (
    Pace,
    Work,
    clock,
    duration,
    in_words,
    seconds_left,
    step_time,
    work_left,
)
from largebatch.recipes.training.timeline import timeline_of
from tests.recipes.runs import BASE


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4, "4.0 s"), (75, "75 s"), (396, "6.6 min"), (3000, "50 min"), (50700, "14 h 05 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0382, "38 ms"), (0.0004, "0.4 ms"), (0.18, "0.18 s"), (12.3, "12 s"), (150, "2.5 min")],
)
def test_times_of_a_step(seconds, text):
    assert step_time(seconds) == text


@pytest.mark.parametrize("evaluate_every", ["null", "3", "1ep", "0.5ep", "0.01ep", "0.3dur"])
@pytest.mark.parametrize("checkpoint_every", ["null", "4", "2ep"])
@pytest.mark.parametrize("stop_after", ["null", "13"])
def test_what_is_left_is_what_the_trainer_will_do(evaluate_every, checkpoint_every, stop_after):
    keys = [f"evaluate_every={evaluate_every}", f"checkpoint.every={checkpoint_every}"]
    recipe = load("digits", [*BASE, *keys, "epochs=7", f"stop_after={stop_after}"]).recipe
    timeline = timeline_of(recipe, 53)
    last = timeline.last_step(recipe)

    def due(every, steps):
        """As in the trainer: where it is due, and at the last step."""
        return sum(s == last or (every is not None and timeline.due(every, s)) for s in steps)

    for step in range(1, last + 1):
        left = work_left(recipe, timeline, step, last, evaluates=True)
        to_come = range(step, last + 1)
        evaluations = due(recipe.evaluate_every, to_come) if recipe.evaluate_every else 0
        assert left == Work(last - step, evaluations, due(recipe.checkpoint.every, to_come))
    assert work_left(recipe, timeline, 1, last, evaluates=False).evaluations == 0


def test_stages_that_change_the_batch_change_how_often_something_is_due():
    stages = "stages=[{from: 2ep, batch_size: 32, lr: keep, micro_batch_size: 4}]"
    recipe = load("digits", [*BASE, "epochs=6", "evaluate_every=0.5ep", stages]).recipe
    timeline = timeline_of(recipe, 53)
    last = timeline.last_step(recipe)
    for step in range(1, last):
        due = [s for s in range(step, last) if timeline.due(recipe.evaluate_every, s)]
        left = work_left(recipe, timeline, step, last, evaluates=True)
        assert left.evaluations == 1 + len(due)


def at(text):
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))


def test_the_time_left_is_told_with_its_parts_and_its_end():
    now = at("2026-03-01 13:08:00")
    work = Work(2400, 8, 3)
    assert seconds_left(work, Pace(1.75, 10.0, 5.0)) == 2400 * 1.75 + 80 + 15
    assert in_words(work, Pace(1.75, 10.0, 5.0), now) == (
        "about 72 min, until 14:19: 2,400 steps (1.8 s each), 8 evaluations and 3 checkpoints"
    )
    assert in_words(Work(10, 0, 1), Pace(0.05), now) == (
        "about 0.5 s, until 13:08: 10 steps (50 ms each), without 1 checkpoint"
    )


def test_an_end_on_another_day_has_its_date():
    now = at("2026-03-01 23:59:00")
    assert clock(now + 30, now) == "23:59"
    assert clock(now + 3600, now) == "2026-03-02 00:59"
    assert clock(now + 365 * 86400, now) == "2027-03-01 23:59"
