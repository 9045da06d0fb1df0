"""Measure which precision is fastest on this machine.

It depends on the processor: BF16 doubles the speed of a CPU with AMX or AVX512-BF16 and slows down
one without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from .precision import Precision


def fastest(
    run: Callable[[Precision], None],
    candidates: Sequence[str] = ("bf16", "fp32"),
    *,
    device_type: str = "cpu",
    repeats: int = 3,
) -> dict[str, float]:
    """Time ``run`` in each precision, interleaved, and return the shortest time of each.

    Args:
        run: does a forward and a backward pass in the precision that it is given. It is called
            once per candidate to warm up, then ``repeats`` times per candidate, interleaved.
        candidates: names for :class:`Precision`.
        device_type: ``"cuda"`` or ``"cpu"``.
        repeats: number of timed calls per candidate, at least 1.

    Returns:
        Shortest time in seconds by name, fastest first.

    Raises:
        ValueError: a candidate is unknown.
    """
    precisions = [Precision(name, device_type) for name in candidates]
    seconds = {name: float("inf") for name in candidates}
    for repeat in range(repeats + 1):
        for precision in precisions:
            start = time.perf_counter()
            run(precision)
            if device_type == "cuda":
                torch.cuda.synchronize()
            if repeat > 0:
                seconds[precision.name] = min(seconds[precision.name], time.perf_counter() - start)
    return dict(sorted(seconds.items(), key=lambda item: item[1]))
