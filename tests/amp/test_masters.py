"""Masters: FP32 updates with any torch optimizer, exported weights, and parameters that change."""

import copy
import io
import itertools
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from largebatch.amp import MasterWeights, full_precision_state_dict, reset_masters
from largebatch.lars import LARS, Muon
from tests.amp.nets import Loop, net_and_batch

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=1e-3),
    "sgd fused": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, fused=True),
    "sgd nesterov": lambda params: torch.optim.SGD(params, 0.1, 0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "adam foreach": lambda params: torch.optim.Adam(params, 0.01, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.01),
}
SHAPES = [(4, 3, 3, 3), (5,), (7, 2)]


def parameters(dtypes):
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(s).to(d)) for s, d in zip(SHAPES, dtypes, strict=True)]


HALF = torch.bfloat16
MIXED = (HALF, torch.float32, HALF)


@pytest.mark.parametrize(
    ("name", "scale"), list(zip(OPTIMIZERS, itertools.cycle([None, 1024.0]), strict=False))
)
def test_masters_match_the_same_optimizer_in_fp32(name, scale):
    """Also where a gradient is missing; a closure computes them in the step."""
    halves = parameters(MIXED)
    plain = [nn.Parameter(p.detach().float()) for p in halves]
    ours, oracle = MasterWeights(OPTIMIZERS[name](halves)), OPTIMIZERS[name](plain)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        given = []
        for half, full in zip(halves, plain, strict=True):
            gradient = (1e-2 * torch.randn(half.shape, generator=generator)).to(half.dtype)
            if half.dim() == 4:
                gradient = gradient.to(memory_format=torch.channels_last)
            full.grad = gradient.float().contiguous()
            given.append(gradient * (scale or 1.0))
        if step == 3:
            given[2] = plain[2].grad = None
        kept = copy.deepcopy(given)

        def closure(given=given):
            for half, gradient in zip(halves, given, strict=True):
                half.grad = gradient
            return 7.0

        if scale is not None:
            ours.grad_scale, ours.found_inf = torch.tensor(scale), torch.tensor(0.0)
        assert ours.step(closure) == 7.0
        oracle.step()
        assert all(half.grad is gradient for half, gradient in zip(halves, given, strict=True))
        torch.testing.assert_close(given, kept, rtol=0, atol=0)
    for half, full in zip(halves, plain, strict=True):
        master = ours.state[half]["master"] if half.dtype == HALF else half
        torch.testing.assert_close(master, full, rtol=1e-6, atol=1e-7)
        assert torch.equal(half, master.to(half.dtype))


def test_schedulers_and_new_groups_affect_the_wrapped_optimizer():
    weight, bias, other = parameters((HALF, HALF, HALF))
    optimizer = MasterWeights(torch.optim.SGD([weight], 1.0))
    optimizer.add_param_group({"params": [bias, other], "lr": 0.0})
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    expected = weight.detach().float()
    untouched = bias.detach().clone()
    for step in range(3):
        for parameter in (weight, bias, other):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        expected -= 0.5**step
        scheduler.step()
    torch.testing.assert_close(optimizer.state[weight]["master"], expected)
    assert torch.equal(bias, untouched)
    assert optimizer.state[bias]["master"].dtype == torch.float32


def test_loading_the_state_dict_of_the_wrapped_optimizer_makes_masters_from_the_parameters():
    halves = parameters((HALF, HALF, HALF))
    plain = OPTIMIZERS["sgd"](halves)
    for half in halves:
        half.grad = torch.ones_like(half)
    plain.step()
    ours = MasterWeights(OPTIMIZERS["sgd"](halves))
    ours.load_state_dict(plain.state_dict())
    assert all(torch.equal(ours.state[half]["master"], half.float()) for half in halves)
    momentum = [state["momentum_buffer"].dtype for state in ours.state_dict()["state"].values()]
    assert momentum == [torch.float32] * 3


def test_an_optimizer_with_state_is_refused():
    weight = parameters(MIXED)[0]
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(ValueError, match=r"^SGD already has state \(momentum_buffer\).*; valid: "):
        MasterWeights(optimizer)
    with pytest.raises(ValueError, match=r"^Adagrad already has state \(step, sum\), of the param"):
        MasterWeights(torch.optim.Adagrad([weight], 0.1))  # which makes it at construction


@pytest.mark.parametrize("kind", ["sgd", "lars"])
def test_exported_weights_are_the_masters_in_fp32_and_load_into_an_fp32_model(kind):
    """Before the first step, they are the parameters, and there are no masters to reset."""
    loop = Loop("fp16-master", kind)
    model, optimizer = loop.model, loop.optimizer
    reset_masters(optimizer)
    assert not any("master" in state for state in optimizer.state.values())
    exported = full_precision_state_dict(model, optimizer)
    assert torch.equal(exported["fc.weight"], model.fc.weight.float())
    for _ in range(20):
        loop.step()
    exported = full_precision_state_dict(model, optimizer)
    assert exported.keys() == model.state_dict().keys()
    assert {v.dtype for v in exported.values()} == {torch.float32, torch.int64}
    master = optimizer.state[model.fc.weight]["master"]
    assert torch.equal(exported["fc.weight"], master)
    assert exported["fc.weight"].data_ptr() != master.data_ptr()
    assert not torch.equal(exported["fc.weight"], model.fc.weight.float())
    plain, x, _ = net_and_batch()
    plain.load_state_dict(exported)
    torch.testing.assert_close(plain.eval()(x), model.eval()(x), rtol=0, atol=2e-2)


OTHERS = {"rule": "adamw", "lr_scale": 0.1}
HALVES_OF = {
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
    def __init__(self, kind, dtype):
        self.kind, self.dtype, self.steps = kind, dtype, 0
        self.net = Net(dtype)
        self.optimizer = HALVES_OF[kind](list(self.net.parameters()))

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

    def resume(self, weights_last=False):
        file = io.BytesIO()
        torch.save((self.net.state_dict(), self.optimizer.state_dict()), file)
        saved = torch.load(io.BytesIO(file.getvalue()))
        other = Run(self.kind, self.dtype)
        self.net, self.optimizer = other.net, other.optimizer
        for of_weights in (not weights_last, weights_last):
            part = self.net if of_weights else self.optimizer
            part.load_state_dict(saved[0 if of_weights else 1])


STEPS = [Run.step, partial(Run.step, without=("bias",)), Run.overflow]
NEUTRAL = [
    *(*STEPS, Run.swap_in_and_back, Run.load_the_same, Run.move, Run.to_fp32_and_back),
    *(Run.copied, Run.resume, partial(Run.resume, weights_last=True)),
]
kinds = pytest.mark.parametrize("kind", HALVES_OF)
dtypes = st.sampled_from([torch.bfloat16, torch.float16])


def assert_rounded(run):
    for name, master in run.masters().items():
        parameter = run.net.get_parameter(name)
        assert torch.equal(parameter, master.to(parameter.dtype)), name


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
    for of in (lambda run: dict(run.net.state_dict()), Run.masters):
        torch.testing.assert_close(of(run), of(alone), rtol=0, atol=0)
    assert [str(one.message) for one in caught if "masters" in str(one.message)] == []


@kinds
@settings(max_examples=25, deadline=None)
@given(
    dtypes,
    st.lists(st.sampled_from(NEUTRAL), max_size=4),
    st.sampled_from(["load", "in place", "data"]),
    st.sets(st.integers(0, 23), min_size=1, max_size=4),
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
    new = old.clone()
    new.view(-1)[list(places)] = number
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
