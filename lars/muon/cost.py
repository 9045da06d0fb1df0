"""What the orthogonalisation of a Muon step costs, in FLOPs, by which ranks share it.

The formulas follow the operators of :mod:`~largebatch.lars.muon.newton_schulz`, and the tests count
these. A multiply-add is two FLOPs, as in ``torch.utils.flop_counter``. Numbers per matrix, such as
norms, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .newton_schulz import Coefficients, polynomials, runs, unit_roundoff


def run_flops(m: int, n: int, steps: int) -> int:
    """Return the FLOPs of a run of steps on an m x n matrix, m <= n.

    One step takes X X^T and (b R + c R^2) X, 2 m^2 n FLOPs each, and R^2 with 2 m^3. In a run of k
    steps, k products make b R + c R^2, 2 (k - 1) make the next R, and k - 1 join the P.
    """
    square = 1 if steps == 1 else 4 * steps - 3
    return 2 * m * m * (2 * n + square * m)


def newton_schulz_flops(
    rows: int,
    columns: int,
    *,
    matrices: int = 1,
    coefficients: Coefficients = "original",
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Return the FLOPs of ``newton_schulz`` for a batch of matrices of one shape.

    Args:
        rows: rows of a matrix.
        columns: columns of a matrix.
        matrices: number of matrices.
        coefficients: as for ``newton_schulz``.
        steps: as for ``newton_schulz``.
        dtype: dtype of the arithmetic.
    """
    m, n = sorted((rows, columns))
    chosen = runs(tuple(polynomials(coefficients, steps)), m, n, unit_roundoff(dtype))
    return matrices * sum(run_flops(m, n, len(run)) for run in chosen)


def matrices_of(shape: Sequence[int], conv_mode: str = "flatten") -> tuple[int, int, int]:
    """Return how many matrices a weight [out, in, ...] is, their rows and their columns.

    ``conv_mode`` is ``flatten`` (one matrix [out, in x positions]) or ``batched`` (a matrix
    [out, in] for each position).
    """
    if conv_mode == "flatten":
        return 1, shape[0], math.prod(shape[1:])
    return math.prod(shape[2:]), shape[0], shape[1]
