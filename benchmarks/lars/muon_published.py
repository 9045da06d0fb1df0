"""The steps of other people's Muon, written out by formula, each beside its source.

They are oracles: tests/lars/muon/test_crosschecks.py holds
:class:`~largebatch.lars.Muon` to them, and to the libraries themselves where those are installed.
w is the weight ``[out, in, ...]``, g the gradient, v the momentum buffer. Each step returns the new
weight and buffer. ``dtype`` is that of Newton-Schulz, for which the sources take BF16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ORIGINAL = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    x: Tensor, steps: int, dtype: torch.dtype, abc: Sequence[float] = ORIGINAL
) -> Tensor:
    """Jordan 2024, https://kellerjordan.github.io/posts/muon/, of one matrix."""
    a, b, c = abc
    transposed = x.shape[0] > x.shape[1]
    x = x.to(dtype)
    x = (x.T if transposed else x) / x.norm()
    for _ in range(steps):
        x = a * x + (b * (x @ x.T) + c * (x @ x.T) @ (x @ x.T)) @ x
    return x.T if transposed else x


def jordan(
    w: Tensor, g: Tensor, v: Tensor, lr: float, momentum: float, decay: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """KellerJordan/Muon, muon.py, ``muon_update``: momentum in the EMA form, with Nesterov.

    The factor is sqrt(max(1, rows / columns)) of the last two axes of the *gradient*: of the matrix
    for a linear layer, and of the kernel, which makes 1 where it is square, for a convolution.
    """
    v = momentum * v + (1 - momentum) * g
    u = (1 - momentum) * g + momentum * v
    o = newton_schulz(u.reshape(len(u), -1), 5, dtype).to(w.dtype).reshape(w.shape)
    factor = max(1.0, g.shape[-2] / g.shape[-1]) ** 0.5
    return (1 - lr * decay) * w - lr * factor * o, v


def airbench94(
    w: Tensor, g: Tensor, v: Tensor, lr: float, momentum: float, nesterov: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """KellerJordan/cifar10-airbench, airbench94_muon.py, ``Muon``: momentum in the form of SGD.

    The weight is rescaled to the norm sqrt(out) before each step, which has no factor for the
    shape. Newton-Schulz takes three steps.
    """
    v = momentum * v + g
    u = g + momentum * v if nesterov else v
    o = newton_schulz(u.reshape(len(u), -1), 3, dtype).to(w.dtype).reshape(w.shape)
    return w * len(w) ** 0.5 / w.norm() - lr * o, v
