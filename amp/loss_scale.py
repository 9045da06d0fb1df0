"""Loss scaling: dynamic, static or none, with a bound on consecutive skipped steps.

Gradients too small for FP16 are lost unless the loss, and with it every gradient, is multiplied by
a scale that is divided out before the update (Micikevicius et al. 2018, section 3.2). The scaling
itself is torch.amp.GradScaler; this file adds static scales, clipping where gradients stay scaled,
several optimizers, and a dynamic scale that damaged images do not drain. The bound is in
:mod:`~largebatch.amp.skips`.

All that the device changes is in tensors that keep their addresses (the scale, its history, the
counts), and what the host notes is complete at the end of a step. So a CUDA graph that was captured
from the first backward pass of an iteration to its step does the same in each replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .gradients import clip_factor, gradients_of, moved, multiply_, parameters_of, total_norm
from .names import LOSS_SCALES
from .skips import SkippedSteps, refuse_capture

#: The scale that dynamic scaling starts from: torch.amp.GradScaler's default.
INITIAL_LOSS_SCALE = 65536.0

_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class GradientOverflowError(RuntimeError):
    """Raised when too many steps in a row were skipped because of non-finite gradients."""


@dataclass
class _Work:
    """What has been done to the gradients of an optimizer since its last step."""

    passes: int  # backward passes before it was done; another one makes it invalid
    unscaled: bool = False
    clipped_by: Tensor | None = None  # factor, 0-d, by which gradients were clipped in place
    factor: Tensor | None = None  # factor, 0-d, by which the optimizer will clip them in its step


class LossScaler:
    """Scale the loss, and skip steps whose gradients are not finite; arguments as Precision's."""

    def __init__(
        self,
        loss_scale: str | float,
        device_type: str,
        max_skipped_steps: int,
        min_loss_scale: float = 1.0,
    ) -> None:
        if isinstance(loss_scale, str) and loss_scale not in LOSS_SCALES[1:]:
            raise ValueError(
                f"loss_scale {loss_scale!r} is not one of {', '.join(LOSS_SCALES)} or a positive "
                "number"
            )
        for name, value in (("loss_scale", loss_scale), ("min_loss_scale", min_loss_scale)):
            if not isinstance(value, str) and not _LEAST <= value <= _MOST:
                raise ValueError(
                    f"{name} must be positive and finite, not {value!r}; valid: {_LEAST:.2g} to "
                    f"{_MOST:.2g}, the range of FP32"
                )
        if max_skipped_steps < 1:
            raise ValueError(f"max_skipped_steps must be at least 1, not {max_skipped_steps}")
        self.enabled = loss_scale != "none"
        self._static = None if isinstance(loss_scale, str) else float(loss_scale)
        self._least = min_loss_scale
        scale = self._static or max(INITIAL_LOSS_SCALE, min_loss_scale)
        self._scaler = GradScaler(device_type, init_scale=scale, enabled=self.enabled)
        self.skipped_steps = SkippedSteps(max_skipped_steps)
        self._passes = self._passes_at_step = 0  # backward passes so far, and before the last step
        self._work: dict[Optimizer, _Work] = {}

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale."""
        if self.enabled and self._scaler._get_scale_async() is None:
            refuse_capture(loss.device)
        self._passes += 1
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, in place."""
        if not self.enabled:
            return
        self._check_backward("unscale_")
        work, gradients = self._work_on(optimizer), gradients_of(optimizer)
        name = type(optimizer).__name__
        if work.unscaled:
            raise RuntimeError(
                f"the gradients of {name} are unscaled already; valid: unscale_ once, after the "
                "last backward pass and before step"
            )
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError(
                f"the gradients of {name} are in FP16, which cannot hold them unscaled; valid: "
                "precision.clip_grad_norm_(optimizer, max_norm), or a copy: "
                "p.grad.float() / precision.loss_scale_on_device"
            )
        if gradients:
            self._scaler.unscale_(optimizer)
        work.unscaled = True

    def clip_(self, optimizer: Optimizer, max_norm: float, norm_type: float) -> Tensor:
        """Clip an optimizer's unscaled gradients to a total norm, and return the norm before."""
        # Optimizers that unscale gradients themselves get a factor in their step instead.
        if self.enabled:
            self._check_backward("clip_grad_norm_")
        work = self._work_on(optimizer, anew=not self.enabled)
        divides = divides_gradients(optimizer)
        if self.enabled and not divides and not work.unscaled:
            self.unscale_(optimizer)
        gradients = gradients_of(optimizer)
        if not gradients:
            return torch.zeros((), device=parameters_of(optimizer)[0].device)
        norm = total_norm(gradients, norm_type)
        if not divides:
            if max_norm == math.inf:
                return norm
            factor = clip_factor(norm, max_norm)
            multiply_(gradients, factor)
            work.clipped_by = factor if work.clipped_by is None else work.clipped_by * factor
            return norm
        if self.enabled and not work.unscaled:
            scale = self._scaler._get_scale_async()
            assert scale is not None  # there has been a backward pass
            norm = norm / moved(scale, norm.device)
        if work.factor is not None:
            norm = norm * work.factor
        if max_norm == math.inf:
            return norm
        factor = clip_factor(norm, max_norm)
        work.factor = factor if work.factor is None else work.factor * factor
        return norm

    def step(self, optimizers: Sequence[Optimizer]) -> dict[Optimizer, Tensor]:
        """Step each optimizer and update the scale once; return which were skipped, 0-d bools."""
        if self.enabled and any(gradients_of(optimizer) for optimizer in optimizers):
            self._check_backward("step")
        works = {optimizer: self._work_on(optimizer) for optimizer in optimizers}
        skipped = {}
        for optimizer, work in works.items():
            if work.factor is not None:
                divisor = work.factor.reciprocal()
                if self.enabled:  # GradScaler multiplies it by the loss scale
                    scale = self._scaler._get_scale_async()
                    assert scale is not None  # there has been a backward pass
                    divisor = moved(divisor, scale.device)
                optimizer.grad_scale = divisor  # type: ignore[attr-defined]
            scales = self.enabled and bool(gradients_of(optimizer))
            try:
                if scales:
                    self._scaler.step(optimizer)
                else:
                    optimizer.step()
            finally:  # GradScaler leaves these behind if the step fails
                for name in ("grad_scale", "found_inf"):
                    optimizer.__dict__.pop(name, None)
                del self._work[optimizer]
            if scales:
                found = list(self._scaler._found_inf_per_device(optimizer).values())
                skipped[optimizer] = any_of([f.reshape(()) > 0 for f in found])
        if skipped:
            overflow = any_of(list(skipped.values()))
            in_a_row = self.skipped_steps.in_a_row(overflow.device)
            self._scaler.update(
                self._static or _next_scale(self._scaler, overflow, in_a_row, self._least)
            )
            self._passes_at_step = self._passes
        return skipped

    def before_replay(self) -> None:
        """Note that a CUDA graph is about to replay a backward pass."""
        self._passes += 1

    def _check_backward(self, call: str) -> None:
        if self._passes == self._passes_at_step:
            raise RuntimeError(
                f"{call}: no precision.backward since the last precision.step, which may have "
                "changed the loss scale; valid: precision.backward(loss) first, and one "
                "precision.step(a, b) for all optimizers of an iteration"
            )

    def _work_on(self, optimizer: Optimizer, *, anew: bool = False) -> _Work:
        """Return what has been done to an optimizer's gradients since the last backward pass."""
        # With ``anew``, what was done before a backward pass counts for a step that was left out.
        work = self._work.get(optimizer)
        done = work is not None and (work.unscaled or work.factor is not None)
        if work is None or (work.passes != self._passes and (anew or not done)):
            work = self._work[optimizer] = _Work(self._passes)
        elif work.passes != self._passes:
            raise RuntimeError(
                "a backward pass has followed since the gradients of "
                f"{type(optimizer).__name__} were unscaled or clipped; valid: unscale and clip "
                "after the last backward pass, and then precision.step, which skips an overflow "
                "itself, or precision.abandon()"
            )
        return work

    @property
    def value(self) -> float:
        """The current scale; 1 without scaling. Reading it waits for the device."""
        return float(self._scaler.get_scale())

    @property
    def on_device(self) -> Tensor | float:
        """The current scale as a tensor, 0-d, FP32; a number without or before any scaling."""
        scale = self._scaler._get_scale_async() if self.enabled else None
        return self._scaler.get_scale() if scale is None else scale

    def gradient_scale_in_step(self, optimizer: Optimizer) -> float:
        """Return loss scale times clip factor of the gradients, in a hook of the step; waits."""
        work = self._work[optimizer]
        # GradScaler has unscaled the gradients of optimizers that do not divide.
        scale = 1.0 if work.unscaled or not divides_gradients(optimizer) else self.value
        return scale if work.clipped_by is None else scale * float(work.clipped_by)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, its history and the counts; empty without scaling."""
        if not self.enabled:
            return {}
        return {**self._scaler.state_dict(), "skipped_steps": self.skipped_steps.state()}

    def abandon(self) -> None:
        """Forget an iteration that has begun: backward passes, unscaling and clipping."""
        self._work.clear()
        self._passes_at_step = self._passes
        if self.enabled:
            self._scaler._per_optimizer_states.clear()  # torch has no public call for this

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, and abandon an iteration that has begun."""
        self.abandon()
        if not self.enabled or not state:
            return
        own = dict(state)
        in_a_row, in_all = own.pop("skipped_steps", (0, 0))
        own["scale"] = max(own["scale"], self._least)  # at 0 the next step would make NaNs
        if self._static is None:
            self._scaler.load_state_dict(own)  # in place, once the scale is on the device
        self.skipped_steps.load(in_a_row, in_all)


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """Return whether any of some flags (0-d, bool) is true, on the first one's device."""
    if len(flags) == 1:
        return flags[0]
    device = flags[0].device
    return torch.stack([moved(flag, device) for flag in flags]).any()


def divides_gradients(optimizer: Optimizer) -> bool:
    """Whether an optimizer divides gradients by its ``grad_scale``, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@torch.no_grad()
def _next_scale(scaler: GradScaler, overflow: Tensor, in_a_row: Tensor, least: float) -> Tensor:
    """Return the scale after a step before which ``in_a_row`` were skipped, and count the step."""
    # As torch's, it is halved at an overflow and doubled after 2,000 good steps. But a damaged
    # image overflows at any scale, and one per epoch would halve it each epoch until gradients
    # vanish. So where such an overflow has halved the scale, the next one after a good step doubles
    # it again. A scale that is too high overflows again in the next step, and falls as with torch.
    #
    # The tracker is the number n of good steps since the scale last grew, or ~n (negative) while
    # an overflow after a good step has it halved.
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
