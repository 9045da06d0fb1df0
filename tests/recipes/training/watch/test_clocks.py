"""The clocks of a run: parts add up to its wall time, phases to a step, and the end is foreseen."""

from contextlib import suppress
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from largebatch.amp import Precision
from largebatch.lars import LARS
from largebatch.recipes.schema.load import load
from largebatch.recipes.training import trainer as training
from largebatch.recipes.training.callbacks import Callback
from largebatch.recipes.training.evaluate import Meter
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.step import TrainingStep
from largebatch.recipes.training.timeline import timeline_of
from largebatch.recipes.training.watch.clocks import (
    BACKWARD,
    FORWARD,
    INPUT_WAIT,
    PARTS,
    Phases,
    RunClock,
    TimeLeft,
)
from tests.recipes.runs import BASE, JOB
from tests.recipes.training.small import SYNTHETIC

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Clock:
    """A host whose time stands still but for what is said to take some, and its device.

    The device starts each piece of work when the one before it has ended. ``at`` is when the host
    has got to, and ``busy`` until when the device has work.
    """

    def __init__(self):
        self.at, self.busy, self.events, self.waits = 0.0, 0.0, 0, 0

    def __call__(self):
        return self.at

    def takes(self, seconds):
        self.at += seconds

    def launch(self, seconds):
        self.busy = max(self.busy, self.at) + seconds

    def event(self):
        self.events += 1
        return Event(self)


class Event:
    """An event of the device of a clock."""

    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.time = max(self.clock.busy, self.clock.at)

    def query(self):
        return self.time <= self.clock.at

    def synchronize(self):
        self.clock.waits += 1
        self.clock.at = max(self.clock.at, self.time)

    def elapsed_time(self, end):
        assert self.query()
        assert end.query()
        return 1000 * (end.time - self.time)


# --- the parts of a run ---------------------------------------------------------------------

WORK = st.recursive(
    st.tuples(st.sampled_from(PARTS), st.integers(0, 9)),
    lambda inner: st.tuples(st.sampled_from(PARTS), st.lists(inner, max_size=3)),
    max_leaves=12,
)


@given(st.lists(WORK, max_size=6), st.integers(0, 9))
def test_no_time_is_lost_or_counted_twice(work, before):
    now, took = Clock(), {**dict.fromkeys(PARTS, 0), "start_up": before + 1, "rest": 2}
    clock = RunClock(before, now)

    def do(part, what):
        with suppress(ZeroDivisionError), clock.during(part):
            if isinstance(what, int):
                took[part] += what
                now.takes(what)
                _ = 1 / (what % 2)  # every other one fails
            else:
                for inner in what:
                    do(*inner)

    for piece in work:
        do(*piece)
    now.takes(1)  # of the part that was before
    clock.begin("rest")
    now.takes(2)
    assert clock.spent() == took
    facts = clock.facts()["time_spent"]
    assert facts.pop("total") == sum(facts.values()) == now.at + before


def test_the_trainer_counts_each_part_where_it_belongs(small, tmp_path, monkeypatch):
    """In a time in which a step takes 2 s, an evaluation 10, a checkpoint 3, and a start 7."""
    now, last = Clock(), 8

    class Watcher(Callback):
        def on_start(self, run):
            now.takes(7)
            self.untimed = run.untimed

        def on_step_end(self, step):
            now.takes(2)
            with self.untimed():
                now.takes(0.5)

        def on_end(self, status, summary):
            now.takes(100)

    evaluate = training.evaluate
    monkeypatch.setattr(training, "evaluate", lambda *a: (now.takes(10), evaluate(*a))[1])
    keys = [*BASE, *SYNTHETIC, f"run_dir={tmp_path}", "optimizer.name=sgd"]
    trainer = training.Trainer.of(load("digits", keys), JOB, quiet=True, callbacks=[Watcher()])
    trainer._clock._now, trainer._clock._since = now, 0.0
    trainer._clock._spent["start_up"] = 0.0  # which has passed in another time
    kept = trainer._checkpoints
    save = kept.save
    monkeypatch.setattr(kept, "save", lambda *a, **k: (now.takes(3), save(*a, **k))[1])
    summary = trainer.run()
    spent = summary["time_spent"]
    took = {"training": 2 * last, "evaluation": 20, "checkpoints": 3, "rest": 0.5 * last}
    took |= {"total": sum(took.values()) + spent["start_up"]}
    assert {part: spent[part] for part in took} == pytest.approx(took)
    assert spent["start_up"] == 7
    lines = read_metrics(tmp_path)
    assert sum(line["seconds"] for line in lines if line["split"] == "train") == 2 * last
    assert [line["seconds"] for line in lines if line["split"] == "val"] == [10, 10]
    # A single rank on a CPU has no all-reduce, and no copies.
    assert [*summary["training_time"]] == [f"{name}_seconds" for name in NAMES]
    for name, seconds in summary["training_time"].items():
        of_lines = sum(line[name] for line in lines if line["split"] == "train")
        assert 0 < seconds == pytest.approx(of_lines, abs=2e-3)


# --- the phases of a step -------------------------------------------------------------------

NAMES = ("input", "forward", "backward", "optimizer")


def timed(output, clock, forward, backward):
    """Let time pass now, and in the backward pass."""
    clock.takes(forward)
    output.register_hook(lambda _: clock.takes(backward))
    return output


def test_the_phases_add_up_to_the_step_and_nothing_else_is_measured(monkeypatch):
    """Input takes 7 s, forward 2, backward 3 and what follows its gradients 1.5, as the all-reduce
    of the last micro-batch, meters 0.25 and the update 5."""
    clock = Clock()
    model, precision, meter = nn.Linear(3, 4), Precision("fp32"), Meter(CPU)
    model.register_forward_hook(lambda *passed: timed(passed[2], clock, 2.0, 3.0))
    optimizer = LARS(model.parameters(), 0.1, implementation="foreach")
    update, add, backward = precision.step, meter.add, precision.backward
    monkeypatch.setattr(precision, "backward", lambda loss: (backward(loss), clock.takes(1.5)))
    monkeypatch.setattr(precision, "step", lambda o: (clock.takes(5.0), update(o)))
    monkeypatch.setattr(meter, "add", lambda *values: (clock.takes(0.25), add(*values)))
    step = TrainingStep(model, None, optimizer, precision)
    step.phases = Phases(CPU, model, clock.event)
    batch = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    batches = (clock.takes(7.0) or batch for _ in count())
    step.forward_backward(*batch, 0, 1)  # with which DDP lays out its buckets
    step.update()
    assert step.phases.read() == {}
    for accumulation in (1, 3):
        start = clock.at
        for _ in range(2):
            step(batches, accumulation, meter)
        values = step.phases.read()
        expected = [7.0 * accumulation, 2.0 * accumulation, 4.5 * accumulation - 1.5, 5.0, 1.5]
        assert [*values] == [f"{name}_seconds" for name in (*NAMES, "all_reduce")]
        assert [*values.values()] == [2 * seconds for seconds in expected]
        assert clock.at - start == sum(values.values()) + 0.25 * 2 * accumulation


def test_the_wait_for_the_all_reduce_is_taken_off_backward():
    """Which makes an event for each gradient of the first step alone."""
    clock, model = Clock(), nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    phases = Phases(CPU, model, clock.event)
    for _ in range(3):
        with phases.step():
            with phases(FORWARD):
                loss = timed(model(torch.ones(1, 2)), clock, 1.0, 4.0).sum()
            with phases(BACKWARD):
                loss.backward()
                clock.takes(1.5)  # the all-reduce of others
                phases.backward_returned()
    values = phases.read()
    assert values.pop("all_reduce_seconds") == 4.5
    assert [values[f"{name}_seconds"] for name in NAMES] == [0.0, 3.0, 12.0, 0.0]
    assert clock.events <= len(list(model.parameters())) + 6 * 3


def test_a_device_is_measured_where_it_works_and_waited_for_at_readings_alone():
    device = Clock()
    phases = Phases(CUDA, None, device.event, device)
    for steps in (3, 5):
        for _ in range(steps):
            device.at = max(device.at, device.busy)
            with phases.step():
                with phases(INPUT_WAIT):  # the device has nothing to do but to wait for both
                    device.at += 3.0  # the host
                    device.launch(0.25)  # the copy
                with phases(FORWARD):
                    device.launch(8.0)
                with phases(INPUT_WAIT):  # the device computes meanwhile
                    device.at += 5.0
        assert device.waits == 0
        values = phases.read()
        assert values.pop("copy_seconds") == pytest.approx(0.25 * steps)
        found = [values[f"{name}_seconds"] for name in NAMES]
        assert found == pytest.approx([3.0 * steps, 8.0 * steps, 0.0, 0.0])
        assert device.waits > 0
        device.waits = 0


# --- the time left --------------------------------------------------------------------------

KEYS = ["data.image_size=64", "data.eval_resize=128", "batch_size=20", "micro_batch_size=null"]
KEYS += ["epochs=8", "log_every=5"]
STAGES = (
    "stages=[{from: 2ep, image_size: 96}, {from: 4ep, batch_size: 40, lr: linear}, "
    "{from: 6ep, image_size: 128, batch_size: 50, lr: keep}]"
)


@pytest.mark.parametrize(
    ("keys", "pause"),
    [((STAGES,), 0.0), ((STAGES, "stop_after=5ep"), 0.0), ((), 7.0)],
    ids=str,
)
def test_it_is_what_is_left_of_the_pixels_at_the_pace_since_the_first_reading(keys, pause):
    """A step takes time in proportion to its pixels; one in ten is followed by a pause."""
    recipe, first = load("digits", [*KEYS, *keys]).recipe, 37
    timeline = timeline_of(recipe, 1000)
    last = timeline.last_step(recipe)
    at = 1e4  # seconds: the start-up does not count
    left, found = TimeLeft(timeline, last, lambda: at), []
    for step in range(first + 1, last + 1):
        phase = timeline.phases[timeline.phase_index(step - 1)]
        at += 1e-6 * phase.image_size**2 * phase.batch_size
        if step == last or timeline.due(recipe.log_every, step):
            found.append((left.seconds(step), at))
        at += pause if step % 10 == 0 else 0.0
    assert [seconds is None for seconds, _ in found[:3]] == [True, False, False]
    assert found[-1][0] == 0
    end = found[-1][1]
    for seconds, then in found[len(found) // 2 if pause else 1 :]:
        assert abs(seconds - (end - then)) <= (2 * pause or 1e-6)
