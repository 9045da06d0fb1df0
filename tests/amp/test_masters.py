"""MasterWeights: FP32 updates with any torch optimizer, state dicts, and exported weights."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from largebatch.amp import MasterWeights, Precision, full_precision_state_dict, reset_masters
from largebatch.lars import LARS
from tests.amp.nets import lars, net_and_batch, sgd, train
from tests.ranks import run_ranks

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
    halves = parameters(MIXED)
    plain = [nn.Parameter(p.detach().float()) for p in halves]
    ours, oracle = MasterWeights(OPTIMIZERS[name](halves)), OPTIMIZERS[name](plain)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for half, full in zip(halves, plain, strict=True):
            half.grad = (1e-2 * torch.randn(half.shape, generator=generator)).to(half.dtype)
            if half.dim() == 4:
                half.grad = half.grad.to(memory_format=torch.channels_last)
            full.grad = half.grad.float().contiguous()
            if scale is not None:
                half.grad = half.grad * scale
        given = [p.grad for p in halves]
        kept = [g.clone() for g in given]
        if scale is not None:
            ours.grad_scale, ours.found_inf = torch.tensor(scale), torch.tensor(0.0)
        ours.step()
        oracle.step()
        assert all(p.grad is g for p, g in zip(halves, given, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    for half, full in zip(halves, plain, strict=True):
        master = ours.state[half]["master"] if half.dtype == HALF else half
        torch.testing.assert_close(master, full, rtol=1e-6, atol=1e-7)
        assert torch.equal(half, master.to(half.dtype))


def test_updates_too_small_for_half_precision_accumulate():
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    alone = nn.Parameter(torch.ones(1, dtype=torch.float16))
    ours, theirs = MasterWeights(torch.optim.SGD([weight], 1.0)), torch.optim.SGD([alone], 1.0)
    for _ in range(64):
        for parameter, optimizer in ((weight, ours), (alone, theirs)):
            parameter.grad = torch.full_like(parameter, 2.0**-12)
            optimizer.step()
    assert alone.item() == 1.0
    assert weight.item() == 1 - 2**-6


def test_missing_gradients_are_skipped_and_a_closure_is_called():
    a, b = parameters(MIXED)[:2]
    optimizer = MasterWeights(torch.optim.SGD([a, b], 0.1))
    before = b.detach().clone()

    def closure():
        a.grad = torch.ones_like(a)
        return 7.0

    was = a.detach().clone()
    assert optimizer.step(closure) == 7.0
    assert torch.equal(b, before)
    assert not torch.equal(a, was)


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
    for half in halves:
        assert torch.equal(ours.state[half]["master"], half.float())
        half.grad = torch.zeros_like(half)
    momentum = [state["momentum_buffer"].dtype for state in ours.state_dict()["state"].values()]
    assert momentum == [torch.float32] * 3


def test_an_optimizer_with_state_is_refused():
    weight = parameters(MIXED)[0]
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(
        ValueError,
        match=r"^SGD already has state \(momentum_buffer\), of the parameters, not of masters; "
        r"valid: an optimizer that makes its state in its first step, wrapped in MasterWeights",
    ):
        MasterWeights(optimizer)
    with pytest.raises(ValueError, match=r"^Adagrad already has state \(step, sum\), of the param"):
        MasterWeights(torch.optim.Adagrad([weight], 0.1))  # which makes it at construction


@pytest.mark.parametrize("kind", ["sgd", "lars"])
def test_exported_weights_are_the_masters_in_fp32_and_load_into_an_fp32_model(kind):
    _, model, optimizer, _ = train("fp16-master", kind=kind)
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


def test_before_the_first_step_the_parameters_are_exported_and_a_reset_does_nothing():
    model, *_ = net_and_batch()
    model.half()
    before = copy.deepcopy(model.state_dict())
    for optimizer in (sgd(model), lars(model, masters=True), MasterWeights(sgd(model))):
        exported = full_precision_state_dict(model, optimizer)
        assert torch.equal(exported["fc.weight"], model.fc.weight.float())
        reset_masters(optimizer)
        assert not any("master" in state for state in optimizer.state.values())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_masters_loaded_before_the_first_step_can_be_reset_too():
    _, model, optimizer, _ = train("fp16-master", steps=2, kind="sgd")
    other = MasterWeights(sgd(model))
    other.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        model.fc.weight.add_(1)
    reset_masters(other)
    assert torch.equal(other.state[model.fc.weight]["master"], model.fc.weight.float())


def sharded_net(shard):
    torch.manual_seed(0)
    # 7 and 5 are not divisible by 2, which gives shards of different sizes.
    net = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 5))
    net = Precision("bf16-master").convert(net)
    if shard:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    return net


def sharded_steps(net, optimizer, steps):
    for step in steps:
        torch.manual_seed(step + 1)
        net(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(kind):
    """Train sharded over the ranks and on one rank, save, load and train on."""

    def make(net):
        if kind == "lars":
            return LARS(net.parameters(), 0.5, trust_coefficient=0.1, master_weights=True)
        return MasterWeights(OPTIMIZERS[kind](net.parameters()))

    def run(shard, resume):
        net = sharded_net(shard)
        optimizer = make(net)
        sharded_steps(net, optimizer, range(3))
        if resume:
            whole = StateDictOptions(full_state_dict=resume == "whole")
            state = get_optimizer_state_dict(net, optimizer, options=whole)
            weights = get_model_state_dict(net, options=whole)
            net = sharded_net(shard)
            optimizer = make(net)
            set_model_state_dict(net, weights, options=whole)
            set_optimizer_state_dict(net, optimizer, state, options=whole)
        sharded_steps(net, optimizer, range(3, 5))
        return net, optimizer

    expected = full_precision_state_dict(*run(False, None))
    for resume in (None, "whole", "parts"):
        net, optimizer = run(True, resume)
        weight = next(net.parameters())
        assert isinstance(optimizer.state[weight]["master"], DTensor)
        exported = full_precision_state_dict(net, optimizer)
        assert not any(isinstance(value, DTensor) for value in exported.values())
        for name, value in expected.items():
            assert exported[name].dtype == torch.float32
            torch.testing.assert_close(exported[name], value, rtol=5e-3, atol=5e-3)
        master = optimizer.state[weight]["master"].full_tensor()
        assert torch.equal(exported["0.weight"], master)
        assert torch.equal(weight.full_tensor(), master.bfloat16())
        with torch.no_grad():
            weight.to_local().add_(1)
        reset_masters(optimizer)
        assert torch.equal(
            optimizer.state[weight]["master"].full_tensor(), weight.full_tensor().float()
        )
        with torch.no_grad():
            weight.to_local().mul_(-1)
        edited = weight.full_tensor().float()
        assert torch.equal(full_precision_state_dict(net, optimizer)["0.weight"], edited)
        with pytest.warns(UserWarning, match="weights have been changed"):
            sharded_steps(net, optimizer, range(5, 6))
        master = optimizer.state[weight]["master"].full_tensor()
        assert torch.equal(weight.full_tensor(), master.bfloat16())
        assert (master - edited).norm() < 0.5 * edited.norm()
    return exported


def sharded_runs(kinds):
    return [sharded(kind) for kind in kinds]


@pytest.mark.slow("starts two ranks")
def test_sharded_masters_are_those_of_one_process():
    first, second = run_ranks(2, sharded_runs, ["sgd", "adamw", "lars"])
    for ours, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
