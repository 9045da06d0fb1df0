"""The formulas of the cost against the operators that run."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from largebatch.lars import NS_COEFFICIENTS, newton_schulz
from largebatch.lars.muon.cost import matrices_of, newton_schulz_flops, run_flops

CASES = st.fixed_dictionaries(
    {
        "rows": st.integers(2, 40),
        "columns": st.integers(2, 40),
        "matrices": st.integers(1, 3),
        "coefficients": st.sampled_from(sorted(NS_COEFFICIENTS)),
        "steps": st.integers(1, 8),
        "dtype": st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    }
)


@settings(deadline=None, max_examples=40)
@given(case=CASES)
def test_flops_are_those_that_torch_counts(case):
    x = torch.ones(case["matrices"], case["rows"], case["columns"], device="meta")
    options = {key: case[key] for key in ("coefficients", "steps", "dtype")}
    with FlopCounterMode(display=False) as counter:
        newton_schulz(x, **options)
    assert newton_schulz_flops(**case) == counter.get_total_flops()


def test_a_run_of_five_steps_by_hand():
    """Jordan: 5 (4 m^2 n + 2 m^3); on Gram matrices two long products and 17 square ones."""
    assert 5 * run_flops(64, 256, 1) == 5 * (4 * 64**2 * 256 + 2 * 64**3)
    assert run_flops(64, 256, 5) == 2 * 2 * 64**2 * 256 + 17 * 2 * 64**3


def test_the_matrices_of_a_convolution():
    assert matrices_of((8, 4, 3, 5)) == (1, 8, 60)
    assert matrices_of((8, 4, 3, 5), "batched") == (15, 8, 4)
    assert matrices_of((8, 4), "batched") == (1, 8, 4)
    for mode in ("flatten", "batched"):
        assert math.prod(matrices_of((8, 4, 3, 5), mode)) == 8 * 4 * 3 * 5
