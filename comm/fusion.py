"""Tensor fusion: which gradients are summed together (Jia et al. 2018).

Every all-reduce pays a latency for each of its messages; one of a hundred gradients pays it once.
But a fused tensor waits for the last of its gradients. The paper fuses what is small, and found
that for ImageNet two tensors in all did best on 1024 GPUs: ResNet-50 cut between its layers 76
and 77, AlexNet between 20 and 21.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def fuse(
    sizes_bytes: Sequence[int], threshold_bytes: int, *, contiguous: bool = False
) -> list[list[int]]:
    """The paper's rule: pool tensors below a threshold, and leave the others alone.

    Tensors smaller than the threshold go into a pool; when the pool has reached the threshold, it
    is a segment. Tensors at or above it are segments of their own, without a copy.

    Args:
        sizes_bytes: of the gradients, in the order in which backward produces them, which is
            about that of the layers from last to first.
        threshold_bytes: above 0.
        contiguous: end the pool where a large tensor comes, so that segments hold gradients that
            follow one another, as DDP's buckets must; by default it goes on behind.

    Returns:
        Indices into ``sizes_bytes`` by segment, in the order in which segments are complete.
    """
    if threshold_bytes < 1:
        raise ValueError(f"threshold_bytes must be above 0, not {threshold_bytes}")
    segments: list[list[int]] = []
    pool: list[int] = []
    pooled = 0
    for index, size in enumerate(sizes_bytes):
        if size < threshold_bytes:
            pool.append(index)
            pooled += size
        if pool and (pooled >= threshold_bytes or (contiguous and size >= threshold_bytes)):
            segments.append(pool)
            pool, pooled = [], 0
        if size >= threshold_bytes:
            segments.append([index])
    return [*segments, pool] if pool else segments


def segments_between(sizes_bytes: Sequence[int], cuts: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the segments that come of cutting a model between layers, for a plan.

    Args:
        sizes_bytes: of the gradients of each layer, in forward order.
        cuts: after how many layers each cut is, ascending: ``[76]`` cuts between layers 76 and 77.

    Returns:
        Bytes of each segment in the order of backward, that of the last layers first.

    Example::

        Plan((Rule("leader"),), segments=segments_between(layer_bytes, [76]))
    """
    edges = [0, *cuts, len(sizes_bytes)]
    if any(after <= before for before, after in itertools.pairwise(edges)):
        raise ValueError(
            f"cuts must ascend between 1 and {len(sizes_bytes) - 1} layers, not {list(cuts)}"
        )
    sizes = [sum(sizes_bytes[a:b]) for a, b in itertools.pairwise(edges)]
    return tuple(reversed(sizes))


def fused_bytes(sizes_bytes: Sequence[int], threshold_bytes: int) -> tuple[int, ...]:
    """The sizes of the segments of :func:`fuse` that follow one another, for a plan."""
    groups = fuse(sizes_bytes, threshold_bytes, contiguous=True)
    return tuple(sum(sizes_bytes[i] for i in group) for group in groups)
