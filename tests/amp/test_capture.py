"""Steps that nothing waits for, and that a CUDA graph can replay: the GPU's code on the CPU."""

import copy
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.amp import PRECISIONS, GradientOverflowError, Precision
from largebatch.lars import LARS
from tests.amp.nets import loss_of
from tests.host_reads import NoHostReads
from tests.replay import Recording

MOST = 4


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr("largebatch.amp.skips.is_free_to_read", lambda tensor: False)


class Loop:
    def __init__(self, name, scale="dynamic", most=MOST, clip=False, dialect="mlperf"):
        self.precision = Precision(name, loss_scale=scale, max_skipped_steps=most)
        torch.manual_seed(0)
        self.x, self.labels = torch.randn(8, 6), torch.arange(8) % 4
        net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
        self.model, self.clip = self.precision.convert(net), clip
        self.lr = torch.tensor(0.05)
        options = {"master_weights": self.precision.form.masters, "trust_coefficient": 0.05}
        options |= {"dialect": dialect, "implementation": "foreach"}
        self.optimizer = LARS(self.model.named_parameters(), self.lr, **options)
        self.factor = torch.ones(())

    def backward(self):
        loss = loss_of(self.precision, self.model, self.x, self.labels)
        self.precision.backward(loss * self.factor)

    def step(self):
        if self.clip:
            self.precision.clip_grad_norm_(self.optimizer, 0.1)
        self.precision.step(self.optimizer)

    def iteration(self):
        self.optimizer.zero_grad()
        self.backward()
        self.step()

    def run(self, iterations, factor=1.0):
        self.factor.fill_(factor)
        for _ in range(iterations):
            self.iteration()

    def state(self):
        optimizer, ratios = self.optimizer.state_dict(), self.optimizer.trust_ratios()
        rates = [group.get("previous_lr", 0.0) for group in optimizer["param_groups"]]
        parts = self.model.state_dict(), self.precision.state_dict()
        return copy.deepcopy((*parts, optimizer["state"], rates, ratios))


def assert_same(graph, eager):
    torch.testing.assert_close(graph.state(), eager.state(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("bf16", "dynamic"), ("fp16", 1024.0), ("fp16-master", "dynamic"), ("fp16-pure", "none")],
)
def test_no_call_waits_for_the_device(name, scale, monkeypatch):
    """Every read of a tensor's value is caught, over more steps than between any readings."""
    loop = Loop(name, scale, most=20)
    counts, tolist = loop.precision._scaler.skipped_steps, torch.Tensor.tolist

    def of_copies_only(tensor):
        assert tensor.data_ptr() != counts._counts.data_ptr()
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", of_copies_only)
    x = loop.x
    addresses = set()
    steps = 45 if loop.precision.scales else 3
    for step in range(steps):
        loop.x = x * (1e30 if step == 2 else 1.0)
        with NoHostReads():
            loop.backward()
            if name == "fp16":
                loop.precision.unscale_(loop.optimizer)
            loop.precision.clip_grad_norm_(loop.optimizer, 0.1)
            loop.precision.step(loop.optimizer)
        loop.optimizer.zero_grad()
        addresses.add(counts._counts.data_ptr())
    assert len(addresses) == 1
    monkeypatch.undo()
    if name.startswith("fp16") and scale != "none":
        assert loop.precision.skipped_steps == 1
        assert loop.model[1].num_batches_tracked == steps - 1


@pytest.mark.parametrize(("most", "good_before"), [(1, 0), (4, 3), (4, 25), (30, 3)])
def test_a_run_of_skipped_steps_stops_training_within_the_documented_bound(most, good_before):
    loop = Loop("fp16-master", most=most)
    loop.run(good_before)
    loop.run(most, float("nan"))
    with pytest.raises(GradientOverflowError, match=r"in a row .* backwards: 3\.bias, 3\.weight"):
        loop.run(2 * max(most, 20), float("nan"))
    loop.run(50)  # training may go on


def captured(run):
    with (
        mock.patch("largebatch.amp.skips.is_capturing", return_value=True),
        mock.patch("largebatch.lars.capture.captures", return_value=True),
        Recording() as recording,
    ):
        run()
    return recording


FORMS = [(name, scale) for name in PRECISIONS for scale in ("none", 1024.0, "dynamic")]


some_factors = st.lists(st.sampled_from([0.5, 1.0, float("inf")]), min_size=1, max_size=3)


@settings(max_examples=20)
@given(
    form=st.sampled_from(FORMS),
    factors=st.lists(some_factors, min_size=3, max_size=5),
    whole=st.booleans(),
    clip=st.booleans(),
    dialect=st.sampled_from(["mlperf", "mlperf-corrected"]),
)
def test_a_replayed_iteration_is_an_eager_one(form, factors, whole, clip, dialect):
    """Of one batch, or of several whose forward and backward alone are replayed."""
    name, scale = form
    eager, graph = (Loop(name, scale, clip=clip, dialect=dialect) for _ in range(2))
    for loop in (eager, graph):
        loop.iteration()
        loop.optimizer.zero_grad(set_to_none=whole)
    if whole:
        recording = captured(graph.iteration)
    else:
        graph.precision.before_replay()
        recording = captured(graph.backward)
        graph.step()
    eager.backward()
    eager.step()
    for number, micro_batches in enumerate(factors):
        for loop in (eager, graph):
            loop.lr.fill_(0.05 / (number + 1))
            loop.optimizer.zero_grad(set_to_none=False)
        for factor in micro_batches[: 1 if whole else None]:
            for loop in (eager, graph):
                loop.factor.fill_(min(factor, 1.0) if scale == "none" else factor)
                loop.x.copy_(loop.x.roll(1, 0) * 0.9)
            eager.backward()
            if not whole:
                graph.precision.before_replay()
            recording.replay()
        eager.step()
        if not whole:
            graph.step()
        assert_same(graph, eager)
    for loop in (eager, graph):  # an eager step after replays goes on from them
        loop.iteration()
    assert_same(graph, eager)


def test_a_capture_before_the_first_step_is_refused(monkeypatch):
    loop = Loop("fp16")
    monkeypatch.setattr("largebatch.amp.skips.is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="take a step with this precision before the capture"):
        loop.backward()
