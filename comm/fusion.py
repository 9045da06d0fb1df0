"""Tensor fusion: which gradients are reduced together (Jia et al. 2018).

Every all-reduce pays a latency for each of its messages, and a hundred fused gradients pay it only
once; but a fused tensor has to wait for the last of its gradients.
"""

from collections.abc import Sequence


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
