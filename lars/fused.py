"""LARS on the CPU: the norms of each tensor, then its update by torch's fused SGD kernel.

A step on a CPU is bound by memory bandwidth. SGD's kernel reads and writes each element once for
``v = m v + (1 - dampening) (g + l w)``, ``w = w - lr v``; with the dampening ``1 - rate`` that is a
step of LARS. The loss scale becomes part of rate and decay, so that gradients need no copy.

Large tensors are updated one by one, in place. Small tensors of equal shape are stacked as the rows
of a matrix, because calling operators on each would take longer than their work. What the kernel
cannot do (half precision, Nesterov momentum, another divisor than the gradient, a rate for each
row) is done block by block in a workspace of one block.

Implements :mod:`~largebatch.lars.reference`. Reading a scalar is free on a CPU.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .coefficients import Divisor, coefficients, divisor
from .memory import flat_in_place
from .reference import Hyper, compute_dtype

_BLOCK = 2**20  # elements; with fewer, starting the threads for each block takes a notable time
_SMALL = 2**15  # elements up to which an operator runs on one thread
_BATCH = 2**21  # elements whose norms are computed before their updates, which read them again
_STACK = 2**18  # elements of small tensors in a stack, about
_FEW = 8  # small tensors of equal shape, below which stacking takes longer than it saves
_DOT = 2**16  # elements, at most, whose squares are added by the dot product, which is faster
_ROW = 2**10  # elements whose squares are added in FP32 in larger tensors
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
    kinds = (weights, gradients, buffers, halves)
    # The kernel walks through whole tensors; what needs a workspace is done in blocks.
    converts = any(tensors and tensors[0].dtype != dtype for tensors in kinds)
    adds = hyper.adapt and divisor(dialect, hyper) is not Divisor.GRADIENT
    block = _BLOCK if converts or adds or hyper.nesterov else sys.maxsize
    step = _Step(dialect, hyper, -scale if hyper.maximize else scale, dtype, block)
    order: list[int] = []
    results: list[Tensor] = []
    for batch in _batches(weights):
        matrices: list[_Matrices] = []
        copied: list[tuple[int, list[int]]] = []
        for members in batch:
            parts: list[Any] | None = None
            if len(members) == 1:
                parts = flat_in_place([t[members[0]] if t else None for t in kinds])
            if parts is None:
                copied.append((len(matrices), members))
                parts = [_stacked([t[i] for i in members]) if t else None for t in kinds]
            matrices.append(_Matrices(*parts))
        order += [i for members in batch for i in members]
        results.append(step.take(matrices))
        for number, members in copied:
            for tensors, matrix in zip(kinds, matrices[number], strict=True):
                if matrix is not None and tensors is not gradients:
                    rows = matrix.view(len(members), *tensors[members[0]].shape).unbind()
                    torch._foreach_copy_([tensors[i] for i in members], list(rows))
    ratios[order] = torch.cat(results).to(dtype)
    return ratios


def _batches(weights: Sequence[Tensor]) -> Iterator[list[list[int]]]:
    """Yield batches of matrices, each as the indices of its tensors.

    Small tensors of equal shape share a matrix, and small matrices a batch.
    """
    groups: list[list[int]] = []
    small: dict[torch.Size, list[int]] = defaultdict(list)
    for index, weight in enumerate(weights):
        size = weight.numel()
        if size > _SMALL:
            groups.append([index])
            continue
        group = small[weight.shape]
        group.append(index)
        if len(group) * size >= _STACK:
            groups.append(small.pop(weight.shape))
    for group in small.values():
        groups += [group] if len(group) >= _FEW else [[index] for index in group]
    batch: list[list[int]] = []
    elements = 0
    for group in groups:
        batch.append(group)
        elements += len(group) * weights[group[0]].numel()
        if elements >= _BATCH:
            yield batch
            batch, elements = [], 0
    if batch:
        yield batch


def _stacked(tensors: list[Tensor]) -> Tensor:
    rows = torch.stack(tensors).contiguous().view(len(tensors), tensors[0].numel())
    return rows if len(tensors) > 1 else rows[0]


class _Matrices(NamedTuple):
    """Parameters of ``n`` elements: ``k`` copied into shape ``[k, n]``, or one in shape ``[n]``."""

    weights: Tensor
    gradients: Tensor
    buffers: Tensor | None
    halves: Tensor | None


@dataclass
class _Step:
    """A step with the same options for all tensors; gradients are multiplied by ``scale``."""

    dialect: str
    hyper: Hyper
    scale: float
    dtype: torch.dtype
    block: int
    memory: dict[str, Tensor] = field(default_factory=dict)

    def take(self, batch: list[_Matrices]) -> Tensor:
        """Update matrices in place and return the trust ratios of all rows in FP64."""
        adapt = self.hyper.adapt
        counts = [m.weights.shape[0] if m.weights.dim() > 1 else 1 for m in batch]
        # Sums of squares of each row's weight and of what divides its trust ratio.
        squares = [[[float(not adapt)] * count for _ in range(2)] for count in counts]
        for number, w, g, v in self._blocks(batch) if adapt else ():
            sums = squares[number]
            for i, more in enumerate((_squares(w), self._divisor_squares(w, g, v))):
                sums[i] = [a + b for a, b in zip(sums[i], more, strict=True)]
        flat = [[x for sums in squares for x in sums[i]] for i in range(2)]
        norms = torch.tensor(flat, dtype=torch.float64).sqrt_()
        c = coefficients(self.dialect, norms[0], norms[1], self.hyper)
        carry = float(c.carry)
        rates, lrs = (
            [x] * len(batch) if isinstance(x, float) else self._columns(x, counts)
            for x in (c.rate, c.lr)
        )
        # Backwards, because what was read last is still in the cache.
        for number, w, g, v in self._blocks(batch, update=True):
            self._update(w, g, v, rates[number], carry, lrs[number])
        return c.ratios

    def _columns(self, coefficient: Tensor, counts: list[int]) -> list[Tensor | float]:
        """Split a coefficient by matrix: a number if the rows share it, else a column."""
        if not self.hyper.adapt or max(counts) == 1:
            values: list[Tensor | float] = coefficient.tolist()
            return values
        return [
            part.item() if len(part) == 1 else part.to(self.dtype).unsqueeze(1)
            for part in coefficient.split(counts)
        ]

    def _divisor_squares(self, w: Tensor, g: Tensor, v: Tensor | None) -> list[float]:
        """Return the sum of squares of each row of what divides the trust ratio."""
        divides, m = divisor(self.dialect, self.hyper), self.hyper.momentum
        if divides is Divisor.GRADIENT:
            return [self.scale**2 * square for square in _squares(g)]
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
        self, batch: list[_Matrices], *, update: bool = False
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
        """Yield the number of a matrix, and a block of its weights, gradients and buffers.

        They are in the dtype of arithmetic. With ``update``, from the last to the first; the new
        weights and buffers are then rounded into the dtypes that store them, and into the halves.
        """
        numbers = range(len(batch))
        for number in reversed(numbers) if update else numbers:
            matrices = batch[number]
            starts = range(0, matrices.weights.numel(), self.block)
            for start in reversed(starts) if update else starts:
                block = matrices
                if len(starts) > 1:  # a matrix of one row
                    end = start + self.block
                    parts: list[Any] = [m if m is None else m[start:end] for m in matrices]
                    block = _Matrices(*parts)
                w = self._loaded("weights", block.weights)
                v = None if block.buffers is None else self._loaded("buffers", block.buffers)
                yield number, w, self._loaded("gradients", block.gradients), v
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


def _squares(block: Tensor) -> list[float]:
    """Return the sum of squares of each row."""
    if block.dim() > 1:
        squares: list[float] = torch.linalg.vector_norm(block, dim=1).double().square_().tolist()
        return squares
    rest = block
    square = 0.0
    if block.shape[0] > _DOT:
        whole = block.shape[0] - block.shape[0] % _ROW
        norms = torch.linalg.vector_norm(block[:whole].view(-1, _ROW), dim=1)
        square = torch.linalg.vector_norm(norms, dtype=torch.float64).item() ** 2
        rest = block[whole:]
    return [square + rest.dot(rest).item()]
