"""Average gradients: how much of the division by the number of ranks comes before their sum.

Dividing by all p ranks before an FP16 sum makes whatever is below p * 2^-25 zero: with thousands of
ranks, most small gradients. Dividing only after it lets the sum overflow. apex and Horovod
therefore divide by a factor before and by the rest after it (``gradient_predivide_factor``), as
torch's FSDP does with a power of two near sqrt(p).

Sums in FP32 (``Rule.sum_dtype``) need no such compromise: each is divided by the number of its
terms before it is rounded, as in Megatron Core's ``reduce_scatter_with_fp32_accumulation``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .algorithms import TwoLevel
from .execute import run
from .plan import WIRE_DTYPES, Rule
from .topology import Topology


def average(tensor: Tensor, topology: Topology, rule: Rule) -> None:
    """Average ``tensor`` over all ranks in place by ``rule``, ignoring its ``max_bytes``.

    It behaves as :func:`~largebatch.comm.all_reduce`, which says what it asks of ``tensor``, what
    it returns when, and what it raises. With FP32 on the wire, there is one division, before the
    sum. With FP16 on the wire, means beyond 65504 * f / p overflow, where f is the factor before
    the sum: they become infinite on all ranks, as gradients do that overflow in backward, and loss
    scaling skips the step. With BF16 there is nothing to overflow in practice, since it has the
    range of FP32; with ``sum_dtype``, the mean of finite FP16 values is finite.

    Example::

        topology = Topology.from_environment()
        average(gradients, topology, Rule("hierarchical", wire_dtype="fp16", sum_dtype="fp32"))
    """
    algorithm = rule.implementation
    if rule.sum_dtype is not None:
        assert isinstance(algorithm, TwoLevel)  # checked by Rule
        run(tensor, topology, rule, replace(algorithm, mean=True))
        return
    averaging = Averaging.of(tensor.dtype, topology.world_size, rule)
    run(averaging.begin(tensor), topology, rule, algorithm)
    averaging.end(tensor)


@dataclass(frozen=True)
class Averaging:
    """What gradients are divided by before a sum, and what the sum is divided by."""

    before: float
    after: float

    @classmethod
    def of(cls, dtype: torch.dtype, world_size: int, rule: Rule) -> Averaging:
        """Return the divisors for gradients of a dtype, by a rule without a ``sum_dtype``."""
        wire = dtype if rule.wire_dtype is None else WIRE_DTYPES[rule.wire_dtype]
        before = predivide_factor(world_size, fp16=torch.float16 in (dtype, wire))
        return cls(before, world_size / before)

    def begin(self, tensor: Tensor) -> Tensor:
        """Divide ``tensor`` in place before the all-reduce, and return it."""
        return tensor if self.before == 1 else tensor.div_(self.before)

    def end(self, tensor: Tensor) -> Tensor:
        """Divide ``tensor`` in place after the all-reduce, in its own dtype, and return it."""
        return tensor if self.after == 1 else tensor.div_(self.after)


def predivide_factor(world_size: int, *, fp16: bool) -> int:
    """Return the factor before a sum: for FP16 the power of two at or above sqrt(p)."""
    if not fp16:  # the range of FP32, in which a division loses nothing
        return world_size
    return 1 << ((world_size - 1).bit_length() + 1) // 2  # 2 ** ceil(log2(p) / 2)
