"""Tensor fusion: which gradients are reduced together (Jia et al. 2018).

Every all-reduce pays a latency for each of its messages, and a hundred fused gradients pay it only
once; but a fused tensor has to wait for the last of its gradients. The paper fuses small tensors
and found two segments in total to be best for ImageNet on 1024 GPUs: ResNet-50 cut between layers
76 and 77, AlexNet between layers 20 and 21.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def segments_between(sizes_bytes: Sequence[int], cuts: Sequence[int]) -> tuple[int, ...]:
    """Return segment sizes for a plan that cuts a model between given layers.

    Args:
        sizes_bytes: gradient bytes of each layer, in forward order.
        cuts: ascending layer counts after which to cut: ``[76]`` cuts between layers 76 and 77.

    Returns:
        Bytes of each segment in backward order: the segment of the last layers comes first.

    Raises:
        ValueError: the cuts do not ascend or lie outside the model.

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
    """Return segment sizes for a plan by the paper's rule: pool small gradients, leave large alone.

    Gradients smaller than the threshold are pooled until the pool reaches it, or a larger gradient
    follows: DDP's buckets hold consecutive gradients. Each gradient at or above the threshold is a
    segment of its own.

    Args:
        sizes_bytes: gradient sizes in the order in which backward produces them, roughly from the
            last layer to the first.
        threshold_bytes: positive number of bytes.

    Raises:
        ValueError: ``threshold_bytes`` is not positive.
    """
    if threshold_bytes < 1:
        raise ValueError(f"threshold_bytes must be above 0, not {threshold_bytes}")
    segments, pooled = list[int](), 0
    for size in sizes_bytes:
        if size < threshold_bytes:
            pooled += size
        if pooled and (pooled >= threshold_bytes or size >= threshold_bytes):
            segments.append(pooled)
            pooled = 0
        if size >= threshold_bytes:
            segments.append(size)
    return (*segments, pooled) if pooled else tuple(segments)
