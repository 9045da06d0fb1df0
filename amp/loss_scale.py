"""Loss scaling: dynamic, static or none, with a bound on consecutive skipped steps.

Gradients too small for FP16 are lost unless the loss, and with it every gradient, is multiplied by
a scale that is divided out before the update (Micikevicius et al. 2018, section 3.2). The scaling
itself is torch.amp.GradScaler; this file adds static scales, clipping where gradients stay scaled,
and several optimizers. How a dynamic scale changes is in :mod:`~largebatch.amp.growth`, the bound
in :mod:`~largebatch.amp.skips`.

All that the device changes is in tensors that keep their addresses (the scale, its history, the
counts), and what the host notes is complete at the end of a step. So a CUDA graph that was captured
from the first backward pass of an iteration to its step does the same in each replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from . import gradients as gradients_module
from .gradients import (
    FullPrecisionGradients,
    clip_factor,
    gradients_of,
    moved,
    multiply_,
    parameters_of,
    total_norm,
)
from .growth import next_scale
from .skips import SkippedSteps, refuse_capture

#: Valid loss scales other than a number.
LOSS_SCALES = ("auto", "dynamic", "none")

#: The scale that dynamic scaling starts from: torch.amp.GradScaler's default.
INITIAL_LOSS_SCALE = 65536.0


_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class GradientOverflowError(RuntimeError):
    """Raised when too many steps in a row were skipped because of non-finite gradients."""


class _Work:
    """What has been done to the gradients of an optimizer since its last step.

    Attributes:
        unscaled: whether they are divided by the loss scale.
        copies: the FP32 copies that stand in for FP16 gradients.
        clipped_by: what they have been multiplied by in place, 0-d, to clip them.
        factor: what the optimizer multiplies them by in its step, 0-d, to clip them.
    """

    def __init__(self) -> None:
        self.unscaled = False
        self.copies: FullPrecisionGradients | None = None
        self.clipped_by: Tensor | None = None
        self.factor: Tensor | None = None
        self._noted: list[tuple[Tensor, int]] | None = None

    @property
    def begun(self) -> bool:
        """Whether the gradients are unscaled or clipped."""
        return self.unscaled or self.factor is not None

    @property
    def noted(self) -> bool:
        """Whether gradients are noted, so that they must not change."""
        return self._noted is not None

    def note(self, optimizer: Optimizer, *, again: bool = True) -> None:
        """Note the gradients for :meth:`check`; without ``again`` only if they are not noted."""
        if again or self._noted is None:
            self._noted = [(g, g._version) for g in gradients_of(optimizer)]

    def is_stale(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has none of the noted gradients any more."""
        now = {id(gradient) for gradient in gradients_of(optimizer)}
        return self._noted is not None and not any(id(was) in now for was, _ in self._noted)

    def changed(self, optimizer: Optimizer) -> bool:
        """Whether gradients have changed since they were noted; False if they were not."""
        if self._noted is None:
            return False
        now = gradients_of(optimizer)
        return len(now) != len(self._noted) or not all(
            g is was and g._version == version
            for g, (was, version) in zip(now, self._noted, strict=True)
        )

    def check(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if gradients have changed since they were noted."""
        if self.changed(optimizer):
            raise RuntimeError(
                f"the gradients of {type(optimizer).__name__} have changed since they were "
                "unscaled or clipped; valid: unscale and clip after the last backward pass, and "
                "then precision.step, which skips an overflow itself"
            )


class LossScaler:
    """Scale the loss, and skip steps whose gradients are not finite.

    Args:
        loss_scale: ``"dynamic"``, ``"none"`` (nothing is scaled, checked or skipped), or a number
            for a static scale.
        device_type: ``"cuda"`` or ``"cpu"``.
        max_skipped_steps: number of consecutive skipped steps that stops training, at least 1.
        min_loss_scale: the least dynamic scale.

    Raises:
        ValueError: an argument is invalid.
    """

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
        self._has_backward = False  # since the last step
        self._work: WeakKeyDictionary[Optimizer, _Work] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_work": None, "_has_backward": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _work=WeakKeyDictionary())

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale."""
        if self.enabled and self._scaler._get_scale_async() is None:
            refuse_capture(loss.device)
        self._has_backward = True
        for optimizer, work in list(self._work.items()):
            if not self.enabled and work.changed(optimizer):
                # The caller has left out a step, and cleared the gradients in place.
                del self._work[optimizer]
            elif work.begun:  # then this backward pass must not change its gradients
                work.note(optimizer, again=False)
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale in place, FP16 ones as FP32 copies.

        Raises:
            RuntimeError: they are unscaled already, or no backward pass has made them.
            ValueError: they are in FP16, and the optimizer or torch takes no FP32 copies.
        """
        if not self.enabled:
            return
        self._check_backward("unscale_")
        work = self._work_on(optimizer)
        name = type(optimizer).__name__
        if work.unscaled:
            raise RuntimeError(
                f"the gradients of {name} are unscaled already; valid: unscale_ once, after the "
                "last backward pass and before step"
            )
        work.check(optimizer)
        gradients = gradients_of(optimizer)
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            if not hasattr(optimizer, "master_weights"):
                raise ValueError(
                    f"{name} takes no FP32 gradients of FP16 parameters, and FP16 cannot hold "
                    "unscaled gradients; valid: precision.clip_grad_norm_(optimizer, max_norm), "
                    f"or MasterWeights({name}(...))"
                )
            if not gradients_module.ALLOWS_OTHER_DTYPES:
                raise ValueError(
                    f"torch {torch.__version__} allows no FP32 gradients of FP16 parameters, and "
                    "FP16 cannot hold unscaled gradients; valid: "
                    "precision.clip_grad_norm_(optimizer, max_norm)"
                )
            work.copies = FullPrecisionGradients(optimizer)
        if gradients:
            self._scaler.unscale_(optimizer)
        work.unscaled = True
        if work.noted:
            work.note(optimizer)

    def clip_(self, optimizer: Optimizer, max_norm: float, norm_type: float) -> Tensor:
        """Clip an optimizer's unscaled gradients to a total norm, and return the norm before.

        Optimizers that unscale gradients themselves get a factor instead, in their step.

        Raises:
            RuntimeError: no backward pass has made gradients since the last step.
            ValueError: the gradients are in FP16 and the optimizer cannot unscale them.
        """
        if self.enabled:
            self._check_backward("clip_grad_norm_")
        work = self._work_on(optimizer)
        work.check(optimizer)
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
            if work.noted:
                work.note(optimizer)
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
        work.note(optimizer)
        return norm

    def step(self, optimizers: Sequence[Optimizer]) -> dict[Optimizer, Tensor]:
        """Step each optimizer unless its gradients are not finite, and update the scale once.

        Returns:
            Whether each optimizer that has gradients was skipped, 0-d, bool; empty without scaling.

        Raises:
            RuntimeError: there has been no backward pass since the last step, or gradients have
                changed since they were clipped.
        """
        if self.enabled and any(gradients_of(optimizer) for optimizer in optimizers):
            self._check_backward("step")
        for optimizer in optimizers:
            self._work_on(optimizer).check(optimizer)
        skipped = {}
        for optimizer in optimizers:
            work = self._work_on(optimizer)
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
            if work.copies is not None:
                work.copies.restore()
            if scales:
                found = list(self._scaler._found_inf_per_device(optimizer).values())
                skipped[optimizer] = any_of([f.reshape(()) > 0 for f in found])
        if skipped:
            overflow = any_of(list(skipped.values()))
            in_a_row = self.skipped_steps.in_a_row(overflow.device)
            self._scaler.update(
                self._static or next_scale(self._scaler, overflow, in_a_row, self._least)
            )
            self._has_backward = False
        return skipped

    def before_replay(self) -> None:
        """Note that a CUDA graph is about to replay a backward pass."""
        self._has_backward = True

    def _check_backward(self, call: str) -> None:
        if not self._has_backward:
            raise RuntimeError(
                f"{call}: no precision.backward since the last precision.step, which may have "
                "changed the loss scale; valid: precision.backward(loss) first, and one "
                "precision.step(a, b) for all optimizers of an iteration"
            )

    def _work_on(self, optimizer: Optimizer) -> _Work:
        work = self._work.setdefault(optimizer, _Work())
        if not self.enabled and work.is_stale(optimizer):
            # The caller has left out a step. With loss scaling that is refused by check(), because
            # the scale would never follow an overflow.
            work = self._work[optimizer] = _Work()
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
        """Return the factor of loss scale and clipping that an optimizer finds in its gradients.

        It is meant for hooks of the optimizer's step. Reading it waits for the device.
        """
        work = self._work_on(optimizer)
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
        for work in self._work.values():
            if work.copies is not None:
                work.copies.restore()
        self._work.clear()
        self._has_backward = False
        if self.enabled:
            self._scaler._per_optimizer_states.clear()  # torch has no call for it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; a static scale does not change.

        An iteration that has begun is abandoned.
        """
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
    """Whether an optimizer divides gradients by its attribute ``grad_scale``, as GradScaler asks.

    Such are LARS, MasterWeights and the fused optimizers of torch.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
