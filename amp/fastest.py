"""Which precision a machine runs fastest: measured, since it depends on the processor.

BF16 doubles the speed of a CPU with AMX or AVX512-BF16 and slows down one without.
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
    """Time ``run`` in each precision, in turn, and return the best seconds of each.

    Args:
        run: does a forward and a backward pass with the precision it is given; it is called
            once per candidate to warm up, then ``repeats`` times per candidate, interleaved.
        candidates: names for :class:`Precision`.
        device_type: ``"cuda"`` or ``"cpu"``.
        repeats: at least 1.

    Returns:
        Name -> least seconds, fastest first.
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
