"""Average gradients: how much of the division by the number of ranks comes before their sum.

Dividing by all p ranks before an FP16 sum keeps it from overflowing, but whatever is below
p * 2^-25 becomes zero: with thousands of ranks, most small gradients. Dividing only after it lets
the sum overflow. apex and Horovod therefore divide by a factor before and by the rest after it
(``gradient_predivide_factor``), as torch's FSDP does with a power of two near sqrt(p).

Sums in FP32 (``Rule.sum_dtype``) need no such compromise: each is divided by the number of its
terms before it is rounded.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .algorithms import TwoLevel
from .execute import all_reduce, run
from .plan import WIRE_DTYPES, Rule
from .topology import Topology


def average(tensor: Tensor, topology: Topology, rule: Rule) -> None:
    """Average ``tensor`` over all ranks in place by ``rule``, ignoring its ``max_bytes``.

    It behaves as :func:`~largebatch.comm.all_reduce`, which says what it asks of ``tensor``, what
    it returns when, and what it raises. With FP32 on the wire, there is one division, before the
    sum. With FP16 on the wire, means beyond 65504 * f / p overflow, where f is the factor before
    the sum: they become infinite on all ranks, as gradients do that overflow in backward, and loss
    scaling skips the step. With BF16 or with ``sum_dtype``, the mean of finite values is finite.

    Example::

        topology = Topology.from_environment()
        average(gradients, topology, Rule("hierarchical", wire_dtype="fp16", sum_dtype="fp32"))
    """
    if rule.sum_dtype is not None:
        algorithm = rule.implementation
        assert isinstance(algorithm, TwoLevel)  # checked by Rule
        run(replace(algorithm, mean=True), tensor, topology, rule)
        return
    before, after = divisors(tensor.dtype, topology.world_size, rule)
    all_reduce(tensor.div_(before), topology, rule)
    if after != 1:
        tensor.div_(after)  # in the dtype of the gradients, not of the wire


def divisors(dtype: torch.dtype, world_size: int, rule: Rule) -> tuple[float, float]:
    """Return what gradients of a dtype are divided by before and after their sum.

    The product is the number of ranks. ``rule`` has no ``sum_dtype``.
    """
    before = rule.predivide_factor
    if before is None:
        wire = dtype if rule.wire_dtype is None else WIRE_DTYPES[rule.wire_dtype]
        before = default_predivide_factor(world_size, fp16=torch.float16 in (dtype, wire))
    return before, world_size / before


def default_predivide_factor(world_size: int, *, fp16: bool) -> int:
    """Return the factor to divide by before a sum over ``world_size`` ranks.

    For FP16, this is the smallest power of two that is not below the square root of the number of
    ranks. The other dtypes have the range of FP32, in which a division loses nothing: they are
    divided by the number of ranks, so that the sum of finite values is finite.
    """
    if not fp16:
        return world_size
    return 1 << ((world_size - 1).bit_length() + 1) // 2  # 2 ** ceil(log2(p) / 2)
