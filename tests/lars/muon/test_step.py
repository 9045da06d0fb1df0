"""The fast path of Muon takes the steps of its definition, whatever the dtype, shape and layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.lars import Muon
from largebatch.lars.muon import reference
from largebatch.lars.muon.newton_schulz import newton_schulz
from largebatch.lars.muon.reference import ADJUST_LR_FNS, CONV_MODES, Hyper, polar_factor
from tests.lars.problems import LAYOUTS, laid_out

SHAPES = [(4, 6), (6, 4), (1, 5), (5, 1), (4, 6), (6, 4, 3), (8, 3, 3, 3), (3, 8, 1, 1)]
SHAPES += [(5, 2, 3, 3), (4, 3, 2, 2, 2)]
#: Dtypes of weights, whether they have masters, and the relative rounding of what is stored.
DTYPES = {
    "float64": (torch.float64, False, 1e-11),
    "float32": (torch.float32, False, 1e-4),
    "bfloat16": (torch.bfloat16, False, 2**-7),
    "bfloat16, masters": (torch.bfloat16, True, 1e-4),
    "float16, masters": (torch.float16, True, 1e-4),
}


def tensors(seed, layout="contiguous", dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [laid_out(tensor.to(dtype), layout) for tensor in made]


def in_float64(matrices):
    return newton_schulz(matrices, dtype=torch.float64)


@given(
    adjust_lr_fn=st.sampled_from(ADJUST_LR_FNS),
    conv_mode=st.sampled_from(CONV_MODES),
    nesterov=st.booleans(),
    norm_projection=st.booleans(),
    maximize=st.booleans(),
    of_weights=st.sampled_from(LAYOUTS),
    of_gradients=st.sampled_from(LAYOUTS),
    tensor_lr=st.booleans(),
    rate=st.sampled_from([0.1, 0.1, 0.1, 0.0]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    kind=st.sampled_from(list(DTYPES)),
)
@settings(max_examples=30, deadline=None)
def test_steps_are_those_of_the_definition(
    of_weights, of_gradients, tensor_lr, rate, kind, **options
):
    dtype, masters, rounding = DTYPES[kind]
    hyper = Hyper(lr=rate, momentum=0.7, trust_coefficient=0.3, **options)
    parameters = [torch.nn.Parameter(t) for t in tensors(0, of_weights, dtype)]
    lr = torch.tensor(rate, dtype=torch.float64) if tensor_lr else rate
    ours = Muon(
        parameters,
        lr,
        0.7,
        trust_coefficient=0.3,
        ns_dtype=torch.float64,
        master_weights=masters,
        **options,
    )
    weights = [p.detach().to(torch.float32 if masters else dtype, copy=True) for p in parameters]
    buffers = [torch.zeros_like(weight) for weight in weights]
    for step in range(2):
        gradients = tensors(step + 1, of_gradients, dtype)
        halves = [torch.empty_like(p) for p in parameters] if masters else []
        reference.update(
            weights, gradients, buffers, hyper, halves=halves, orthogonalize=in_float64
        )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        ours.step()
        for i, parameter in enumerate(parameters):
            state = ours.state[parameter]
            close(state["momentum_buffer"], buffers[i], rounding)
            close(state["master"] if masters else parameter.detach(), weights[i], rounding)
            if masters:
                assert torch.equal(parameter, state["master"].to(dtype))
            # Begin the next step alike, so that rounding does not add up.
            buffers[i] = state["momentum_buffer"].clone()
            weights[i] = (state["master"] if masters else parameter.detach()).clone()


def close(ours, theirs, rounding):
    scale = theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=rounding * scale)


def test_the_polar_factor_is_orthogonal_and_leaves_out_zero_directions():
    full = torch.randn(3, 5, 8, dtype=torch.float64)
    factor = polar_factor(full)
    torch.testing.assert_close(
        factor @ factor.mT, torch.eye(5, dtype=torch.float64).expand(3, 5, 5)
    )
    rank_one = torch.outer(torch.arange(1.0, 5), torch.arange(1.0, 7)).double()
    torch.testing.assert_close(polar_factor(rank_one), rank_one / rank_one.norm())
    assert not polar_factor(torch.zeros(2, 3)).any()


def test_by_trust_ratio_a_weight_of_zero_takes_the_step_of_an_orthogonal_one():
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(4, 6, generator=generator).double() for _ in range(2))

    def step(weight, gradient):
        parameter = torch.nn.Parameter(weight.clone())
        parameter.grad = gradient
        options = {"adjust_lr_fn": "trust_ratio", "trust_coefficient": 0.01, "nesterov": False}
        Muon([parameter], 2.0, 0.0, **options).step()
        return parameter.detach()

    orthogonal = in_float64(gradient)  # its norm is that of the direction
    expected = step(orthogonal, gradient) - orthogonal
    torch.testing.assert_close(step(0 * weight, gradient), expected, rtol=0, atol=1e-12)
    assert torch.equal(step(weight, 0 * gradient), weight)


@pytest.mark.parametrize("conv_mode", CONV_MODES)
def test_empty_tensors_are_left_alone(conv_mode):
    parameters = [
        torch.nn.Parameter(torch.zeros(s)) for s in ((0, 4), (4, 0), (4, 0, 3, 3), (2, 3))
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for options in ({}, {"adjust_lr_fn": "trust_ratio", "norm_projection": True}):
        Muon(parameters, 0.1, conv_mode=conv_mode, **options).step()
    assert [p.numel() for p in parameters] == [0, 0, 0, 6]
    assert parameters[-1].detach().isfinite().all()
    assert parameters[-1].detach().any()
