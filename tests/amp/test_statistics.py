"""Running statistics of norm layers and others after a forward pass that overflowed."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.amp import GradientOverflowError, Precision
from tests.amp.nets import Loop, loss_of, net_and_batch, optimizer_for

NAMES = ["fp16", "fp16-master", "fp16-pure"]


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return True


def state_of(loop):
    """Everything that a step changes, except the loss scale."""
    return copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()["state"]))


@pytest.mark.parametrize("name", NAMES)
def test_statistics_that_change_between_iterations_are_kept(name):
    """In evaluation, for precise batch norm, by hand and by a resume after a forward pass."""
    loop = Loop(name).step()
    for trains in (False, True):
        with torch.no_grad(), loop.precision.forward():
            loop.model.train(trains)(loop.x)
    loop.model.bn1.running_mean.fill_(0.5)
    before = state_of(loop)
    assert same(state_of(loop.step(images=1e30)), before)
    assert same(state_of(loop.step(1e30)), before)  # where gradients alone overflow
    resumed = Loop(name)
    loss_of(resumed.precision, resumed.model, resumed.x, resumed.labels).backward()
    resumed.optimizer.zero_grad()
    for part in ("model", "optimizer", "precision"):
        getattr(resumed, part).load_state_dict(getattr(loop, part).state_dict())
    assert same(state_of(resumed.step(images=1e30)), before)


def test_a_nan_that_stays_ends_with_the_names_of_the_layers():
    loop = Loop("fp16-master", max_skipped_steps=2).step(images=float("nan"))
    message = "backwards: fc.bias, fc.weight.*; the forward pass overflowed, .* input on: bn1$"
    with pytest.raises(GradientOverflowError, match=message):
        loop.step(images=float("nan"))


def test_without_loss_scaling_nothing_is_put_back():
    for name in ("fp32", "bf16", "bf16-master"):
        loop = Loop(name).step().step(images=float("nan"))
        assert loop.model.bn1.running_mean.isnan().all()


def test_only_the_models_of_skipped_optimizers_are_put_back():
    loop = Loop("fp16")
    other = loop.precision.convert(net_and_batch()[0])
    optimizer = optimizer_for(loop.precision, other, lr=0.05)
    loop.backward(images=1e30)
    loop.precision.backward(loss_of(loop.precision, other, loop.x, loop.labels))
    loop.precision.step(loop.optimizer, optimizer)
    assert loop.model.bn1.num_batches_tracked == 0
    assert other.bn1.num_batches_tracked == 1
    assert not torch.equal(other.bn1.running_mean, torch.zeros(8))


class OwnBatchNorm(nn.Module):
    """Changes its statistics in place, one of them a buffer that is not contiguous."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer("moments", torch.zeros(features, 2).T)
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, x):
        if self.training:
            moments = torch.stack([x.detach().mean(0), x.detach().var(0)])
            self.moments.lerp_(moments.to(self.moments.dtype), 0.1)
            self.batches += 1
        return x


class Centre(nn.Module):
    """Replaces its buffer, which is an expanded tensor at first."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, features).expand(2, -1))
        self.register_buffer("never_changed", torch.ones(1, 1).expand(3, 3))

    def forward(self, x):
        if self.training:
            self.centre = self.centre * 0.9 + x.detach().mean(0) * 0.1
        return x


#: Models that are converted once more.
WAYS = {
    "as converted": lambda precision, model: (precision, model),
    "a copy": lambda precision, model: (precision, copy.deepcopy(model)),
    "a part": lambda precision, model: (precision, copy.deepcopy(model)[:]),
    "copied together": lambda precision, model: copy.deepcopy((precision, model)),
}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    way=st.sampled_from(sorted(WAYS)),
    evaluates=st.sets(st.sampled_from(["root", "1", "2", "2.1"])),
    waits=st.booleans(),
    factor=st.sampled_from([1e30, float("nan")]),
    by_hand=st.booleans(),
    good_before=st.integers(0, 2),
    good_passes=st.integers(0, 1),
    decorates=st.booleans(),
)
def test_no_dropped_iteration_leaves_a_trace_in_any_statistic(
    name, way, evaluates, waits, factor, by_hand, good_before, good_passes, decorates
):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), OwnBatchNorm(6), Centre(6))
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), head, nn.Linear(6, 4))
    precision = Precision(name)
    precision, model = WAYS[way](precision, precision.convert(net))
    model = precision.convert(model)
    optimizer = optimizer_for(precision, model, lr=0.01)
    if "root" in evaluates:
        model.eval()[2].train()
    for path in evaluates - {"root"}:
        model.get_submodule(path).eval()
    x, labels = torch.randn(16, 6), torch.arange(16) % 4
    loss_at = partial(loss_of, precision, model, labels=labels)
    if decorates:
        loss_at = precision.forward()(
            lambda x: nn.functional.cross_entropy(model(x).float(), labels)
        )
    with mock.patch("largebatch.amp.skips.is_free_to_read", return_value=waits):
        for values in (x,) * good_before + (x * factor,):
            before = copy.deepcopy(model.state_dict())
            for _ in range(0 if values is x else good_passes):  # of other micro-batches
                precision.backward(loss_at(x))
            loss = loss_at(values)
            if values is not x and by_hand:
                precision.abandon()
                continue
            precision.backward(loss)
            precision.step(optimizer)
            optimizer.zero_grad()
    assert same(dict(model.state_dict()), dict(before))
    assert precision.skipped_steps == (not by_hand)


def test_a_batch_that_is_dropped_without_a_word_leaves_no_nan():
    loop = Loop("fp16").step()
    loss_of(loop.precision, loop.model, loop.x * float("nan"), loop.labels)
    loop.step()
    assert all(buffer.isfinite().all() for buffer in loop.model.buffers())
    assert loop.precision.skipped_steps == 0


def test_a_network_that_no_optimizer_trains_is_put_back_with_the_others():
    """As the key encoder of MoCo, whose forward pass is without gradients."""
    loop = Loop("fp16").step()
    keys = loop.precision.convert(copy.deepcopy(loop.model))
    before = copy.deepcopy(keys.state_dict())
    with loop.precision.forward():
        with torch.no_grad():
            keys(loop.x * 1e30)
        loss = nn.functional.cross_entropy(loop.model(loop.x * 1e30).float(), loop.labels)
    loop.precision.backward(loss)
    loop.update()
    assert same(dict(keys.state_dict()), dict(before))


@pytest.mark.slow("compiles a model")
def test_a_compiled_model_has_its_statistics_put_back():
    loop = Loop("fp16-master")
    loop.network = torch.compile(loop.model, backend="aot_eager", fullgraph=True)
    before = state_of(loop.step())
    assert same(state_of(loop.step(images=1e30)), before)
    assert loop.precision.skipped_steps == 1
