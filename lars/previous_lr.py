"""The learning rate of the last step, which is state of a group in dialect ``mlperf-corrected``.

It is a tensor, because only the device knows whether a step overflowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .memory import moved

#: The dialect that needs it, as the key ``previous_lr`` of a group.
CORRECTED = "mlperf-corrected"


def add_previous_lr(group: dict[str, Any]) -> None:
    """Add the previous learning rate to a group whose dialect needs it, as a tensor."""
    if group["dialect"] != CORRECTED:
        return
    previous = group.get("previous_lr", 0.0)
    if not isinstance(previous, Tensor):
        device = group["params"][0].device if group["params"] else None
        group["previous_lr"] = torch.tensor(previous, dtype=torch.float64, device=device)


def remember_lr(group: dict[str, Any], found_inf: Tensor | None) -> None:
    """Store the current learning rate as the previous one, unless the step was skipped."""
    previous, lr = group["previous_lr"], group["lr"]
    if found_inf is not None:
        overflowed = moved(found_inf, previous.device) > 0
        if isinstance(lr, Tensor):
            lr = lr.to(previous)
        lr = torch.where(overflowed, previous, lr)
    if isinstance(lr, Tensor):
        previous.copy_(lr)  # in place: a CUDA graph reads it at this address
    else:
        previous.fill_(lr)
