"""What runs in which dtype: forward and backward, loss scaling, and the optimizer's step.

Autocast and loss scaling follow torch.amp (Micikevicius et al. 2018, arXiv 1710.03740):
parameters, gradients and the update stay in FP32, matrix products and convolutions run in half.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

PRECISIONS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Precision:
    """Mixed precision for any training loop.

    Args:
        name: ``"fp32"``, ``"bf16"`` (autocast) or ``"fp16"`` (autocast with dynamic loss scaling).
        device_type: ``"cuda"`` or ``"cpu"``.

    Raises:
        ValueError: an unknown name.

    Example::

        precision = Precision("bf16", "cuda")
        with precision.forward():
            loss = criterion(model(images), labels)
        precision.backward(loss)
        precision.step(optimizer)
    """

    def __init__(self, name: str = "fp32", device_type: str = "cpu") -> None:
        if name not in PRECISIONS:
            raise ValueError(f"precision {name!r} is not one of {', '.join(PRECISIONS)}")
        self.name = name
        self.dtype = PRECISIONS[name]
        self.device_type = device_type
        # BF16 has the exponent range of FP32, so only FP16 gradients need scaling.
        self.scaler = GradScaler(device_type, enabled=self.dtype == torch.float16)

    def forward(self) -> AbstractContextManager[Any]:
        """The context to run the forward pass and the loss in."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of ``loss`` (0-d), scaled where the precision scales."""
        self.scaler.scale(loss).backward()

    def step(self, optimizer: Optimizer) -> None:
        """Unscale and update; a step whose gradients overflowed changes only the loss scale."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its history; empty where nothing is scaled."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; of another precision, nothing is taken."""
        if state:
            self.scaler.load_state_dict(state)
