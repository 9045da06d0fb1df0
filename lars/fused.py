"""LARS on the CPU: the norms of each tensor, then its update by torch's fused SGD kernel.

A step on a CPU is bound by memory bandwidth. SGD's kernel reads and writes each element once for
``v = m v + (1 - dampening) (g + l w)``, ``w = w - lr v``; with the dampening ``1 - rate`` that is a
step of LARS. The loss scale becomes part of rate and decay, so that gradients need no copy.

Every tensor is a row of a matrix, and matrices are walked through in blocks of columns, which stay
in the cache. A large tensor is a matrix of one row, in place. Small tensors of equal shape are
stacked, because calling operators on each would take longer than their work. What the kernel cannot
do (half precision, Nesterov momentum, a rate for each row) is done in a workspace of one block.

Implements :mod:`~largebatch.lars.reference`. Reading a scalar is free on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .coefficients import Divisor, coefficients, divisor
from .memory import flat, same_order
from .reference import Hyper, compute_dtype

_BLOCK = 2**20  # elements; with fewer, starting the threads for each block takes a notable time
_SMALL = 2**15  # elements up to which an operator runs on one thread
_STACK = 2**18  # elements of small tensors in a stack, at most
_ROW = 2**13  # elements whose squares are added in FP32, which is exact to 1e-7
# The kernel takes the rate as 1 - dampening, which loses precision below these rates.
_LEAST_RATE = {torch.float32: 2.0**-29, torch.float64: 2.0**-16}


def update(
    dialect: str,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    hyper: Hyper,
    inverse_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    halves: Sequence[Tensor] = (),
) -> Tensor:
    """Take one step on CPU tensors in place; see :func:`largebatch.lars.reference.update`."""
    dtype = compute_dtype(weights[0])
    ratios = torch.ones(len(weights), dtype=dtype)
    if found_inf is not None and found_inf.item() > 0:
        return ratios
    hyper = replace(hyper, lr=float(hyper.lr), previous_lr=float(hyper.previous_lr))
    scale = 1.0 if inverse_scale is None else inverse_scale.to(dtype).item()
    step = _Step(dialect, hyper, -scale if hyper.maximize else scale, dtype)
    for members in _groups(weights):
        w, g, v, h = (
            [tensors[i] for i in members] if tensors else []
            for tensors in (weights, gradients, buffers, halves)
        )
        in_place = len(members) == 1 and same_order(w + g + v + h)
        rows = _Rows(
            _as_rows(w, in_place),
            _as_rows(g, in_place),
            _as_rows(v, in_place) if v else None,
            _as_rows(h, in_place) if h else None,
        )
        ratios[members] = step.take(rows).to(dtype)
        if not in_place:
            for tensors, matrix in ((w, rows.weights), (v, rows.buffers), (h, rows.halves)):
                if matrix is not None:
                    shaped = matrix.view(len(tensors), *tensors[0].shape)
                    torch._foreach_copy_(tensors, list(shaped.unbind()))
    return ratios


def _groups(weights: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each matrix: small ones of equal shape together."""
    groups: list[list[int]] = []
    small: dict[torch.Size, list[int]] = {}
    for index, weight in enumerate(weights):
        shape, size = weight.shape, weight.numel()
        group = small.get(shape)
        if group is None or (len(group) + 1) * size > _STACK:
            group = []
            groups.append(group)
            if size <= _SMALL:
                small[shape] = group
        group.append(index)
    return groups


class _Rows(NamedTuple):
    """The tensors of ``k`` parameters of ``n`` elements as matrices, shape ``[k, n]``."""

    weights: Tensor
    gradients: Tensor
    buffers: Tensor | None
    halves: Tensor | None


def _as_rows(tensors: list[Tensor], in_place: bool) -> Tensor:
    if in_place:
        return flat(tensors)[0].unsqueeze(0)
    return torch.stack(tensors).contiguous().view(len(tensors), tensors[0].numel())


@dataclass
class _Step:
    """A step with the same options for all tensors; gradients are multiplied by ``scale``."""

    dialect: str
    hyper: Hyper
    scale: float
    dtype: torch.dtype
    memory: dict[str, Tensor] = field(default_factory=dict)

    def take(self, rows: _Rows) -> Tensor:
        """Update the matrices in place and return the trust ratios, shape ``[k]``, in FP64."""
        norms = torch.ones(2, len(rows.weights), dtype=torch.float64)
        if self.hyper.adapt:
            norms.zero_()
            for w, g, v in self._blocks(rows):
                norms[0] += _squares(w)
                norms[1] += self._divisor_squares(w, g, v)
            norms.sqrt_()
        c = coefficients(self.dialect, norms[0], norms[1], self.hyper)
        rate, lr, carry = self._shared(c.rate), self._shared(c.lr), float(c.carry)
        # Backwards, because the end of a matrix is still in the cache.
        for w, g, v in self._blocks(rows, update=True):
            self._update(w, g, v, rate, carry, lr)
        return c.ratios

    def _shared(self, coefficient: Tensor | float) -> Tensor | float:
        """Return a number if the rows share the coefficient, else a column."""
        if isinstance(coefficient, float):
            return coefficient
        if len(coefficient) == 1 or not self.hyper.adapt:
            return coefficient[0].item()
        return coefficient.to(self.dtype).unsqueeze(1)

    def _divisor_squares(self, w: Tensor, g: Tensor, v: Tensor | None) -> Tensor:
        """Return the sums of squares of the tensor whose norm divides the trust ratio."""
        divides, m = divisor(self.dialect, self.hyper), self.hyper.momentum
        if divides is Divisor.GRADIENT:
            return _squares(g) * self.scale**2
        move = self._decayed(w, g)
        if divides is Divisor.MOVE and v is not None:
            if self.hyper.nesterov:  # m (m v + move) + move
                move.mul_(1 + m).add_(v, alpha=m * m)
            else:
                move.add_(v, alpha=m)
        return _squares(move)

    def _update(
        self,
        w: Tensor,
        g: Tensor,
        v: Tensor | None,
        rate: Tensor | float,
        carry: float,
        lr: Tensor | float,
    ) -> None:
        """Update a block by the formula of :mod:`~largebatch.lars.coefficients`."""
        hyper = self.hyper
        if (
            isinstance(rate, float)
            and isinstance(lr, float)
            and abs(rate * self.scale) >= _LEAST_RATE[self.dtype]
            and (v is None or (carry > 0 and not hyper.nesterov))
        ):
            rate *= self.scale
            torch._fused_sgd_(
                [w],
                [g],
                [] if v is None else [v],
                weight_decay=hyper.weight_decay / self.scale,
                momentum=0.0 if v is None else carry,
                lr=lr * rate if v is None else lr,
                dampening=0.0 if v is None else 1 - rate,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
            return
        move = self._decayed(w, g).mul_(rate)
        if v is not None:
            v.mul_(carry).add_(move)
            move = move.add_(v, alpha=hyper.momentum) if hyper.nesterov else v
        if isinstance(lr, float):
            w.sub_(move, alpha=lr)
        else:
            w.addcmul_(move, lr, value=-1)

    def _decayed(self, w: Tensor, g: Tensor) -> Tensor:
        """Return g + l w in the workspace of gradients."""
        decayed = torch.mul(g, self.scale, out=self._workspace("gradients", g))
        return decayed.add_(w, alpha=self.hyper.weight_decay)

    def _blocks(
        self, rows: _Rows, *, update: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield blocks of weights, gradients and buffers in the dtype of arithmetic.

        To update them, from the last to the first; the new weights and buffers are then rounded
        into the dtypes that store them, and into the halves.
        """
        count, length = rows.weights.shape
        columns = _BLOCK // count
        starts = range(0, length, columns)
        for start in reversed(starts) if update else starts:
            block = _Rows(*(m if m is None else m[:, start : start + columns] for m in rows))
            w = self._loaded("weights", block.weights)
            v = None if block.buffers is None else self._loaded("buffers", block.buffers)
            yield w, self._loaded("gradients", block.gradients), v
            for target, value in ((block.weights, w), (block.buffers, v), (block.halves, w)):
                if update and target is not None and value is not None and target is not value:
                    target.copy_(value)

    def _loaded(self, kind: str, block: Tensor) -> Tensor:
        if block.dtype == self.dtype:
            return block
        return self._workspace(kind, block).copy_(block)

    def _workspace(self, kind: str, block: Tensor) -> Tensor:
        """Return memory for values of the shape of ``block``, the same for every block."""
        if kind not in self.memory or self.memory[kind].numel() < block.numel():
            self.memory[kind] = torch.empty(block.numel(), dtype=self.dtype)
        return self.memory[kind][: block.numel()].view(block.shape)


def _squares(block: Tensor) -> Tensor:
    """Return the sum of squares of each row, in FP64."""
    if len(block) > 1:
        return torch.linalg.vector_norm(block, dim=1).double().square_()
    row = block[0]
    whole = len(row) - len(row) % _ROW
    parts = torch.linalg.vector_norm(row[:whole].view(-1, _ROW), dim=1)
    rest = torch.linalg.vector_norm(row[whole:], dim=0, keepdim=True)
    norms = torch.cat([parts, rest]).double()
    return norms.dot(norms).unsqueeze(0)
