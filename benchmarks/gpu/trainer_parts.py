"""Names of the trainer's own parts in a profiler's trace: LARS, schedule and meters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.profiler import record_function

#: What the names of annotations begin with.
PREFIX = "largebatch: "
LARS, SCHEDULE, METERS = "LARS and loss scale", "schedule", "meters"


def annotate() -> None:
    """Wrap the methods of the trainer's parts, which eager steps call; not for timed steps."""
    from torch.optim.lr_scheduler import LRScheduler

    from largebatch.amp import Precision
    from largebatch.recipes.training.evaluate import Meter

    for owner, method, name in (
        (Precision, "step", LARS),
        (LRScheduler, "step", SCHEDULE),
        (Meter, "add", METERS),
    ):
        setattr(owner, method, _named(getattr(owner, method), name))


def _named(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def named(*arguments: Any, **options: Any) -> Any:
        with record_function(PREFIX + name):
            return call(*arguments, **options)

    return named
