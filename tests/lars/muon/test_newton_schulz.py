"""Newton-Schulz iterations against the exact polynomial of the singular values, and against others.

The oracle is U p(S / ||S||) V^T in float64 by SVD. The bounds on the error (largest singular value
of the difference) are at least twice what 5,000 random matrices of 1 to 40 rows and columns, 1 to 6
steps and all named coefficients gave, by the dtype of the arithmetic.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.lars.muon.newton_schulz import (
    NS_COEFFICIENTS,
    newton_schulz,
    polynomials,
    runs,
    unit_roundoff,
)
from tests.host_reads import NoHostReads

# For condition numbers up to 10 and full rank, and for any.
BOUNDS = {
    torch.float64: (1e-12, 1e-9),
    torch.float32: (1e-4, 0.1),
    torch.float16: (0.35, 0.7),
    torch.bfloat16: (0.5, 2.5),
}
dtypes = st.sampled_from(sorted(BOUNDS, key=str))
names = st.sampled_from(sorted(NS_COEFFICIENTS))
seeds = st.integers(0, 10_000)
sides = st.integers(1, 40)


def matrices(m, n, *, batch=(), condition=0.0, rank=None, seed=0):
    """Random matrices in float64 with singular values from 1 down to 10^-condition."""
    generator = torch.Generator().manual_seed(seed)

    def orthogonal(rows):
        gaussian = torch.randn(*batch, rows, k, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(gaussian).Q

    k = min(m, n)
    values = torch.logspace(0, -condition, k, dtype=torch.float64)
    values[rank if rank is not None else k :] = 0
    return (orthogonal(m) * values) @ orthogonal(n).mT


def exact(x, coefficients="original", steps=5):
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for a, b, c in polynomials(coefficients, steps):
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ v


def error(result, expected):
    return torch.linalg.matrix_norm(result.double() - expected, 2).max().item()


@settings(deadline=None, max_examples=80)
@given(
    m=sides,
    n=sides,
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    condition=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, 6.0]),
    share=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    coefficients=names | st.just((2.0, -1.5, 0.5)),
    steps=st.integers(1, 6),
    dtype=dtypes,
    seed=seeds,
)
def test_applies_the_polynomial_to_the_singular_values(
    m, n, batch, condition, share, coefficients, steps, dtype, seed
):
    k = min(m, n)
    rank = max(1, round(share * k))
    x = matrices(m, n, batch=batch, condition=condition, rank=rank, seed=seed)
    result = newton_schulz(x, coefficients=coefficients, steps=steps, dtype=dtype)
    assert result.dtype == dtype
    assert result.shape == x.shape
    well, anything = BOUNDS[dtype]
    bound = well if condition <= 1 and rank == k else anything
    assert error(result, exact(x, coefficients, steps)) < bound


@pytest.mark.parametrize(
    ("name", "dtype", "sides", "lengths"),
    [
        ("original", torch.float64, (1, 2), [5]),
        ("original", torch.float64, (46, 30), [5]),  # on the Gram matrix of long matrices alone
        ("original", torch.float64, (30, 45), [1] * 5),
        ("original", torch.float16, (1, 2), [3, 2]),
        ("original", torch.bfloat16, (1, 2), [2, 2, 1]),
        ("polar_express", torch.float16, (1, 2), [2, 2, 1]),  # as its authors restart, too
        ("polar_express", torch.bfloat16, (1, 2), [1] * 5),
    ],
)
def test_runs_end_where_rounding_would_grow(name, dtype, sides, lengths):
    steps = polynomials(name, 5)
    found = runs(tuple(steps), *sides, unit_roundoff(dtype))
    assert [len(run) for run in found] == lengths
    assert [step for run in found for step in run] == steps


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_products_in_tf32_count_as_half_precision(device):
    assert unit_roundoff(torch.float32, device) == 2.0**-24
    try:
        torch.set_float32_matmul_precision("high")
        assert unit_roundoff(torch.float32, device) == unit_roundoff(torch.float16)
    finally:
        torch.set_float32_matmul_precision("highest")
    matmul = torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"  # the getters of the old setting now raise
        assert unit_roundoff(torch.float32, device) == unit_roundoff(torch.float16)
        newton_schulz(torch.ones(2, 5))
    finally:
        matmul.fp32_precision = before


@settings(deadline=None, max_examples=20)
@given(m=sides, n=sides, exponent=st.integers(-100, 100), seed=seeds)
def test_the_scale_does_not_matter(m, n, exponent, seed):
    """2^-100 to 2^100 is 1e-30 to 1e30, whose squares overflow in FP32."""
    x = matrices(m, n, batch=(2,), condition=1.0, seed=seed).float()
    assert torch.equal(newton_schulz(x * 2.0**exponent), newton_schulz(x))


@settings(deadline=None, max_examples=20)
@given(shape=st.sampled_from([(8, 3), (3, 8), (5, 5)]), dtype=dtypes, seed=seeds)
def test_zeros_give_zeros_and_infinities_give_nan(shape, dtype, seed):
    x = matrices(*shape, batch=(4,), seed=seed)
    x[1] = 0
    x[2, -1, 0] = torch.inf
    x[3, 0, -1] = torch.nan
    result = newton_schulz(x, dtype=dtype)
    # One matrix has nothing to do with the others of its batch.
    assert error(result[0], newton_schulz(x[0], dtype=dtype).double()) < BOUNDS[dtype][0]
    assert not result[1].any()
    assert not result[2:].isfinite().any()


def test_the_dtype_is_that_of_the_arithmetic_and_the_input_is_kept():
    x = torch.randn(4, 9, requires_grad=True)
    before = x.detach().clone()
    assert newton_schulz(x.double()).dtype == torch.float64
    assert newton_schulz(x.half()).dtype == torch.float32
    assert newton_schulz(x.bfloat16(), dtype=torch.float16).dtype == torch.float16
    with NoHostReads():
        result = newton_schulz(x, dtype=torch.float64)
    assert error(result, exact(x.detach())) < 1e-9
    assert torch.equal(x, before)
    assert not result.requires_grad


def test_compiles_without_a_break():
    x = torch.randn(2, 6, 20)
    compiled = torch.compile(newton_schulz, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), newton_schulz(x))


def test_fewer_steps_truncate_and_more_repeat_the_last():
    two = ((3.0, -2.0, 0.5), (2.0, -1.5, 0.5))
    assert polynomials(two, 1) == [two[0]]
    assert polynomials(two, 4) == [*two, two[1], two[1]]
    assert polynomials(two[0], 2) == [two[0]] * 2
    assert polynomials([list(row) for row in two], 2) == [*two]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coefficients": "cubic"}, "cubic.*original, quintic"),
        ({"coefficients": (1.0, 2.0)}, "three"),
        ({"coefficients": ()}, "three"),
        ({"coefficients": ((1.0, 2.0, 3.0), (1.0,))}, "three"),
        ({"steps": 0}, "steps: 0"),
        ({"matrices": torch.ones(3)}, "two dimensions"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz(**{"matrices": torch.ones(2, 3), **arguments})
