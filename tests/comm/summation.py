"""Average gradients of thousands of ranks in one process, adding in the order of the algorithms.

The result has the bits that :func:`largebatch.comm.average` gives on gloo: tests/comm compares them
on ranks. On NCCL the order of a ring is the same up to where it begins, but trees and in-network
sums have orders of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from largebatch.comm import WIRE_DTYPES, Rule
from largebatch.comm.averaging import Averaging


def emulated_average(
    gradients: Tensor, rule: Rule, ranks_per_node: int, before: float | None = None
) -> Tensor:
    """Return the average that all ranks get of gradients, shape (ranks, elements) in node order.

    The rule has no ``chunk_bytes`` and ``shape``. ``before`` is what to divide by before the sum,
    in place of what the product divides by.
    """
    dtype, ranks = gradients.dtype, len(gradients)
    wire = dtype if rule.wire_dtype is None else WIRE_DTYPES[rule.wire_dtype]
    if rule.sum_dtype is not None:
        means = _means_in_fp32(gradients.to(wire).unflatten(0, (-1, ranks_per_node)))
        return _means_in_fp32(means.unsqueeze(0))[0].to(dtype)
    averaging = Averaging.of(dtype, ranks, rule)
    if before is not None:
        averaging = Averaging(before, ranks / before)
    sent = averaging.begin(gradients.clone()).to(wire)
    return averaging.end(ORDERS[rule.algorithm](sent, ranks_per_node).to(dtype))


def _means_in_fp32(values: Tensor) -> Tensor:
    """Average groups, shape (groups, terms, elements), in FP32, and round once."""
    return values.mean(1, dtype=torch.float32).to(values.dtype)


def ring(values: Tensor, ranks_per_node: int = 1) -> Tensor:
    """Add (terms, elements) as gloo's ring: the k-th part begins at rank k - 1 and goes down."""
    ranks, elements = values.shape
    parts = torch.arange(ranks)
    table = F.pad(values, (0, -elements % ranks)).unflatten(1, (ranks, -1))
    total = table[(parts - 1) % ranks, parts]
    for step in range(2, ranks + 1):
        total += table[(parts - step) % ranks, parts]
    return total.flatten()[:elements]


def hierarchical(values: Tensor, ranks_per_node: int) -> Tensor:
    """Add in FP32 in each node, round, and add each local rank's share in a ring across nodes."""
    nodes = values.unflatten(0, (-1, ranks_per_node)).sum(1, dtype=torch.float32).to(values.dtype)
    elements = nodes.shape[1]
    shares = F.pad(nodes, (0, -elements % ranks_per_node)).chunk(ranks_per_node, 1)
    return torch.cat([ring(share) for share in shares])[:elements]


#: The order of summation of an algorithm: (ranks, elements) and ranks per node -> (elements,).
ORDERS: dict[str, Callable[[Tensor, int], Tensor]] = {"ring": ring, "hierarchical": hierarchical}
