"""MasterWeights: FP32 updates with any torch optimizer, state dicts, and exported weights."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from largebatch.amp import MasterWeights, full_precision_state_dict, reset_masters
from tests.amp.nets import lars, net_and_batch, sgd, train

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
