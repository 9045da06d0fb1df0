"""Running statistics of norm layers after a forward pass that overflowed."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.amp import GradientOverflowError, Precision
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
        assert not loop.precision._statistics[loop.model]._saved


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


def test_copies_and_pickles_of_a_model_hold_no_statistics():
    loop = Loop("fp16-master")
    loop.backward()
    (hook,) = (h for h in loop.model._forward_pre_hooks.values() if hasattr(h, "_saved"))
    assert hook._saved
    for copied in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        (hook,) = (h for h in copied._forward_pre_hooks.values() if hasattr(h, "_saved"))
        assert hook._saved is None
        copied(loop.x)


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
