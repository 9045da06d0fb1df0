"""The rule "adamw" of Muon takes the steps of torch.optim.AdamW."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from largebatch.lars import Muon
from tests.lars.muon.training import parameters, run, set_gradients, tensors
from tests.lars.problems import laid_out

SHAPES = [(), (5,), (3, 4), (4, 3, 3, 3)]


def made(dtype, layout):
    return [nn.Parameter(laid_out(t, layout)) for t in tensors(0, SHAPES, dtype)]


def muon(of, lr=0.01, masters=False, **options):
    others = {"rule": "adamw", "lr": lr, **options}
    return Muon([{"params": of, "orthogonal": False}], 7.0, others=others, master_weights=masters)


@given(
    lr=st.sampled_from([1e-3, 0.1]),
    tensor_lr=st.booleans(),
    betas=st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)]),
    eps=st.sampled_from([None, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    maximize=st.booleans(),
    layout=st.sampled_from(["contiguous", "channels last", "transposed"]),
    fused=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=25, deadline=None)
def test_steps_are_those_of_torch(lr, tensor_lr, eps, layout, fused, dtype, **options):
    """Bit for bit those of its fused form, and within rounding those of its foreach form."""
    form = {"fused": True} if fused else {"foreach": True}
    rate = torch.tensor(lr) if tensor_lr else lr
    theirs = torch.optim.AdamW(made(dtype, layout), lr, eps=eps or 1e-8, **options, **form)
    ours = muon(made(dtype, layout), rate, eps=eps, **options)
    run(theirs, range(4))
    run(ours, range(4))
    # A tensor of FP32 is not the number.
    tolerance = 0.0 if fused and not tensor_lr else 1e-6 if dtype == torch.float32 else 1e-7
    for a, b in zip(parameters(ours), parameters(theirs), strict=True):
        assert a.stride() == b.stride()
        mine, other = ours.state[a], {name: theirs.state[b][name] for name in ours.state[a]}
        assert mine.keys() == {"exp_avg", "exp_avg_sq", "step"}
        assert_close({**mine, "of": a}, {**other, "of": b}, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_take_the_steps_of_fp32_parameters(dtype):
    of = made(dtype, "contiguous")
    ours = muon(of, weight_decay=0.01, masters=True)  # as torch's by default
    theirs = torch.optim.AdamW([nn.Parameter(p.detach().float()) for p in of], 0.01, fused=True)
    for step in range(4):
        run(ours, [step])
        for parameter, half in zip(parameters(theirs), of, strict=True):
            parameter.grad = half.grad.float()
        theirs.step()
    for half, whole in zip(of, parameters(theirs), strict=True):
        assert torch.equal(ours.state[half]["master"], whole)
        assert torch.equal(half, whole.to(dtype))


@pytest.mark.parametrize(
    ("layout", "masters"), [("channels last", True), ("strided", False), ("of gradients", True)]
)
def test_state_weights_and_gradients_of_another_layout_give_the_same_step(layout, masters):
    """As where a model is moved to channels_last after a step, or before its state is loaded."""
    dtype = torch.bfloat16 if masters else torch.float32
    ours, other = (muon(made(dtype, "contiguous"), masters=masters) for _ in range(2))
    run(ours, range(4))
    run(other, range(2))
    for parameter in parameters(other):
        parameter.data = laid_out(parameter.data, layout)
    for step in range(2, 4):
        set_gradients(other, step)
        for parameter in parameters(other) if layout == "of gradients" else ():
            parameter.grad = laid_out(laid_out(parameter.grad, "strided"), "channels last")
        other.step()
    for a, b in zip(parameters(ours), parameters(other), strict=True):
        assert_close({**ours.state[a], "of": a}, {**other.state[b], "of": b}, rtol=1e-6, atol=1e-6)
