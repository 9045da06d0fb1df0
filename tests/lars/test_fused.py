"""The CPU's fused step against the reference, called directly with every option."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lars.allocations import peak_bytes
from largebatch.lars import fused, reference
from largebatch.lars.reference import DIALECTS, Hyper
from tests.lars.problems import LAYOUTS, OPTIONS, laid_out

hypers = st.builds(
    lambda options, **more: Hyper(**options, **more),
    OPTIONS,
    lr=st.sampled_from([0.0, 1e-7, 0.3, 3.0]),
    adapt=st.booleans(),
    previous_lr=st.sampled_from([0.0, 0.2]),
)

# Small tensors of equal shape are stacked; the last one is large.
SHAPES = [(), (0, 3), (1,), (9, 4), (2, 3, 3, 2), (50_000,), *[(2, 3, 3, 2)] * 9, (9, 4)]


def draw(layout, dtype, generator):
    """Tensors of :data:`SHAPES`; one has zero elements in memory, another has only zeros."""
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    tensors[2].zero_()
    return [laid_out(t.to(dtype), layout) for t in tensors]


# Sizes at which the tensors of a test are cut into blocks or stacked. A stack is never cut.
sizes = st.sampled_from(
    [
        {"_BLOCK": fused._BLOCK},
        {"_BLOCK": 13, "_SMALL": 1, "_STACK": 4, "_ROW": 8},
        {"_BLOCK": 4096, "_SMALL": 50, "_STACK": 100, "_ROW": 8},
    ]
)
layouts = st.sampled_from(LAYOUTS)


@settings(deadline=None, max_examples=30)
@given(
    dialect=st.sampled_from(sorted(DIALECTS)),
    hyper=hypers,
    memory=st.tuples(layouts, layouts, layouts),
    scale=st.sampled_from([None, 1.0, 2.0**16, 2.0**40]),
    overflow=st.sampled_from([None, 0.0, 1.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    half=st.sampled_from([None, torch.float16, torch.bfloat16]),
    zero_gradient=st.booleans(),
    seed=st.integers(0, 100),
    sizes=sizes,
)
def test_one_step_matches_the_reference(
    dialect, hyper, memory, scale, overflow, dtype, half, zero_gradient, seed, sizes
):
    """With a loss scale, an overflow, halves, and weights, gradients and buffers each in a memory
    layout of their own, whatever the sizes of blocks and stacks.

    In half precision without masters, arithmetic is in FP32 and its results are rounded.
    """
    if dtype != torch.float64:  # else the reference and the fused step differ by rounding alone
        scale = None if scale is None else min(scale, 2.0)

    def problem():
        generator = torch.Generator().manual_seed(seed)
        weights, gradients, buffers = (draw(m, dtype, generator) for m in memory)
        gradients[3 if zero_gradient else 2].zero_()
        torch._foreach_mul_(gradients, scale or 1.0)
        return weights, gradients, buffers, [] if half is None else [w.to(half) for w in weights]

    def step(update):
        before, after = problem(), problem()
        weights, gradients, buffers, halves = after
        ratios = update(
            dialect,
            weights,
            gradients,
            buffers if hyper.momentum > 0 else [],
            hyper,
            None if scale is None else torch.tensor(1 / scale),
            None if overflow is None else torch.tensor(overflow),
            halves,
        )
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if number == 1 or overflow:  # gradients are never modified
                assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
        return [] if overflow else [*weights, *buffers, *halves, ratios]

    with mock.patch.multiple(fused, **sizes):
        results = step(fused.update)
    exact = {"rtol": 1e-10, "atol": 1e-13}
    for ours, theirs in zip(results, step(reference.update), strict=True):
        torch.testing.assert_close(ours, theirs, **(exact if ours.dtype == torch.float64 else {}))


def test_ratios_of_large_tensors_are_exact_to_1e_6():
    """Summed in FP32 alone, the squares of 40 million elements are off by 1e-3, equal ones more."""
    part = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    weights = [(0.05 * part).repeat(40)]
    gradients = [torch.full_like(weights[0], 1e-3)]
    hyper = Hyper(0.0, 0.0, 0.0, 1.0, 0.0, False, False, True)
    ratio = fused.update("torch", weights, gradients, [], hyper).item()
    exact = weights[0][: 2**20].double().norm() / gradients[0][: 2**20].double().norm()
    assert ratio == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dialect", ["torch", "simclr-popular"])
@pytest.mark.parametrize("precision", ["fp32", "fp16-masters", "fp16"])
def test_a_step_allocates_at_most_a_block_of_each_kind(precision, dialect, nesterov):
    """FP32 needs nothing with a loss scale either, where the kernel can do the step."""
    block, numel = 2**12, 2**18
    stored = torch.float16 if precision == "fp16" else torch.float32
    weights, buffers = torch.ones(numel, dtype=stored), torch.ones(numel, dtype=stored)
    gradients = torch.ones(numel, dtype=torch.float32 if precision == "fp32" else torch.float16)
    halves = [weights.half()] if precision == "fp16-masters" else []
    hyper = Hyper(0.1, 0.9, 0.1, 1.0, 0.0, nesterov, False, True)

    def step():
        arguments = [weights], [gradients], [buffers], hyper, torch.tensor(0.5), None, halves
        fused.update(dialect, *arguments)

    with mock.patch.object(fused, "_BLOCK", block):
        peak = peak_bytes(step)
    kinds = {"fp32": 0, "fp16-masters": 1, "fp16": 3}[precision]
    kinds += nesterov or dialect == "simclr-popular"  # g + l w
    assert peak <= 4 * block * kinds + 2048
