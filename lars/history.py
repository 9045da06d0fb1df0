"""Watching trust ratios over training, at no cost to the step."""

from __future__ import annotations

import torch
from torch import Tensor

from .optimizer import LARS


class TrustRatioHistory:
    """The trust ratios of every step since they were last read.

    Recording keeps a reference to what the step has computed; only reading waits for the device.

    Example::

        history = TrustRatioHistory(optimizer)
        for step, batch in enumerate(batches):
            ...
            optimizer.step()
            history.record()
            if step % 100 == 99:
                for name, ratios in history.read().items():
                    writer.add_histogram(f"trust_ratio/{name}", ratios, step)
    """

    def __init__(self, optimizer: LARS) -> None:
        self._optimizer = optimizer
        self._steps: dict[tuple[str, ...], list[Tensor]] = {}

    def record(self) -> None:
        """Keep the ratios of the step just made; call it after each ``optimizer.step()``."""
        for (group, _), (names, ratios) in self._optimizer._ratios.items():
            if self._optimizer.param_groups[group]["adapt"]:
                self._steps.setdefault(tuple(names), []).append(ratios)

    def read(self) -> dict[str, Tensor]:
        """By name, the ratios of each step since the last reading, FP32 on the CPU, ``[steps]``.

        Names are those of :meth:`LARS.trust_ratios`, without the tensors that do not adapt.
        """
        steps, self._steps = self._steps, {}
        return {
            name: history
            for names, ratios in steps.items()
            for name, history in zip(
                names, torch.stack(ratios).float().cpu().unbind(1), strict=True
            )
        }
