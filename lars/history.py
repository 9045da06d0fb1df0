"""Record the trust ratios of a training run without slowing down its steps."""

from __future__ import annotations

import torch
from torch import Tensor

from .optimizer import LARS


class TrustRatioHistory:
    """The trust ratios of every step since they were last read.

    Recording only keeps a reference to a tensor that the step has computed; reading waits for the
    device.

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
        self._steps: dict[tuple[int, tuple[int, ...]], list[Tensor]] = {}

    def record(self) -> None:
        """Record the ratios of the last step; call this after each ``optimizer.step()``."""
        for (index, _), (places, ratios, adapts) in self._optimizer._ratios.items():
            if adapts:
                self._steps.setdefault((index, tuple(places)), []).append(ratios)

    def read(self) -> dict[str, Tensor]:
        """Return the recorded ratios by parameter name, and clear the record.

        Returns:
            One FP32 tensor on the CPU per parameter, shape ``[steps since the last read]``. Names
            are those of :meth:`LARS.trust_ratios`, without the tensors that do not adapt.
        """
        steps, self._steps = self._steps, {}
        return {
            name: history
            for tensors, ratios in steps.items()
            for name, history in zip(
                self._optimizer._names(*tensors),
                torch.stack(ratios).float().cpu().unbind(1),
                strict=True,
            )
        }
