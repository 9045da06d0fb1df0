"""Plain values in state dicts: those that ``torch.load`` reads without trust in the file."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def plain(value: Any) -> Any:
    """Return NumPy's numbers and arrays as Python's, also inside lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, Tensor) else value
