"""``Precision``: the dtype of forward and backward, loss scaling, and the optimizer's step.

Follows Micikevicius et al. 2018 (arXiv 1710.03740) and Jia et al. 2018 (arXiv 1807.11205).
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .convert import convert
from .forms import PRECISIONS, precision_name
from .loss_scale import GradientOverflowError, LossScaler, non_finite

_MOST_NAMES = 3


class Precision:
    """Mixed precision for any training loop.

    Args:
        name: one of ``PRECISIONS`` or of apex's O0 to O3:

            - ``"fp32"`` (O0);
            - ``"bf16"``, ``"fp16"`` (O1): FP32 parameters, forward under autocast;
            - ``"bf16-master"``, ``"fp16-master"`` (O2): parameters and gradients in half
              precision, so that an all-reduce moves half the bytes; norm layers in FP32, and FP32
              masters in the optimizer;
            - ``"fp16-pure"`` (O3): like ``"fp16-master"`` without masters.
        device_type: ``"cuda"`` or ``"cpu"``.
        loss_scale: ``"dynamic"``, ``"none"``, a number for a static scale, or ``"auto"``: dynamic
            where gradients are computed in FP16, else none (BF16 has the range of FP32).
        max_skipped_steps: number of consecutive steps skipped because of overflow that stops
            training.

    Attributes:
        name: the name in ``PRECISIONS``, also if an apex level was given.
        form: the dtypes that the precision computes and stores.

    Raises:
        ValueError: the name, the loss scale or the number of skipped steps is invalid.

    Example::

        precision = Precision("fp16-master", "cuda")
        model = precision.convert(model)  # before DDP and torch.compile
        optimizer = LARS(model.parameters(), lr, master_weights=True)  # or MasterWeights(SGD(...))
        for images, labels in loader:
            with precision.forward():
                loss = criterion(model(images), labels)
            precision.backward(loss)
            precision.step(optimizer)
            optimizer.zero_grad()
    """

    def __init__(
        self,
        name: str = "fp32",
        device_type: str = "cpu",
        *,
        loss_scale: str | float = "auto",
        max_skipped_steps: int = 20,
    ) -> None:
        self.name = precision_name(name)
        self.form = PRECISIONS[self.name]
        self.device_type = device_type
        if loss_scale == "auto":
            loss_scale = "dynamic" if self.form.compute == torch.float16 else "none"
        self._scaler = LossScaler(loss_scale, device_type, max_skipped_steps)
        self._model: weakref.ref[nn.Module] | None = None
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def convert(self, model: nn.Module) -> nn.Module:
        """Cast ``model`` in place to the dtypes of this precision, and return it.

        Call this before wrapping the model in DDP and before torch.compile. With ``*-master`` and
        ``fp16-pure`` the model then takes inputs of any floating dtype and returns FP32; with the
        other precisions it does not change.

        Raises:
            ValueError: the model has already been converted.
        """
        self._model = weakref.ref(model)
        return convert(model, self.form.parameters) if self.form.casts_parameters else model

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context in which to compute the forward pass and the loss."""
        if self.form.casts_parameters or self.form.compute == torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, self.form.compute)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of ``loss`` (0-d), multiplied by the loss scale, if any."""
        self._scaler.scale(loss).backward()

    def step(self, optimizer: Optimizer) -> None:
        """Unscale and step; a step whose gradients overflowed changes only the loss scale.

        Raises:
            GradientOverflowError: gradients overflowed in ``max_skipped_steps`` steps in a row.
                The message names the parameters where the overflow begins.
            ValueError: the precision needs master weights and the optimizer has none, or the model
                has not been converted.
        """
        if optimizer not in self._checked:
            self._check(optimizer)
            self._checked.add(optimizer)
        try:
            self._scaler.step(optimizer)
        except GradientOverflowError as error:
            raise GradientOverflowError(f"{error}; {self._where(optimizer)}") from None

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, so that steps can be skipped."""
        return self._scaler.enabled

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 without scaling. Reading it waits for the device."""
        return self._scaler.value

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped so far. Reading it waits for the device."""
        return self._scaler.skipped_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and its history; empty without scaling."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; ignored unless both precisions scale the loss."""
        self._scaler.load_state_dict(state)

    def _check(self, optimizer: Optimizer) -> None:
        half = any(
            parameter.dtype in (torch.float16, torch.bfloat16)
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        if half and self.form.masters and not getattr(optimizer, "master_weights", False):
            name = type(optimizer).__name__
            raise ValueError(
                f"{self.name} needs FP32 master weights, and {name} keeps none; valid: "
                f"LARS(..., master_weights=True) or MasterWeights({name}(...))"
            )
        if self.form.casts_parameters and not half:
            raise ValueError(
                f"{self.name} needs half-precision parameters, and the optimizer has none; "
                "call precision.convert(model)"
            )

    def _where(self, optimizer: Optimizer) -> str:
        """Name the first parameters with a non-finite gradient, in the order of backward."""
        model = self._model() if self._model is not None else None
        if model is not None:
            named = list(model.named_parameters())
        else:
            named = [
                (names[j] if names else f"group{i}.{j}", parameter)
                for i, group in enumerate(optimizer.param_groups)
                for names in [group.get("param_names")]
                for j, parameter in enumerate(group["params"])
            ]
        names = non_finite(named)[::-1]
        more = len(names) - _MOST_NAMES
        tail = f" and {more} more" if more > 0 else ""
        return f"affected, from the loss backwards: {', '.join(names[:_MOST_NAMES])}{tail}"
