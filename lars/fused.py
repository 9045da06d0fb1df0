"""LARS on the CPU: the norms of each tensor, then its update by torch's fused SGD kernel.

A step on a CPU is bound by memory bandwidth. SGD's kernel reads and writes each element once for
``v = m v + (1 - dampening) (g + l w)``, ``w = w - lr v``; with the dampening ``1 - rate`` that is a
step of LARS. The loss scale becomes part of rate and decay, so that gradients need no copy.

Tensors are updated one by one, while what the norms have read is still in the cache. Small ones of
equal shape are stacked as the rows of a matrix, because calling operators on each would take longer
than their work; small ones that do not adapt share a call of the kernel. What the kernel cannot do
(half precision, Nesterov momentum, a rate for each row) is done in workspaces of one block.

Implements :mod:`~largebatch.lars.reference`. Reading a scalar is free on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .coefficients import Divisor, coefficients, coefficients_of_one, divisor
from .memory import flat_in_place
from .reference import Hyper, compute_dtype

_BLOCK = 2**22  # elements of a workspace, at most
_SMALL = 2**15  # elements up to which an operator runs on one thread
_STACK = 2**18  # elements of small tensors in a stack, about
_FEW = 8  # fewer small tensors of equal shape are not stacked, which would take longer
_DOT = 2**18  # up to so many elements, squares are summed by a dot product, which is faster
_ROW = 2**10  # of larger tensors, so many squares are summed in FP32, their sums in FP64
# The kernel takes the rate as 1 - dampening, which is inaccurate for rates below these.
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
    if found_inf is not None and found_inf.item() > 0:
        return torch.ones(len(weights), dtype=dtype)
    hyper = replace(hyper, lr=float(hyper.lr), previous_lr=float(hyper.previous_lr))
    scale = 1.0 if inverse_scale is None else inverse_scale.to(dtype).item()
    kinds = (weights, gradients, buffers, halves)
    converts = any(t.dtype != dtype for t in gradients)  # they may differ from one another
    converts |= any(tensors and tensors[0].dtype != dtype for tensors in kinds)
    step = _Step(dialect, hyper, -scale if hyper.maximize else scale, dtype, converts)
    ratios = [1.0] * len(weights)
    if not hyper.adapt and step.take_all(weights, gradients, buffers):
        return torch.tensor(ratios, dtype=dtype)
    for members in _stacks(weights):
        parts: list[Any] | None = None
        if len(members) == 1:
            parts = flat_in_place([t[members[0]] if t else None for t in kinds])
        copied = parts is None
        if parts is None:
            parts = [_stacked([t[i] for i in members]) if t else None for t in kinds]
        for i, ratio in zip(members, step.take(_Matrices(*parts)), strict=True):
            ratios[i] = ratio
        for tensors, matrix in zip(kinds, parts, strict=True) if copied else ():
            if matrix is not None and tensors is not gradients:
                rows = matrix.view(len(members), *tensors[members[0]].shape).unbind()
                torch._foreach_copy_([tensors[i] for i in members], list(rows))
    return torch.tensor(ratios, dtype=dtype)


def _stacks(weights: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of the tensors that are updated together, which are of equal shape."""
    small: dict[torch.Size, list[int]] = defaultdict(list)
    for index, weight in enumerate(weights):
        size = weight.numel()
        if size > _SMALL:
            yield [index]
            continue
        group = small[weight.shape]
        group.append(index)
        if len(group) * size >= _STACK:
            yield small.pop(weight.shape)
    for group in small.values():
        yield from [group] if len(group) >= _FEW else [[index] for index in group]


def _stacked(tensors: list[Tensor]) -> Tensor:
    rows = torch.stack(tensors).contiguous().view(len(tensors), tensors[0].numel())
    return rows if len(tensors) > 1 else rows[0]


class _Matrices(NamedTuple):
    """Parameters of ``n`` elements: ``k`` copied into shape ``[k, n]``, or one in shape ``[n]``."""

    weights: Tensor
    gradients: Tensor
    buffers: Tensor | None
    halves: Tensor | None


Block = tuple[Tensor, Tensor, Tensor | None]


@dataclass
class _Step:
    """A step with the same options for all tensors."""

    dialect: str
    hyper: Hyper
    scale: float  # which gradients are multiplied by
    dtype: torch.dtype
    converts: bool  # whether some tensors are not in the dtype of arithmetic
    memory: dict[str, Tensor] = field(default_factory=dict)

    def take_all(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> bool:
        """Update tensors that do not adapt by one call of the kernel, if it can do so."""
        _, rate, carry, lr = coefficients_of_one(self.dialect, 1.0, 1.0, self.hyper)
        of_all = (*weights, *gradients, *buffers)
        if self.converts or not all(t.is_contiguous() for t in of_all):
            return False
        if not self._fits_kernel(rate, carry, bool(buffers)):
            return False
        self._kernel(list(weights), list(gradients), list(buffers), rate, carry, lr)
        return True

    def take(self, matrices: _Matrices) -> list[float]:
        """Update matrices in place and return the trust ratio of each row."""
        blocks = self._split(matrices)
        loaded = self._loaded(matrices) if len(blocks) == 1 else None
        weight_norm: Any = 1.0
        divisor_norm: Any = 1.0
        if self.hyper.adapt:
            squares: list[Any] = [0.0, 0.0]
            for block in blocks:
                w, g, v = loaded or self._loaded(block)
                squares[0] += _squares(w)
                squares[1] += self._divisor_squares(w, g, v)
            weight_norm, divisor_norm = (square**0.5 for square in squares)
        if matrices.weights.dim() == 1 or not self.hyper.adapt:
            of_update: Any
            ratio, *of_update = coefficients_of_one(
                self.dialect, weight_norm, divisor_norm, self.hyper
            )
            ratios = [ratio] * (len(matrices.weights) if matrices.weights.dim() > 1 else 1)
        else:
            c = coefficients(self.dialect, weight_norm, divisor_norm, self.hyper)
            ratios = c.ratios.tolist()
            of_update = [
                x.to(self.dtype).unsqueeze(1) if isinstance(x, Tensor) and x.dim() else float(x)
                for x in (c.rate, c.carry, c.lr)
            ]
        for block in reversed(blocks):  # backwards: what was read last is still in the cache
            w, g, v = loaded or self._loaded(block)
            self._update(w, g, v, *of_update)
            for target, value in ((block.weights, w), (block.buffers, v), (block.halves, w)):
                if target is not None and value is not None and target is not value:
                    target.copy_(value)
        return ratios

    def _split(self, matrices: _Matrices) -> list[_Matrices]:
        """Cut one large parameter into blocks where it needs workspaces."""
        elements = matrices.weights.numel()
        if elements <= _BLOCK or not self._needs_workspaces():
            return [matrices]
        return [
            _Matrices(*(None if m is None else m[start : start + _BLOCK] for m in matrices))  # type: ignore[arg-type]
            for start in range(0, elements, _BLOCK)
        ]

    def _needs_workspaces(self) -> bool:
        adds = self.hyper.adapt and divisor(self.dialect, self.hyper) is not Divisor.GRADIENT
        return self.converts or adds or self.hyper.nesterov

    def _divisor_squares(self, w: Tensor, g: Tensor, v: Tensor | None) -> Any:
        """Return the sum of squares of each row of what divides the trust ratio."""
        divides, m = divisor(self.dialect, self.hyper), self.hyper.momentum
        if divides is Divisor.GRADIENT:
            return self.scale**2 * _squares(g)
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
        numbers = isinstance(rate, float) and isinstance(lr, float)
        if numbers and self._fits_kernel(rate, carry, v is not None):
            self._kernel([w], [g], [] if v is None else [v], rate, carry, lr)
            return
        move = self._decayed(w, g).mul_(rate)
        if v is not None:
            v.mul_(carry).add_(move)
            move = move.add_(v, alpha=self.hyper.momentum) if self.hyper.nesterov else v
        if isinstance(lr, float):
            w.sub_(move, alpha=lr)
        else:
            w.addcmul_(move, lr, value=-1)

    def _fits_kernel(self, rate: Any, carry: float, has_buffers: bool) -> bool:
        enough = abs(rate * self.scale) >= _LEAST_RATE[self.dtype]
        return enough and (not has_buffers or (carry > 0 and not self.hyper.nesterov))

    def _kernel(
        self, w: list[Tensor], g: list[Tensor], v: list[Tensor], rate: Any, carry: float, lr: Any
    ) -> None:
        rate *= self.scale
        torch._fused_sgd_(
            w,
            g,
            v,
            weight_decay=self.hyper.weight_decay / self.scale,
            momentum=carry if v else 0.0,
            lr=lr if v else lr * rate,
            dampening=1 - rate if v else 0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def _decayed(self, w: Tensor, g: Tensor) -> Tensor:
        """Return g + l w in a workspace."""
        decayed = torch.mul(g, self.scale, out=self._workspace("decayed", g))
        return decayed.add_(w, alpha=self.hyper.weight_decay)

    def _loaded(self, block: _Matrices) -> Block:
        """Return the weights, gradients and buffers of a block in the dtype of arithmetic."""
        w, g, v = block.weights, block.gradients, block.buffers
        if self.converts:
            w, g = self._converted("weights", w), self._converted("gradients", g)
            v = None if v is None else self._converted("buffers", v)
        return w, g, v

    def _converted(self, kind: str, block: Tensor) -> Tensor:
        if block.dtype == self.dtype:
            return block
        return self._workspace(kind, block).copy_(block)

    def _workspace(self, kind: str, block: Tensor) -> Tensor:
        """Return memory for values of the shape of ``block``, the same for every block."""
        if kind not in self.memory or self.memory[kind].numel() < block.numel():
            self.memory[kind] = torch.empty(block.numel(), dtype=self.dtype)
        return self.memory[kind][: block.numel()].view(block.shape)


def _squares(block: Tensor) -> Any:
    """Return the sum of squares as a number or, of a matrix, that of each row in FP64."""
    if block.dim() > 1:
        return torch.linalg.vector_norm(block, dim=1).double().square_()
    rest = block
    square = 0.0
    if block.shape[0] > _DOT:
        whole = block.shape[0] - block.shape[0] % _ROW
        norms = torch.linalg.vector_norm(block[:whole].view(-1, _ROW), dim=1)
        square = torch.linalg.vector_norm(norms, dtype=torch.float64).item() ** 2
        rest = block[whole:]
    return square + rest.dot(rest).item()
