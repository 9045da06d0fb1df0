"""The clock of a run: the parts of its wall time add up."""

from types import SimpleNamespace

import pytest

from largebatch.recipes.schema.load import load
from largebatch.recipes.training.callbacks import Metrics
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
        self.clock = RunClock(before, clock=lambda: self.time)
        self.recipe = load("digits", [*BASE, *keys]).recipe
        self.timeline = timeline_of(self.recipe, 53)
        self.step_seconds, self.resumed = step, resumed

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
        "input_seconds": 0.5 * readings,
        "forward_seconds": 0.75 * readings,
    }
    assert facts["first_wait_seconds"] == 0.125


def test_a_run_that_ends_at_any_moment_is_accounted_for():
    run = Simulated("epochs=9")
    run.run(until=11)
    run.passes(5.0, "rest")  # such as an error, and what follows it
    assert sum(run.clock.spent().values()) == pytest.approx(run.time)
