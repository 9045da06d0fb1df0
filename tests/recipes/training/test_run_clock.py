"""The clock of a run: the parts of its wall time add up."""

import signal
from contextlib import nullcontext
from functools import partialmethod

import pytest

from largebatch.recipes.schema.load import load
from largebatch.recipes.schema.recipe import Recipe
from largebatch.recipes.training.callbacks import Callback, Metrics
from largebatch.recipes.training.timeline import timeline_of
from largebatch.recipes.training.trainer import Trainer
from largebatch.recipes.training.watch.run_clock import PARTS, RunClock
from tests.recipes.runs import BASE, JOB

TRUST_RATIOS = "trust_ratios_every=1"


class Simulated:
    """Drives a clock as the trainer does, in a time of its own.

    Args:
        keys: Overrides of the recipe.
        step: Seconds of a step, by its number.
    """

    def __init__(self, *keys, step=lambda number: 2.0, before=0.0, resumed=0):
        self.time, self.took = 0.0, dict.fromkeys(PARTS, 0.0)
        self.took["start_up"] = before
        self.clock = RunClock(before, clock=lambda: self.time)
        self.recipe = load("digits", [*BASE, *keys]).recipe
        self.timeline = timeline_of(self.recipe, 53)
        self.step_seconds, self.resumed, self.hooks = step, resumed, []

    def passes(self, seconds, part):
        self.time += seconds
        self.took[part] += seconds

    def hook(self, name, *arguments):
        self.hooks.append((name, step_of(arguments)))
        getattr(self.clock, name)(*arguments)

    def log_training(self, step):
        self.passes(0.25, "training")
        values = {"input_seconds": 0.5, "forward_seconds": 0.75}
        waits = {"step_wait_seconds": [0.125, 0.375]}
        self.hook("on_log", Metrics("train", step, self.timeline.epoch(step), values, waits))

    def run(self, until=None, reaches=None, signal=None):
        """Run to the end, ``until`` an error, or as a target or a signal at these steps ends it."""
        recipe, timeline = self.recipe, self.timeline
        end = timeline.last_step(recipe)
        self.passes(7.0, "start_up")
        self.hook("on_start", None)
        self.passes(1.0, "start_up")
        for step in range(self.resumed + 1, (until or end) + 1):
            self.hook("on_step_begin", step - 1)
            self.passes(self.step_seconds(step - self.resumed), "training")
            self.hook("on_step_end", step)
            last, stops = step == end, step == signal
            logs = last or timeline.due(recipe.log_every, step)
            if logs:
                self.log_training(step)
            if recipe.evaluate_every and (last or timeline.due(recipe.evaluate_every, step)):
                self.passes(0.0625, "rest")
                self.hook("on_evaluation_begin", step)
                self.passes(10.0, "evaluation")
                self.hook("on_log", Metrics("val", step, timeline.epoch(step), {}))
            if recipe.trust_ratios_every:
                self.passes(0.03125, "rest")
                self.hook("on_histograms", "trust_ratio", step, 0.0, {})
            if step == reaches and not logs:
                self.log_training(step)
            every = recipe.checkpoint.every
            ends = last or stops or step == reaches
            if ends or (every and timeline.due(every, step)):
                self.passes(3.0, "checkpoints")
                self.hook("on_checkpoint", step, None)
            self.passes(0.015625, "rest")
            if ends:
                break
        return self


def step_of(arguments):
    """The step that a hook is told of; None for the start."""
    found = [a.step if isinstance(a, Metrics) else a for a in arguments]
    return next((a for a in found if isinstance(a, int)), None)


class Recorder(Callback):
    """Records the hooks that the clock has, and sends a signal after a step."""

    def __init__(self, signal_at):
        self.hooks, self.signal_at = [], signal_at

    def record(self, name, *arguments):
        self.hooks.append((name, step_of(arguments)))
        if (name, *arguments) == ("on_step_end", self.signal_at):
            signal.raise_signal(signal.SIGTERM)


for hook in vars(RunClock):
    if hook.startswith("on_"):
        setattr(Recorder, hook, partialmethod(Recorder.record, hook))


#: The last is the step of a signal.
ORDERS = {
    "a target between two readings": (["target_accuracy=0.001", "log_every=3"], 4, None),
    "and with trust ratios": (["target_accuracy=0.001", "log_every=3", TRUST_RATIOS], 4, None),
    "a target at a reading": (["target_accuracy=0.001", "log_every=2"], 4, None),
    "a signal": (["log_every=3", "checkpoint.every=2"], None, 5),
    "to the end": (["log_every=3", "checkpoint.every=2", TRUST_RATIOS], None, None),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_simulated_run_calls_the_hooks_as_the_trainer_does(
    photos, tmp_path, monkeypatch, order
):
    keys, reaches, signal_at = ORDERS[order]
    recorder = Recorder(signal_at)
    # Chance decides whether the small network has any image right.
    monkeypatch.setattr(
        Recipe, "reached", lambda self, top1: reaches is not None and top1 is not None
    )
    load_keys = [*BASE, f"data.path={photos}", f"run_dir={tmp_path}/run", *keys]
    trainer = Trainer.of(load("digits", load_keys), JOB, quiet=True, callbacks=[recorder])
    with nullcontext() if signal_at is None else pytest.raises(SystemExit):
        trainer.run()
    run = Simulated(*keys).run(reaches=reaches, signal=signal_at)
    assert run.hooks == recorder.hooks
    assert run.clock.spent() == pytest.approx(run.took)


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
