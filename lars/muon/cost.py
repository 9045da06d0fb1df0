"""What the orthogonalisation of a Muon step costs, by formulas: FLOPs, bytes moved and memory.

The formulas follow the operators of :mod:`~largebatch.lars.muon.newton_schulz`, and the tests count
these. A multiply-add is two FLOPs, as in ``torch.utils.flop_counter``. Bytes are what the operators
must read and write if each reads every operand once and writes its result once: norm, division,
and the products. Numbers per matrix, such as norms, are left out. m is the smaller side of a matrix
and n the larger one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .newton_schulz import Coefficients, polynomials, runs, unit_roundoff


@dataclass(frozen=True)
class Cost:
    """The cost of orthogonalising some matrices once.

    Attributes:
        plain_flops: FLOPs of the products with each step on the matrix.
        gram_flops: FLOPs with all steps on Gram matrices, as far as the dtype allows.
        flops: FLOPs of the form that ``newton_schulz`` takes, the cheaper one for each matrix.
        bytes_moved: bytes read and written by the form that it takes.
        peak_bytes: the most memory that it holds at once beside its input, its result included.
    """

    plain_flops: int
    gram_flops: int
    flops: int
    bytes_moved: int
    peak_bytes: int


def run_flops(m: int, n: int, steps: int) -> int:
    """Return the FLOPs of a run of steps on an m x n matrix, m <= n.

    One step takes X X^T and (b R + c R^2) X, 2 m^2 n FLOPs each, and R^2 with 2 m^3. In a run of k
    steps, k products make b R + c R^2, 2 (k - 1) make the next R, and k - 1 join the P.
    """
    square = 1 if steps == 1 else 4 * steps - 3
    return 2 * m * m * (2 * n + square * m)


def run_elements(m: int, n: int, steps: int) -> int:
    """Return the elements that the operators of a run of steps read and write.

    A product of an m x m and an m x n matrix reads m^2 + m n and writes m n elements; one that also
    adds an operand reads it in addition unless it is a factor. The first P of a run is b R + c R^2
    with a added to its diagonal.
    """
    if steps == 1:
        return 3 * m * n + 4 * m * m
    return 3 * m * n + (11 * steps - 7) * m * m + 2 * m


def run_peak_elements(m: int, n: int, steps: int) -> int:
    """Return the most elements that a run holds at once, with X and the new X.

    Beside these, a single step holds R and b R + c R^2, a longer run also the product Q and the
    result of the product in progress.
    """
    return 2 * m * n + (2 if steps == 1 else 4) * m * m


#: Bytes that normalisation moves, and that it holds at once, for each float32 element, by the size
#: of the dtype of the arithmetic: the norm reads the element, the division reads and writes it, and
#: a conversion reads and writes it again; before the norm for float64, else after the division.
_NORMALIZATION = {2: (18, 6), 4: (12, 4), 8: (36, 16)}

#: Bytes that the rest of a step moves for each float32 parameter, if it is one kernel as in SGD
#: with momentum: gradient, momentum and weight read, momentum and weight written.
ELEMENTWISE_BYTES = 20


def newton_schulz_cost(
    rows: int,
    columns: int,
    *,
    matrices: int = 1,
    coefficients: Coefficients = "original",
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
) -> Cost:
    """Return the cost of ``newton_schulz`` for a batch of float32 matrices of one shape.

    Args:
        rows: rows of a matrix.
        columns: columns of a matrix.
        matrices: number of matrices.
        coefficients: as for ``newton_schulz``.
        steps: as for ``newton_schulz``.
        dtype: dtype of the arithmetic.
    """
    m, n = sorted((rows, columns))
    wanted, unit = tuple(polynomials(coefficients, steps)), unit_roundoff(dtype)
    chosen = [len(run) for run in runs(wanted, m, n, unit)]
    gram = [len(run) for run in runs(wanted, 1, 2, unit)]  # that of any long matrix
    moved, held = _NORMALIZATION[dtype.itemsize]
    elements = sum(run_elements(m, n, length) for length in chosen)
    peak = max(run_peak_elements(m, n, length) for length in chosen)
    return Cost(
        plain_flops=matrices * steps * run_flops(m, n, 1),
        gram_flops=matrices * sum(run_flops(m, n, length) for length in gram),
        flops=matrices * sum(run_flops(m, n, length) for length in chosen),
        bytes_moved=matrices * (moved * m * n + dtype.itemsize * elements),
        peak_bytes=matrices * max(held * m * n, dtype.itemsize * peak),
    )


def matrices_of(shape: Sequence[int], conv_mode: str = "flatten") -> tuple[int, int, int]:
    """Return how many matrices a weight [out, in, ...] is, their rows and their columns.

    ``conv_mode`` is ``flatten`` (one matrix [out, in x positions]) or ``batched`` (a matrix
    [out, in] for each position).
    """
    if conv_mode == "flatten":
        return 1, shape[0], math.prod(shape[1:])
    return math.prod(shape[2:]), shape[0], shape[1]


def model_cost(
    shapes: Iterable[Sequence[int]],
    *,
    conv_mode: str = "flatten",
    coefficients: Coefficients = "original",
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
) -> Cost:
    """Return the cost of the orthogonalisation of weights [out, in, ...] in a step.

    Matrices of equal shape, transposed or not, are one batch; the batches come one after the other,
    and the memory is that of the largest.
    """
    batches: Counter[tuple[int, int]] = Counter()
    for shape in shapes:
        matrices, rows, columns = matrices_of(shape, conv_mode)
        batches[min(rows, columns), max(rows, columns)] += matrices
    costs = [
        newton_schulz_cost(
            m, n, matrices=count, coefficients=coefficients, steps=steps, dtype=dtype
        )
        for (m, n), count in batches.items()
    ]
    return Cost(
        plain_flops=sum(cost.plain_flops for cost in costs),
        gram_flops=sum(cost.gram_flops for cost in costs),
        flops=sum(cost.flops for cost in costs),
        bytes_moved=sum(cost.bytes_moved for cost in costs),
        peak_bytes=max((cost.peak_bytes for cost in costs), default=0),
    )
