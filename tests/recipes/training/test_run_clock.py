"""The clock of a run: its parts add up, and the time that is left is told once."""

import time
from types import SimpleNamespace

import pytest

from largebatch.recipes.schema.load import load
from largebatch.recipes.training.callbacks import Metrics
from largebatch.recipes.training.estimate import EVALUATION_SPEED
from largebatch.recipes.training.run_clock import PARTS, RunClock
from largebatch.recipes.training.timeline import timeline_of
from tests.recipes.runs import BASE

VAL_IMAGES = 23


class Simulated:
    """Drives a clock as the trainer does, in a time of its own.

    Args:
        keys: Overrides of the recipe.
        step: Seconds of a step, by its number.
    """

    def __init__(self, *keys, step=lambda number: 2.0, before=0.0, resumed=0):
        self.time, self.said, self.took = 0.0, [], dict.fromkeys(PARTS, 0.0)
        self.took["start_up"] = before
        self.clock = RunClock(before, clock=lambda: self.time, now=self.now)
        self.recipe = load("digits", [*BASE, *keys]).recipe
        self.timeline = timeline_of(self.recipe, 53)
        self.step_seconds, self.resumed = step, resumed

    def now(self):
        return time.mktime((2026, 3, 1, 12, 0, 0, 0, 0, -1)) + self.time

    def passes(self, seconds, part):
        self.time += seconds
        self.took[part] += seconds

    def run(self, until=None):
        clock, recipe, timeline = self.clock, self.recipe, self.timeline
        last = timeline.last_step(recipe)
        self.passes(7.0, "start_up")
        loader = SimpleNamespace(batch_size=16)
        clock.on_start(
            SimpleNamespace(
                recipe=recipe,
                timeline=timeline,
                step=self.resumed,
                last_step=last,
                loader=loader,
                val_loader=SimpleNamespace(source=[None] * VAL_IMAGES),
                say=self.said.append,
            )
        )
        self.passes(1.0, "start_up")
        for step in range(self.resumed + 1, (until or last) + 1):
            clock.on_step_begin(step - 1)
            self.passes(self.step_seconds(step - self.resumed), "training")
            clock.on_step_end(step)
            if step == last or timeline.due(recipe.log_every, step):
                self.passes(0.25, "training")
                values = {"wait_seconds": 0.5, "forward_seconds": 0.75}
                waits = {"step_wait_seconds": [0.125, 0.375]}
                clock.on_log(Metrics("train", step, timeline.epoch(step), values, waits))
            if recipe.evaluate_every and (
                step == last or timeline.due(recipe.evaluate_every, step)
            ):
                self.passes(0.0625, "rest")
                clock.on_evaluation_begin(step)
                self.passes(10.0, "evaluation")
                clock.on_log(Metrics("val", step, timeline.epoch(step), {}))
            if recipe.trust_ratios_every:
                self.passes(0.03125, "rest")
                clock.on_histograms("trust_ratio", step, 0.0, {})
            every = recipe.checkpoint.every
            if step == last or (every and timeline.due(every, step)):
                self.passes(3.0, "checkpoints")
                clock.on_checkpoint(step, None)
            self.passes(0.015625, "rest")
        return self


@pytest.mark.parametrize(
    "keys", [["epochs=9"], ["epochs=9", "trust_ratios_every=1", "checkpoint.every=3"], ["epochs=1"]]
)
@pytest.mark.parametrize("before", [0.0, 4.5])
def test_no_time_is_lost_or_counted_twice(keys, before):
    run = Simulated(*keys, before=before).run()
    spent = run.clock.spent()
    assert spent == pytest.approx(run.took)
    assert sum(spent.values()) == pytest.approx(run.time + before)
    facts = run.clock.facts()
    parts = {**facts["time_spent"]}
    total = parts.pop("total")
    assert total == pytest.approx(sum(parts.values()))  # as they are written, in milliseconds
    assert total == pytest.approx(run.time + before, abs=0.003)
    readings = sum(
        run.timeline.due(run.recipe.log_every, step) or step == run.timeline.total_steps
        for step in range(1, run.timeline.total_steps + 1)
    )
    assert facts["training_time"] == {
        "wait_seconds": 0.5 * readings,
        "forward_seconds": 0.75 * readings,
    }
    assert facts["first_wait_seconds"] == 0.125


def test_a_run_that_ends_at_any_moment_is_accounted_for():
    run = Simulated("epochs=9")
    run.run(until=11)
    run.passes(5.0, "rest")  # such as an error, and what follows it
    assert sum(run.clock.spent().values()) == pytest.approx(run.time)


def slow_start(number):
    return 100.0 if number <= 5 else 2.0


def test_the_time_left_is_told_after_20_steps_without_the_slow_first_ones():
    keys = ["epochs=30", "log_every=10", "evaluate_every=2ep", "checkpoint.every=4ep"]
    run = Simulated(*keys, step=slow_start).run(until=40)
    (line,) = run.said
    last = run.timeline.last_step(run.recipe)
    # Between readings at 5 (none), 10 and 20: 20 s of steps and one reading, from step 5 or 10.
    assert line.startswith("time left: about ")
    assert f": {last - 20} steps (2 s each), " in line
    evaluations = sum(run.timeline.due(run.recipe.evaluate_every, s) for s in range(20, last)) + 1
    assert f"{evaluations} evaluations and " in line


def test_the_estimate_is_what_the_rest_of_the_run_takes():
    """At steady steps, with evaluations and checkpoints timed before, it is right to a percent."""
    keys = ["epochs=30", "log_every=10", "evaluate_every=1ep", "checkpoint.every=2ep"]
    told = {}

    class Told(Simulated):
        def run(self, until=None):
            self.said = SimpleNamespace(append=lambda line: told.update({line: self.now()}))
            return super().run(until)

    run = Told(*keys, step=slow_start).run()
    ((line, when),) = told.items()
    end = time.strftime("%H:%M", time.localtime(run.now()))
    minutes = float(line.split("about ")[1].split(" min")[0])
    assert minutes * 60 == pytest.approx(run.now() - when, rel=0.02)
    assert f", until {end}: " in line


def test_an_evaluation_that_was_not_timed_is_a_forward_pass_of_its_images():
    keys = ["epochs=30", "log_every=10", "evaluate_every=20ep", "checkpoint.every=null"]
    run = Simulated(*keys).run(until=30)
    (line,) = run.said
    steps = run.timeline.last_step(run.recipe) - 20
    each = 2.025  # with the reading of every tenth
    seconds = steps * each + 2 * VAL_IMAGES / (EVALUATION_SPEED * 16 / each)
    assert f"about {seconds / 60:.1f} min, until " in line
    assert line.endswith(" and 2 evaluations, without 1 checkpoint")


@pytest.mark.parametrize(
    ("keys", "until", "lines"),
    [
        (["epochs=5"], None, 0),  # 17 steps
        (["epochs=30", "stop_after=20"], None, 0),  # nothing is left after 20
        (["epochs=30", "stop_after=21"], None, 1),
        (["epochs=30", "log_every=30"], 29, 0),  # at a reading only
        (["epochs=30", "log_every=30"], 30, 1),
    ],
)
def test_short_runs_tell_nothing(keys, until, lines):
    assert len(Simulated(*keys).run(until).said) == lines


def test_a_resumed_run_counts_its_own_steps():
    run = Simulated("epochs=30", "log_every=10", resumed=40)
    run.run(until=59)
    assert not run.said
    run = Simulated("epochs=30", "log_every=10", resumed=40)
    run.run(until=60)
    assert f"{run.timeline.last_step(run.recipe) - 60} steps (" in run.said[0]


def test_a_target_may_end_the_run_sooner():
    run = Simulated("epochs=30", "log_every=10", "target_accuracy=75").run(until=20)
    assert run.said[0].endswith(", or sooner, at 75 % top-1")
