"""Record the trust ratios of a training run without slowing down its steps."""

from __future__ import annotations

import torch
from torch import Tensor

from .layerwise import LayerwiseOptimizer


class TrustRatioHistory:
    """The trust ratios of every step since they were last read.

    Recording copies what the step has computed on the device; only reading waits for the device.

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

    def __init__(self, optimizer: LayerwiseOptimizer) -> None:
        self._optimizer = optimizer
        # For each batch of tensors: the runs of steps in which the same tensors had a gradient.
        self._runs: dict[tuple[int, int], list[tuple[list[int], list[Tensor]]]] = {}

    def record(self) -> None:
        """Record the ratios of the last step; call this after each ``optimizer.step()``."""
        for key, (places, ratios, adapts, _) in self._optimizer._ratios.items():
            if adapts:
                runs = self._runs.setdefault(key, [])
                if not runs or runs[-1][0] != places:
                    runs.append((list(places), []))
                runs[-1][1].append(ratios.clone())  # a CUDA graph may overwrite it

    def read(self) -> dict[str, Tensor]:
        """Return the recorded ratios by parameter name, and clear the record.

        Returns:
            One FP32 tensor on the CPU per parameter, shape ``[steps since the last read]``, without
            the steps in which it had no gradient. Names are those of the optimizer's
            ``trust_ratios()``, without the tensors that have no ratio.
        """
        all_runs, self._runs = self._runs, {}
        parts: dict[str, list[Tensor]] = {}
        for (index, _), runs in all_runs.items():
            for places, ratios in runs:
                columns = torch.stack(ratios).float().cpu().unbind(1)
                names = self._optimizer._names(index, places)
                for name, column in zip(names, columns, strict=True):
                    parts.setdefault(name, []).append(column)
        return {name: torch.cat(columns) for name, columns in parts.items()}
