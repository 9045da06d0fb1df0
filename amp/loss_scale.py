"""Loss scaling: dynamic, static or none, with a bound on consecutive skipped steps.

Gradients too small for FP16 are lost unless the loss, and with it every gradient, is multiplied by
a scale that is divided out before the update (Micikevicius et al. 2018, section 3.2). The scaling
itself is torch.amp.GradScaler; this file adds static scales and the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

#: Valid loss scales other than a number.
LOSS_SCALES = ("auto", "dynamic", "none")

#: The scale that dynamic scaling starts from: torch.amp.GradScaler's default.
INITIAL_LOSS_SCALE = 65536.0


class GradientOverflowError(RuntimeError):
    """Raised when too many steps in a row were skipped because of non-finite gradients."""


class LossScaler:
    """Scale the loss, and skip steps whose gradients are not finite.

    Args:
        loss_scale: ``"dynamic"`` (halved at an overflow, doubled after 2,000 steps without one),
            ``"none"`` (nothing is scaled, checked or skipped), or a number for a static scale.
        device_type: ``"cuda"`` or ``"cpu"``.
        max_skipped_steps: number of consecutive skipped steps that stops training, at least 1.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(self, loss_scale: str | float, device_type: str, max_skipped_steps: int) -> None:
        if isinstance(loss_scale, str):
            if loss_scale not in LOSS_SCALES[1:]:
                raise ValueError(
                    f"loss_scale {loss_scale!r} is not one of {', '.join(LOSS_SCALES)} or a "
                    "positive number"
                )
        elif not (math.isfinite(loss_scale) and loss_scale > 0):
            raise ValueError(f"loss_scale must be positive and finite, not {loss_scale!r}")
        if max_skipped_steps < 1:
            raise ValueError(f"max_skipped_steps must be at least 1, not {max_skipped_steps}")
        self.enabled = loss_scale != "none"
        self._static = None if isinstance(loss_scale, str) else float(loss_scale)
        self._scaler = GradScaler(
            device_type, init_scale=self._static or INITIAL_LOSS_SCALE, enabled=self.enabled
        )
        self._max_skipped_steps = max_skipped_steps
        # Number of steps skipped in a row up to now, and in total. They stay on the device, so
        # that no step waits for them.
        self._counts: Tensor | None = None
        self._steps_to_reading = max_skipped_steps

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale."""
        return self._scaler.scale(loss)

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimizer unless gradients are not finite, and update the scale.

        Raises:
            GradientOverflowError: ``max_skipped_steps`` steps in a row have been skipped. Ranks
                that have the same gradients raise it at the same step.
        """
        if not self.enabled:
            optimizer.step()
            return
        self._scaler.step(optimizer)
        found = list(self._scaler._found_inf_per_device(optimizer).values())
        if self._static is not None:
            self._scaler.update(self._static)
        else:
            self._scaler.update()
        skipped = torch.stack([f.reshape(()).to(found[0].device) for f in found]).sum() > 0
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.int64, device=skipped.device)
        in_a_row, in_all = self._counts.to(skipped.device)
        self._counts = torch.stack([(in_a_row + 1) * skipped, in_all + skipped])
        # Read only when the bound may have been reached: rarely, and at the same step on all ranks.
        self._steps_to_reading -= 1
        if self._steps_to_reading <= 0:
            in_a_row_now = int(self._counts[0])
            if in_a_row_now >= self._max_skipped_steps:
                raise GradientOverflowError(
                    f"{in_a_row_now} steps in a row were skipped: gradients are not finite at "
                    f"loss scale {self.value:g}"
                )
            self._steps_to_reading = self._max_skipped_steps - in_a_row_now

    @property
    def value(self) -> float:
        """The current scale; 1 without scaling. Reading it waits for the device."""
        return float(self._scaler.get_scale())

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped so far. Reading it waits for the device."""
        return 0 if self._counts is None else int(self._counts[1])

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, its history and the counts; empty without scaling."""
        if not self.enabled:
            return {}
        counts = [0, 0] if self._counts is None else self._counts.tolist()
        return {**self._scaler.state_dict(), "skipped_steps": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; a static scale does not change."""
        if not (self.enabled and state):
            return
        own = dict(state)
        in_a_row, in_all = own.pop("skipped_steps", (0, 0))
        if self._static is None:
            self._scaler.load_state_dict(own)
        self._counts = torch.tensor([in_a_row, in_all])
        self._steps_to_reading = max(1, self._max_skipped_steps - in_a_row)


def non_finite(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the parameters whose gradient is not finite, in the given order.

    This waits for the device.
    """
    return [
        name
        for name, parameter in named
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]
