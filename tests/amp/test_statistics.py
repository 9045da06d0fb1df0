"""Running statistics of norm layers after a forward pass that overflowed."""

import copy
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.amp import GradientOverflowError, Precision, statistics
from largebatch.amp.statistics import MOST_ELEMENTS
from tests.amp.nets import loss_of, net_and_batch, optimizer_for
from tests.ranks import run_ranks

NAMES = ["fp16", "fp16-master", "fp16-pure"]


class Loop:
    """A training loop whose activations can be made to overflow."""

    def __init__(self, name, enters=True, **options):
        self.precision = Precision(name, **options)
        model, self.x, self.labels = net_and_batch()
        self.model = self.precision.convert(model)
        self.optimizer = optimizer_for(self.precision, self.model, lr=0.05)
        self.network, self.enters = self.model, enters

    def backward(self, factor=1.0):
        if self.enters:
            loss = loss_of(self.precision, self.network, self.x * factor, self.labels)
        else:  # which a converted model allows
            loss = nn.functional.cross_entropy(self.network(self.x * factor), self.labels)
        self.precision.backward(loss)

    def step(self, *factors):
        for factor in factors or (1.0,):
            self.backward(factor)
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad()
        return self

    def state(self):
        """Everything that a step changes, except the loss scale."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()["state"]))


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return True


@pytest.mark.parametrize("enters", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_an_overflow_in_the_forward_pass_changes_nothing(name, enters):
    if name == "fp16":
        enters = True  # autocast needs the context
    loop = Loop(name, enters).step()
    before = loop.state()
    loop.backward(1e30)
    assert not loop.model.bn1.running_var.isfinite().all()
    assert loop.model.bn1.num_batches_tracked == 2
    loop.precision.step(loop.optimizer)
    loop.optimizer.zero_grad()
    assert loop.precision.skipped_steps == 1
    assert same(loop.state(), before)
    loop.step()
    assert loop.model.bn1.num_batches_tracked == 2
    assert not torch.equal(loop.model.bn1.running_mean, before[0]["bn1.running_mean"])


@pytest.mark.parametrize("name", NAMES)
def test_the_first_iteration_may_overflow_in_any_of_its_micro_batches(name):
    for factors in ((1e30, 1.0), (1.0, 1e30), (1.0, 1e30, 1.0)):
        loop = Loop(name)
        before = loop.model.state_dict()
        before = copy.deepcopy(before)
        loop.step(*factors)
        assert same(loop.model.state_dict(), before)


def test_an_overflow_of_gradients_alone_puts_finite_statistics_back_too():
    loop = Loop("fp16").step()
    before = loop.state()
    loss = loss_of(loop.precision, loop.model, loop.x, loop.labels)
    loop.precision.backward(loss * 1e30)
    loop.precision.step(loop.optimizer)
    assert same(loop.state(), before)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_that_change_between_iterations_are_kept(name):
    loop = Loop(name).step()
    loop.model.eval()
    with torch.no_grad(), loop.precision.forward():
        loop.model(loop.x)
    loop.model.train()
    with torch.no_grad(), loop.precision.forward():  # as for precise batch norm
        loop.model(loop.x)
    loop.model.bn1.running_mean.fill_(0.5)
    before = loop.state()
    assert same(loop.step(1e30).state(), before)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumed_after_a_forward_pass_keeps_the_statistics_it_loads(name):
    loop = Loop(name)
    loss_of(loop.precision, loop.model, loop.x, loop.labels).backward()  # as to lay out buckets
    loop.optimizer.zero_grad()
    other = Loop(name).step()
    loop.model.load_state_dict(other.model.state_dict())
    loop.optimizer.load_state_dict(other.optimizer.state_dict())
    loop.precision.load_state_dict(other.precision.state_dict())
    before = loop.state()
    assert same(loop.step(1e30).state(), before)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_that_stays_ends_with_the_names_of_the_layers(name):
    loop = Loop(name, max_skipped_steps=3).step()
    before = loop.state()
    loop.step(float("nan")).step(float("nan"))
    with pytest.raises(GradientOverflowError) as caught:
        loop.step(float("nan"))
    assert "3 steps in a row were skipped" in str(caught.value)
    assert "from the loss backwards: fc.bias, fc.weight" in str(caught.value)
    assert str(caught.value).endswith("; the forward pass overflowed, from the input on: bn1")
    assert same(loop.state(), before)


def test_without_loss_scaling_nothing_is_put_back():
    for name in ("fp32", "bf16", "bf16-master"):
        loop = Loop(name).step().step(float("nan"))
        assert loop.model.bn1.running_mean.isnan().all()
        assert loop.model not in statistics._begun


def test_only_the_models_of_skipped_optimizers_are_put_back():
    loop = Loop("fp16")
    other = loop.precision.convert(net_and_batch()[0])
    optimizer = optimizer_for(loop.precision, other, lr=0.05)
    loop.backward(1e30)
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
    """Replaces its buffer, by one of another shape if that is asked for."""

    def __init__(self, features, grows):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, features).expand(2, -1))
        self.grows = grows

    def forward(self, x):
        if self.training:
            self.centre = self.centre * 0.9 + x.detach().mean(0) * 0.1
            if self.grows:
                self.centre = torch.cat([self.centre, self.centre[:1]])
        return x


class Bank(nn.Module):
    """A queue of features that is larger than what is copied unasked, and its pointer."""

    def __init__(self, elements=MOST_ELEMENTS + 1):
        super().__init__()
        self.register_buffer("queue", torch.zeros(elements))
        self.register_buffer("next", torch.tensor(0))

    def forward(self, x):
        self.queue[int(self.next)] = x.detach().mean()
        self.next += 1
        return x


WAYS = {
    "as converted": lambda precision, model: (precision, model),
    "copied": lambda precision, model: (precision, copy.deepcopy(model)),
    "pickled": lambda precision, model: (precision, pickle.loads(pickle.dumps(model))),
    "copied together": lambda precision, model: copy.deepcopy((precision, model)),
    "pickled together": lambda precision, model: pickle.loads(pickle.dumps((precision, model))),
    "a part": lambda precision, model: (precision, copy.deepcopy(model)[:]),
    "another precision": lambda precision, model: (Precision(precision.name), model),
    "converted again": lambda precision, model: (
        precision,
        precision.convert(copy.deepcopy(model)),
    ),
}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    way=st.sampled_from(sorted(WAYS)),
    evaluates=st.sets(st.sampled_from(["root", "1", "2", "2.1"])),
    grows=st.booleans(),
    waits=st.booleans(),
    factor=st.sampled_from([1e30, float("nan")]),
    by_hand=st.booleans(),
    good_before=st.integers(0, 2),
)
def test_no_dropped_iteration_leaves_a_trace_in_any_statistic(
    name, way, evaluates, grows, waits, factor, by_hand, good_before
):
    """Batch norms and others, in any mode, in copies, on a CPU and (``not waits``) on a GPU."""
    torch.manual_seed(0)
    grows = grows and waits  # the host must know of a skip to change a shape
    head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), OwnBatchNorm(6), Centre(6, grows))
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), head, nn.Linear(6, 4))
    precision = Precision(name)
    precision, model = WAYS[way](precision, precision.convert(net))
    optimizer = optimizer_for(precision, model, lr=0.01)
    if "root" in evaluates:
        model.eval()[2].train()
    for path in evaluates - {"root"}:
        model.get_submodule(path).eval()
    x, labels = torch.randn(16, 6), torch.arange(16) % 4
    with mock.patch("largebatch.amp.skips.is_free_to_read", return_value=waits):
        for values in (x,) * good_before + (x * factor,):
            before = copy.deepcopy(model.state_dict())
            loss = loss_of(precision, model, values, labels)
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


def test_abandon_may_leave_statistics_as_they_are():
    loop = Loop("fp16")
    loss_of(loop.precision, loop.model, loop.x, loop.labels)
    loop.precision.abandon(put_back=False)
    assert loop.model.bn1.num_batches_tracked == 1


@pytest.mark.parametrize("put_back", [(), ("0.queue", "0.next")])
def test_large_buffers_are_put_back_where_they_are_named(put_back):
    precision = Precision("fp16")
    net = precision.convert(nn.Sequential(Bank(), nn.Linear(4, 4)), put_back=put_back)
    for model in (net, copy.deepcopy(net)):
        loss_of(precision, model, torch.full((2, 4), float("nan")), torch.zeros(2).long())
        precision.abandon()
        assert int(model[0].next) == (0 if put_back else 1)
        assert bool(model[0].queue[0].isnan()) == (not put_back)
        model[0].next.zero_()
    with pytest.raises(ValueError, match=r"^put_back: no buffer '0\.Queue'; valid: "):
        precision.convert(net, put_back=["0.Queue"])


def test_two_precisions_keep_their_models_apart():
    ours, theirs = Loop("fp16"), Loop("fp16")
    theirs.backward()
    copied = copy.deepcopy(theirs.model)
    ours.step(1e30)
    assert theirs.model.bn1.num_batches_tracked == 1
    theirs.precision.step(theirs.optimizer)
    assert theirs.model.bn1.num_batches_tracked == 1
    del copied
    # A model that another precision steps from now on is that one's.
    ours.optimizer, ours.model, ours.network = theirs.optimizer, theirs.model, theirs.model
    ours.step(1e30)
    assert theirs.model.bn1.num_batches_tracked == 1


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
    loop.precision.step(loop.optimizer)
    assert same(dict(keys.state_dict()), dict(before))


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("name", ["fp16", "fp16-master"])
def test_a_compiled_model_has_its_statistics_put_back(name):
    loop = Loop(name)
    loop.network = torch.compile(loop.model, backend="aot_eager", fullgraph=True)
    loop.step()
    before = loop.state()
    assert same(loop.step(1e30).state(), before)
    assert loop.precision.skipped_steps == 1


def ddp_run(name, views):
    loop = Loop(name)
    loop.network = DistributedDataParallel(loop.model, gradient_as_bucket_view=views)
    loop.step()
    before = loop.state()
    factors = (1e30, 1.0) if dist.get_rank() == 1 else (1.0, 1.0)
    with loop.network.no_sync():
        loop.backward(factors[0])
    loop.backward(factors[1])
    loop.precision.step(loop.optimizer)
    loop.optimizer.zero_grad()
    assert loop.precision.skipped_steps == 1
    assert same(loop.state(), before)
    loop.step()
    return loop.state()[0]


def ddp_runs():
    return [ddp_run(name, views) for name in ("fp16", "fp16-master") for views in (False, True)]


@pytest.mark.slow("starts two ranks")
def test_all_ranks_put_their_statistics_back_where_one_overflows():
    first, second = run_ranks(2, ddp_runs)
    for ours, theirs in zip(first, second, strict=True):
        for name in ("fc.weight", "conv1.weight"):
            assert torch.equal(ours[name], theirs[name])
        assert all(v.isfinite().all() for v in ours.values())
