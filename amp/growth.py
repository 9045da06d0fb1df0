"""How a dynamic loss scale falls and grows.

torch.amp.GradScaler halves the scale at each overflow. But a damaged image overflows at any scale:
one per epoch halves the scale each epoch, and within 40 epochs gradients vanish without a message.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp import GradScaler

from .gradients import moved


@torch.no_grad()
def next_scale(scaler: GradScaler, overflow: Tensor, in_a_row: Tensor, least: float) -> Tensor:
    """Return the scale after a step, and count the step in the scaler's growth tracker.

    The scale is halved at an overflow and doubled after 2,000 good steps. But an overflow after a
    good step that comes although an earlier such overflow has halved the scale doubles it again:
    halving has not helped. Overflows of single batches so cost a factor of 2, and good steps are
    counted on across them (torch counts anew, and would never grow). A scale that is too high
    overflows again in the next step, and then falls as with torch.

    The floor is apex.amp's ``min_loss_scale`` and fairseq's ``threshold_loss_scale``. Fairseq's
    ``tolerance`` and DeepSpeed's ``hysteresis`` rather let some overflows pass; where large
    gradients overflow now and then, they go on skipping those batches.

    The host does not wait for the device.

    Args:
        scaler: has the scale and the tracker, which is the number n of good steps since the scale
            last grew, or ``~n`` (negative) while an overflow after a good step has it halved.
        overflow: whether the step was skipped, 0-d.
        in_a_row: the number of steps that were skipped directly before it, 0-d.
        least: the least scale.
    """
    scale, tracker = scaler._check_scale_growth_tracker("update")
    alone = moved(in_a_row == 0, scale.device)
    overflow = moved(overflow, scale.device)
    halved = tracker < 0
    good = torch.where(halved, ~tracker, tracker) + 1  # if this step is good
    grows = torch.where(overflow, alone & halved, good >= scaler.get_growth_interval())
    factor = torch.where(overflow, scaler.get_backoff_factor(), 1.0)
    new = scale * torch.where(grows, scaler.get_growth_factor(), factor)
    after_good = torch.where(grows, 0, torch.where(halved, ~good, good))
    # An overflow of the first step at a scale says that this scale is too high.
    after_overflow = torch.where(alone & (tracker != 0), ~tracker, tracker)
    tracker.copy_(torch.where(overflow, after_overflow, after_good))
    return torch.where(new.isfinite(), new, scale).clamp_(min=least)
