"""Masters of parameters that something else than the optimizer wrote, or wrote back."""

import copy
import io
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.amp import (
    MasterWeights,
    full_precision_state_dict,
    reset_masters,
    underflow_report,
)
from largebatch.lars import LARS, Muon

OTHERS = {"rule": "adamw", "lr_scale": 0.1}
OPTIMIZERS = {
    "lars": lambda p: LARS(p, 0.5, weight_decay=1e-3, trust_coefficient=0.1, master_weights=True),
    "lars reference": lambda p: LARS(p, 0.5, master_weights=True, implementation="reference"),
    "muon": lambda p: Muon(
        [{"params": p[:1]}, {"params": p[1:], "orthogonal": False}],
        0.1,
        others=OTHERS,
        master_weights=True,
    ),
    "sgd": lambda p: MasterWeights(torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adamw": lambda p: MasterWeights(torch.optim.AdamW(p, 0.01)),
}


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 4).to(dtype))
        self.bias = nn.Parameter(torch.randn(5).to(dtype))
        self.gain = nn.Parameter(torch.ones(3))  # as of a norm layer

    def cast(self, dtype):
        for parameter in (self.weight, self.bias):
            parameter.data = parameter.data.to(dtype)


class Run:
    """A model, its optimizer, and what may happen between two steps."""

    def __init__(self, kind, dtype):
        self.kind, self.dtype, self.steps = kind, dtype, 0
        self.net = Net(dtype)
        self.optimizer = OPTIMIZERS[kind](list(self.net.parameters()))

    def masters(self):
        state = self.optimizer.state
        return {
            n: state[p]["master"]
            for n, p in self.net.named_parameters()
            if state.get(p) and "master" in state[p]
        }

    def step(self, without=()):
        generator = torch.Generator().manual_seed(self.steps)
        self.steps += 1
        for name, parameter in self.net.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if name in without else gradient
        self.optimizer.step()

    def stop(self):
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
            if "dialect" in group:  # of LARS, whose momentum holds moves
                group["momentum"] = 0.0

    def step_of_some(self):
        self.step(without=("bias",))

    def overflow(self):
        self.optimizer.grad_scale, self.optimizer.found_inf = torch.ones(()), torch.ones(())
        self.step()
        del self.optimizer.grad_scale, self.optimizer.found_inf

    def swap_in_and_back(self):
        own = copy.deepcopy(self.net.state_dict())
        self.net.load_state_dict({name: 0.5 * value for name, value in own.items()})
        self.optimizer.state_dict()  # as a checkpoint is written then
        self.net.load_state_dict(own)

    def load_the_same(self):
        self.net.load_state_dict(copy.deepcopy(self.net.state_dict()))

    def move(self):
        for parameter in self.net.parameters():
            parameter.data = parameter.data.clone()

    def to_fp32_and_back(self):
        self.net.float()
        self.net.cast(self.dtype)

    def copied(self):
        self.net, self.optimizer = copy.deepcopy((self.net, self.optimizer))

    def resume(self, weights_first=True):
        file = io.BytesIO()
        torch.save((self.net.state_dict(), self.optimizer.state_dict()), file)
        weights, state = torch.load(io.BytesIO(file.getvalue()))
        other = Run(self.kind, self.dtype)
        self.net, self.optimizer = other.net, other.optimizer
        for first in (weights_first, not weights_first):
            if first:
                self.net.load_state_dict(weights)
            else:
                self.optimizer.load_state_dict(state)

    def resume_weights_last(self):
        self.resume(weights_first=False)


NEUTRAL = [
    Run.step,
    Run.step_of_some,
    Run.overflow,
    Run.swap_in_and_back,
    Run.load_the_same,
    Run.move,
    Run.to_fp32_and_back,
    Run.copied,
    Run.resume,
    Run.resume_weights_last,
]
STEPS = [Run.step, Run.step_of_some, Run.overflow]
kinds = pytest.mark.parametrize("kind", OPTIMIZERS)
dtypes = st.sampled_from([torch.bfloat16, torch.float16])


def assert_rounded(run):
    for name, master in run.masters().items():
        parameter = run.net.get_parameter(name)
        assert torch.equal(parameter, master.to(parameter.dtype)), name


def assert_same(run, other):
    for ours, theirs in (
        (run.net.state_dict(), other.net.state_dict()),
        (run.masters(), other.masters()),
    ):
        assert ours.keys() == theirs.keys()
        assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []


@kinds
@settings(max_examples=25, deadline=None)
@given(dtypes, st.lists(st.sampled_from(NEUTRAL), max_size=10))
def test_what_leaves_the_values_as_they_are_keeps_every_master_to_the_last_bit(kind, dtype, events):
    run, alone = Run(kind, dtype), Run(kind, dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for event in [Run.step, *events, Run.step]:
            event(run)
            if event in STEPS:
                event(alone)
    assert_rounded(run)
    assert_same(run, alone)
    assert [str(one.message) for one in caught if "masters" in str(one.message)] == []


def edit(value, chosen, numbers):
    """Return a copy of a tensor with other values at some places."""
    new = value.clone()
    for place, number in zip(chosen, numbers, strict=True):
        new.view(-1)[place % value.numel()] = number
    return new


@kinds
@settings(max_examples=25, deadline=None)
@given(
    dtypes,
    st.lists(st.sampled_from(NEUTRAL), max_size=4),
    st.sampled_from(["load", "in place", "data"]),
    st.lists(st.integers(0, 30), min_size=1, max_size=4, unique=True),
    st.sampled_from([0.0, -0.0, 2.0**-14, 300.0]),
)
def test_where_a_parameter_was_changed_its_master_is_and_nowhere_else(
    kind, dtype, events, how, places, number
):
    run = Run(kind, dtype)
    for event in [Run.step, *events, Run.step]:
        event(run)
    old, expected = run.net.weight.detach().clone(), run.masters()["weight"].clone()
    others = run.masters()["bias"].clone()
    new = edit(old, places, [number] * len(places))
    expected = torch.where(new == old, expected, new.float())
    if how == "load":
        run.net.load_state_dict({**run.net.state_dict(), "weight": new})
    elif how == "in place":
        with torch.no_grad():
            run.net.weight.copy_(new)
    else:
        run.net.weight.data.copy_(new)
    exported = full_precision_state_dict(run.net, run.optimizer)
    assert torch.equal(exported["weight"], expected)
    assert torch.equal(exported["bias"], others)
    saved = copy.deepcopy(run.optimizer.state_dict())["state"]
    assert torch.equal(saved[0]["master"], expected)
    if how == "data":
        reset_masters(run.optimizer)
        expected = new.float()
    run.stop()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.step(without=("weight",))
        assert_rounded(run)
        run.load_the_same()
        run.step()
    assert torch.equal(run.masters()["weight"], expected)
    assert_rounded(run)
    told = [one for one in caught if "weights have been changed" in str(one.message)]
    assert len(told) == (how != "data" and not torch.equal(new, old))


@kinds
def test_after_training_in_fp32_no_master_of_before_comes_back(kind):
    run = Run(kind, torch.bfloat16)
    for _ in range(5):
        run.step()
    run.net.float()
    for name, value in full_precision_state_dict(run.net, run.optimizer).items():
        assert torch.equal(value, run.net.get_parameter(name))
    for _ in range(5):
        run.step()
        assert_rounded(run)
    for name, value in full_precision_state_dict(run.net, run.optimizer).items():
        assert torch.equal(value, run.net.get_parameter(name))
    run.net.cast(torch.bfloat16)
    before = run.net.weight.detach().clone()
    run.stop()
    run.step()
    assert_rounded(run)
    assert torch.equal(run.net.weight, before)


def test_the_report_counts_updates_from_the_parameters_values():
    run = Run("sgd", torch.float16)
    run.step()
    run.net.weight.data.mul_(1.5)
    run.stop()
    reset_masters(run.optimizer)
    run.net.load_state_dict({name: 2 * value for name, value in run.net.state_dict().items()})
    with (
        pytest.warns(UserWarning, match="weights have been changed"),
        underflow_report(run.net, run.optimizer) as report,
    ):
        run.step()
    assert report.total.changed == 0


def test_a_loop_that_writes_all_parameters_back_hardly_waits_for_an_accelerator(monkeypatch):
    """The values are compared on the device; the host reads the result ever less often."""
    from largebatch.lars import masters

    class OnDevice:
        """A flag on an accelerator, which counts how often it is read."""

        device, reads = torch.device("cuda"), 0

        def __or__(self, other):
            return self

        def to(self, device, non_blocking):
            return self

        def __bool__(self):
            OnDevice.reads += 1
            return False

    written = masters.Written("LARS")
    for _ in range(100):
        written._warn_if(OnDevice())
    assert OnDevice.reads == 7
