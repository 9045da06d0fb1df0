"""Newton-Schulz iterations: the orthogonal factor of many matrices by matrix products alone.

For X = U S V^T the iteration X <- a X + b (X X^T) X + c (X X^T)^2 X maps every singular value s to
p(s) = a s + b s^3 + c s^5 and keeps U and V. A few steps from X / ||X|| bring the singular values
close to one, so that the result is close to U V^T, the orthogonal matrix nearest to X (Jordan 2024,
https://kellerjordan.github.io/posts/muon/).

With m <= n rows and columns (a tall matrix is transposed), a step on its own takes two products of
2 m^2 n FLOPs and one of 2 m^3. Several steps in a row can instead be taken on the Gram matrix
R = X X^T (m x m), which a step turns into P R P with P = a I + b R + c R^2; the product Q of all P
meets X once, at the end (Gram Newton-Schulz: Zhang, Amsel, Chen, Dao 2026,
https://tridao.me/blog/2026/gram-newton-schulz/). A run of k steps then takes
4 m^2 n + (8 k - 6) m^3 FLOPs in place of k (4 m^2 n + 2 m^3), which is less where 2 n > 3 m.

R has no eigenvalues below zero, but the rounded one has, and later steps enlarge them. ``runs``
bounds them, and begins a new run, with the Gram matrix of the present X, before a step would meet
one below -``TOLERANCE``: with Jordan's coefficients after five steps in FP32, three in FP16 and two
in bfloat16. In half precision, the error then stays about that of steps on X.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]

# By timm's names; the numbers are published.
NS_COEFFICIENTS: dict[str, tuple[Polynomial, ...]] = {
    # Jordan 2024, https://kellerjordan.github.io/posts/muon/: the steepest slope at zero that
    # keeps singular values within about 0.7 to 1.2.
    "original": ((3.4445, -4.7750, 2.0315),),
    # Su 2025, https://leloykun.github.io/ponder/muon-opt-coeffs/: one polynomial for each step.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel, Persson, Musco, Gower 2025, arXiv 2505.16932: the best polynomial of each step for
    # singular values of 1e-3 to 1, scaled by a safety of 1e-2 against rounding.
    "polar_express": (
        (8.237312490495555, -23.157747414558198, 16.680568411445915),
        (4.082441999064835, -2.893047735332586, 0.5252849256975648),
        (3.9263479922546582, -2.8547468034765298, 0.5318022422894988),
        (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
        (2.2970369434552573, -1.63662558125903, 0.4002628455953627),
        (1.8763805351440397, -1.2347896577722228, 0.35891887501668385),
        (1.8564423485617974, -1.2132449880935525, 0.3568003487825883),
        (1.8749994008682747, -1.2499988017229169, 0.3749994008546422),
    ),
}

Runs = tuple[tuple[Polynomial, ...], ...]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]

#: How far below zero rounding may move an eigenvalue of a Gram matrix. With twice as much, errors
#: of "polar_express" in bfloat16 are several times those of steps on X, by measurement.
TOLERANCE = 0.2


def polynomials(coefficients: Coefficients, steps: int) -> list[Polynomial]:
    """Return (a, b, c) of each of ``steps`` steps; the last of ``coefficients`` repeats."""
    if steps < 1:
        raise ValueError(f"steps: {steps}; valid: an integer of at least 1")
    if isinstance(coefficients, str):
        if coefficients not in NS_COEFFICIENTS:
            valid = ", ".join(NS_COEFFICIENTS)
            raise ValueError(f"coefficients: {coefficients!r} is unknown; valid: {valid}")
        rows: list[Sequence[float]] = list(NS_COEFFICIENTS[coefficients])
    elif coefficients and all(isinstance(value, int | float) for value in coefficients):
        rows = [coefficients]  # type: ignore[list-item]
    else:
        rows = list(coefficients)  # type: ignore[arg-type]
    if not rows or any(len(row) != 3 for row in rows):
        raise ValueError(
            f"coefficients: {coefficients!r}; valid: a name, three numbers or a sequence of threes"
        )
    found = [(float(a), float(b), float(c)) for a, b, c in rows[:steps]]
    return found + found[-1:] * (steps - len(found))


@cache
def runs(steps: tuple[Polynomial, ...], rows: int, columns: int, unit: float) -> Runs:
    """Return the steps in runs: a run of one works on X, a longer one on its Gram matrix."""
    if 2 * max(rows, columns) <= 3 * min(rows, columns):
        return tuple((step,) for step in steps)
    found: list[tuple[Polynomial, ...]] = []
    largest = 1.0  # bounds the eigenvalues of X X^T
    error = math.inf  # bounds that of the eigenvalues of the rounded Gram matrix
    for a, b, c in steps:
        if not error <= TOLERANCE:  # written so that NaN, of steps that diverge, fails too
            found.append(())
            error = unit * largest
        found[-1] += ((a, b, c),)
        # Eigenvalues r of R, z of Z = b R + c R^2 and p of P = a I + Z. Rounding changes Z, R P and
        # P R P by ``unit`` of their norms; on what is near zero, P acts as a.
        r = [largest * i / 64 for i in range(65)]
        z = [b * v + c * v * v for v in r]
        p = [a + v for v in z]
        rounding = max(v * abs(y) * (2 * abs(w) + abs(y)) for v, w, y in zip(r, z, p, strict=True))
        error = a * a * error + unit * rounding
        largest = max(v * y * y for v, y in zip(r, p, strict=True))
    return tuple(found)


def newton_schulz(
    matrices: Tensor,
    *,
    coefficients: Coefficients = "original",
    steps: int = 5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return U p(S / ||S||) V^T, near U V^T, for each of the matrices U S V^T.

    Nothing waits for the device, and the call can be captured in a CUDA graph and compiled.

    Args:
        matrices: ``[..., m, n]``, of any floating dtype, strides and scale (in float32, norms from
            1e-38 to 3e38).
        coefficients: a name of :data:`NS_COEFFICIENTS`, numbers (a, b, c), or (a, b, c) for each
            step. Of these, fewer steps take the first, and more steps repeat the last.
        steps: number of steps, at least 1.
        dtype: dtype of the arithmetic; by default bfloat16 on CUDA, and elsewhere float32 or, for
            float64 matrices, float64. FP16 is as fast as bfloat16 and rounds 8 times finer.

    Returns:
        A tensor of the same shape in the dtype of the arithmetic. Zero matrices give zeros; a
        matrix with NaN or infinity gives NaN.

    Raises:
        ValueError: the coefficients are unknown, ``steps`` is below 1, or ``matrices`` has fewer
            than two dimensions.
    """
    if matrices.ndim < 2:
        raise ValueError(f"matrices: shape {tuple(matrices.shape)}; valid: at least two dimensions")
    dtype = dtype or default_dtype(matrices)
    rows, columns = matrices.shape[-2:]
    plan = _plan(coefficients, steps, rows, columns, dtype, matrices.device.type)
    x = _normalized(matrices.detach(), dtype)
    transposed = x.shape[-2] > x.shape[-1]
    if transposed:
        x = x.mT
    x = x[None].flatten(0, -3)
    for run in plan:
        x = _gram_run(x, run) if len(run) > 1 else _step(x, *run[0])
    x = x.view(*matrices.shape[:-2], *x.shape[-2:])
    return x.mT if transposed else x


def default_dtype(matrices: Tensor) -> torch.dtype:
    """Return the default dtype of the arithmetic on some matrices."""
    if matrices.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if matrices.is_cuda else torch.float32


def _plan(
    coefficients: Coefficients,
    steps: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: str,
) -> Runs:
    unit = unit_roundoff(dtype, device)
    return runs(tuple(polynomials(coefficients, steps)), rows, columns, unit)


# As torch.compiler.assume_constant_result does, which would import Triton.
_plan._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unit_roundoff(dtype: torch.dtype, device: str = "cpu") -> float:
    """Return the largest relative error of rounding an operand or a result of a matrix product."""
    if dtype == torch.float32:  # torch.backends may let its products round to less
        backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
        return {"tf32": 2.0**-11, "bf16": 2.0**-8}.get(backend.matmul.fp32_precision, 2.0**-24)
    return torch.finfo(dtype).eps / 2


def _normalized(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each matrix divided by its Frobenius norm, in ``dtype``."""
    if dtype == torch.float64:
        matrices = matrices.double()
    # The square of a float32 or half number neither overflows nor underflows in float64.
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    norm = torch.where(norm == 0, 1.0, norm)
    wide = torch.float64 if matrices.dtype == torch.float64 else torch.float32
    return (matrices / norm.to(wide)).to(dtype)


def _step(x: Tensor, a: float, b: float, c: float) -> Tensor:
    r, z = x.new_empty(2, x.shape[0], x.shape[1], x.shape[1]).unbind()
    torch.bmm(x, x.mT, out=r)
    torch.baddbmm(r, r, r, beta=b, alpha=c, out=z)
    return torch.baddbmm(x, z, x, beta=a)


def _gram_run(x: Tensor, run: Sequence[Polynomial]) -> Tensor:
    # Buffers that are reused for all products stay in the cache of a CPU.
    r, z, q, spare = x.new_empty(4, x.shape[0], x.shape[1], x.shape[1]).unbind()
    torch.bmm(x, x.mT, out=r)
    for index, (a, b, c) in enumerate(run):
        torch.baddbmm(r, r, r, beta=b, alpha=c, out=z)
        if index > 0:
            torch.baddbmm(q, z, q, beta=a, out=spare)
            q, spare = spare, q
        if index < len(run) - 1:
            torch.baddbmm(r, z, r, beta=a, out=spare)
            torch.baddbmm(spare, z, spare, beta=a, out=r)
        if index == 0:  # the first product Q is P
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            q, z = z, q
    return torch.bmm(q, x)
