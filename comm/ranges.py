"""Names of all-reduces for torch.profiler, as ranges of the thread that works.

A range holds what a thread does for an all-reduce, such as a sum in memory, and on a GPU the
kernels that it launches. What a back end does on threads of its own, such as ``gloo:all_reduce``,
the profiler shows by itself. While nothing is profiled, a range costs a look at a variable.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function


def ranged(name: str) -> AbstractContextManager[Any]:
    """Context manager that names its body for torch.profiler, if that is active."""
    # As torch's own code: whichever thread has started the profiler.
    return record_function(name) if autograd_profiler._is_profiler_enabled else nullcontext()


def all_reduce_name(bucket: int, size_bytes: int, algorithm: str) -> str:
    """Name the all-reduce of a bucket: ``all-reduce bucket 3, 25.0 MiB, hierarchical``."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"all-reduce bucket {bucket}, {size_bytes / size:.1f} {unit}, {algorithm}"
    return f"all-reduce bucket {bucket}, {size_bytes} bytes, {algorithm}"
