"""Which optimizers' steps can be captured into a CUDA graph.

A capture records what is launched on the device. A step that reads a value on the host cannot be
captured, and what the host computes, it computes once for all replays: a learning rate that is a
number stays what it was.
"""

from __future__ import annotations

from torch.optim import Optimizer

from .loss_scale import divides_gradients
from .masters import MasterWeights


def obstacle(optimizer: Optimizer, *, scales: bool) -> str | None:
    """Return why the step of an optimizer cannot be captured, in one line, or None.

    Args:
        optimizer: the optimizer.
        scales: whether the loss is scaled, so that steps may be skipped.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, MasterWeights):
        if scales:
            return f"{name} reads on the host whether a step overflowed; valid: LARS, or no scaling"
        return obstacle(optimizer._inner, scales=False)
    if scales and not divides_gradients(optimizer):
        return (
            f"torch's GradScaler reads on the host whether a step of {name} overflowed; valid: "
            "LARS, a fused optimizer of torch, or no scaling"
        )
    if type(optimizer).__module__.startswith("torch.optim"):
        groups = optimizer.param_groups
        if "capturable" in groups[0] and not all(group["capturable"] for group in groups):
            return f"{name} counts its steps on the host; valid: {name}(..., capturable=True)"
        if "capturable" not in groups[0] and not all(group.get("fused") for group in groups):
            return f"{name} reads its learning rate on the host; valid: LARS, or a fused optimizer"
    return None
