"""Weights in files: what a run exports."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

#: In a run's folder, at the end: its weights, and their moving average if there is one.
WEIGHTS, WEIGHTS_EMA = "weights.pt", "weights_ema.pt"


def write_weights(path: Path, content: dict[str, Tensor]) -> None:
    """Write a state dict; a crash leaves the file whole or not there."""
    partial = path.with_name(f".{path.name}.partial")
    torch.save(content, partial)
    partial.rename(path)
