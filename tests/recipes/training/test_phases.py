"""The seconds of a step's phases add up to its time, on the host and on a device behind it."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import profile

from largebatch.amp import Precision
from largebatch.lars import LARS
from largebatch.pipeline import Loader
from largebatch.recipes.training.evaluate import Meter
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.step import TrainingStep
from largebatch.recipes.training.watch.clocks import KEPT, DeviceStopwatch, HostStopwatch
from largebatch.recipes.training.watch.phases import (
    BACKWARD,
    FORWARD,
    INPUT_WAIT,
    METERS,
    OPTIMIZER,
    AllReduceWait,
    Phases,
)
from tests.ranks import run_ranks
from tests.recipes.runs import make
from tests.recipes.training.small import Small, small, small_trainer

__all__ = ["small"]  # a fixture
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Clock:
    """A clock that stands still but for what is said to take time."""

    now = 0.0

    def __call__(self):
        return self.now

    def takes(self, seconds):
        self.now += seconds


class Timed(torch.autograd.Function):
    """Returns its input, and takes time in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        ctx.clock, ctx.seconds = clock, backward
        clock.takes(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.takes(ctx.seconds)
        return gradient, None, None, None


class Network(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.layer, self.clock = nn.Linear(3, 4), clock

    def forward(self, x):
        return Timed.apply(self.layer(x), self.clock, 2.0, 3.0)


class TimedMeter(Meter):
    clock: Clock

    def add(self, *arguments):
        self.clock.takes(0.25)
        super().add(*arguments)


def timed_step(clock, watch, monkeypatch):
    """A step whose input takes 7 s, forward 2, backward 3, meters 0.25 and the update 5."""
    model, precision = Network(clock), Precision("fp32")
    optimizer = LARS(model.parameters(), 0.1, implementation="foreach")
    update = precision.step
    monkeypatch.setattr(precision, "step", lambda o: (clock.takes(5.0), update(o)))
    step = TrainingStep(model, None, optimizer, precision)
    step.phases.watch = watch
    meter = TimedMeter(CPU)
    meter.clock = clock

    def batches():
        while True:
            clock.takes(7.0)
            yield torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)

    return step, meter, batches()


def test_the_phases_add_up_to_the_step(monkeypatch):
    clock = Clock()
    step, meter, batches = timed_step(clock, HostStopwatch(clock), monkeypatch)
    for accumulation in (1, 3):
        start = clock.now
        for _ in range(2):
            step(batches, accumulation, meter)
        totals = step.phases.watch.totals()
        values = step.phases.read()
        assert values == {
            "input_seconds": 7.0 * 2 * accumulation,
            "forward_seconds": 2.0 * 2 * accumulation,
            "backward_seconds": 3.0 * 2 * accumulation,
            "optimizer_seconds": 5.0 * 2,
        }
        metered = 0.25 * 2 * accumulation
        assert clock.now - start == sum(values.values()) + metered
        assert {*totals} == {INPUT_WAIT, FORWARD, BACKWARD, OPTIMIZER}
    assert sum(totals.values()) == clock.now - 0.25 * 2 * (1 + 3)  # meters are not measured


def test_what_is_outside_of_a_step_is_not_measured(monkeypatch):
    """The pass with which DDP lays out its buckets, and what is captured into a graph."""
    clock = Clock()
    step, _, batches = timed_step(clock, HostStopwatch(clock), monkeypatch)
    step.forward_backward(*next(batches), 0, 1)
    step.update()
    assert step.phases.watch.totals() == {}
    assert step.phases.read() == {}


def test_the_wait_for_the_all_reduce_is_taken_off_backward():
    clock = Clock()
    watch, layer = HostStopwatch(clock), nn.Linear(2, 2)
    waiting = AllReduceWait(layer, CPU, HostStopwatch(clock))
    phases = Phases(CPU, waiting, watch)
    for _ in range(2):
        with phases.step():
            with phases.forward:
                loss = Timed.apply(layer(torch.ones(1, 2)), clock, 1.0, 4.0).sum()
            with phases.backward:
                loss.backward()
                clock.takes(1.5)  # the all-reduce of others
            waiting.backward_returned()
            with phases.optimizer:
                clock.takes(0.5)
    assert waiting.total() == 3.0
    assert phases.read() == {
        "input_seconds": 0.0,
        "forward_seconds": 2.0,
        "backward_seconds": 8.0,
        "all_reduce_seconds": 3.0,
        "optimizer_seconds": 1.0,
    }
    assert waiting.read() == 3.0  # of the report of stragglers, whatever is read before
    assert waiting.read() == 0.0


class Device:
    """A GPU that starts each piece of work when the one before it has ended.

    Attributes:
        at: When the host has got to, and
        busy: until when the device has work.
    """

    def __init__(self):
        self.at, self.busy, self.events, self.waits = 0.0, 0.0, 0, 0

    def launch(self, seconds):
        self.busy = max(self.busy, self.at) + seconds

    def event(self):
        self.events += 1
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.time = device, None

    def record(self):
        self.time = max(self.device.busy, self.device.at)

    def query(self):
        return self.time <= self.device.at

    def synchronize(self):
        self.device.waits += 1
        self.device.at = max(self.device.at, self.time)

    def elapsed_time(self, end):
        assert self.query()
        assert end.query()
        return 1000 * (end.time - self.time)


def test_a_device_is_measured_where_it_works_and_waited_for_at_readings_alone():
    device = Device()
    phases = Phases(CUDA, stopwatch=DeviceStopwatch(device.event), clock=lambda: device.at)
    for steps in (3, 5):
        for _ in range(steps):
            with phases.step():
                with phases.forward:
                    device.launch(2.0)
                with phases.backward:
                    device.launch(3.0)
                    device.launch(1.0)
                with phases.optimizer:
                    device.launch(0.5)
                with phases.input:
                    device.launch(0.25)  # the stream waits for the copy of the next batch
        assert device.waits == 0
        values = phases.read()
        assert values == {
            "input_seconds": 0.0,
            "forward_seconds": pytest.approx(2.0 * steps),
            "backward_seconds": pytest.approx(4.0 * steps),
            "optimizer_seconds": pytest.approx(0.5 * steps),
            "copy_seconds": pytest.approx(0.25 * steps),
        }
        assert device.waits > 0
        device.waits = 0


def test_the_wait_of_the_host_is_no_copy_and_hides_none():
    """Of each micro-batch: one that the host waited for long takes nothing off another's copy."""
    device = Device()
    phases = Phases(CUDA, stopwatch=DeviceStopwatch(device.event), clock=lambda: device.at)

    def host_waits(seconds):
        device.at += seconds

    with phases.step():
        with phases.input:  # the device has nothing to do but to wait for host and copy
            host_waits(3.0)
            device.launch(0.25)
        with phases.forward:
            device.launch(8.0)
        with phases.input:  # the device computes meanwhile
            host_waits(5.0)
        with phases.backward:
            device.launch(4.0)
        with phases.optimizer:
            device.launch(1.0)
    values = phases.read()
    assert values["copy_seconds"] == pytest.approx(0.25)
    assert values["input_seconds"] == pytest.approx(3.0)
    assert values["forward_seconds"] == pytest.approx(8.0)


def test_events_are_used_again_and_added_up_before_there_are_many():
    device = Device()
    watch = DeviceStopwatch(device.event)
    for _ in range(20 * KEPT):
        start = watch.now()
        device.launch(0.5)
        watch.add("x", start, watch.now())
        device.at = device.busy  # the device keeps up with the host
    assert device.waits == 0
    assert device.events < 3 * KEPT
    assert watch.totals() == {"x": pytest.approx(10.0 * KEPT)}


def test_a_wait_on_a_device_makes_an_event_for_each_gradient_of_the_first_step_alone():
    device = Device()
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    waiting = AllReduceWait(model, CUDA, DeviceStopwatch(device.event))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        device.launch(0.75)
        waiting.backward_returned()
    assert device.waits == 0
    assert waiting.total() == pytest.approx(2.25, rel=0.01)
    assert device.events <= len(list(model.parameters())) + 2 * 3


def test_every_run_records_the_seconds_of_its_phases(small, tmp_path):
    small_trainer(tmp_path, "epochs=3").run()
    lines = [line for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert len(lines) == 4
    for line in lines:
        parts = [line[f"{name}_seconds"] for name in ("input", "forward", "backward", "optimizer")]
        assert min(parts) > 0
        assert sum(parts) <= line["seconds"]
        assert "all_reduce_seconds" not in line  # a single rank has none
        assert "copy_seconds" not in line


def train_on_ranks(root, run_dir):
    """Rank 1 waits for its input in each step, and rank 0 for rank 1."""
    if dist.get_rank() == 1:
        fetch = Loader.__iter__

        def slowly(self):
            for batch in fetch(self):
                self.wait_seconds += 0.1
                time.sleep(0.1)
                yield batch

        Loader.__iter__ = slowly
    make(root, run_dir, "evaluate_every=null").run()


@pytest.mark.slow("trains on 2 ranks")
def test_the_phases_of_rank_0_are_no_more_than_the_steps_where_another_waits(photos, tmp_path):
    run_ranks(2, train_on_ranks, photos, tmp_path)
    lines = [line for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert len(lines) > 1
    for line in lines:
        names = ("input", "forward", "backward", "all_reduce", "optimizer")
        parts = {name: line[f"{name}_seconds"] for name in names}
        assert line["wait_seconds"] >= 0.1 * len(line["step_wait_seconds"])
        if line is not lines[0]:  # in which rank 0 waits for its own first images
            assert parts["all_reduce"] > parts["input"]  # which holds the wait for rank 1
        assert sum(parts.values()) <= line["seconds"] * 1.001


@pytest.mark.slow("compiles a network")
def test_a_profile_breaks_no_graph_of_a_compiled_step():
    counts = []
    for records in (False, True):
        torch.compiler.reset()
        graphs, model, precision = CompileCounterWithBackend("eager"), Small(5), Precision("fp32")
        optimizer = LARS(model.parameters(), 1.0, implementation="foreach")
        step = TrainingStep(model, None, optimizer, precision)
        step._forward = torch.compile(step._forward, backend=graphs)
        meter = Meter(CPU)
        batch = torch.randn(4, 3, 12, 12), torch.randint(5, (4,))
        step(iter([batch] * 2), 2, meter)
        if records:
            with profile() as profiler:
                step(iter([batch] * 2), 2, meter)
            names = {event.key for event in profiler.key_averages()}
            assert {INPUT_WAIT, FORWARD, BACKWARD, OPTIMIZER, METERS} <= names
        else:
            step(iter([batch] * 2), 2, meter)
        counts.append((graphs.frame_count, len(graphs.graphs)))
    assert counts[0] == counts[1]
