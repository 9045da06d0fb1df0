"""FP16 arithmetic as on tensor cores, at the speed of a CPU's FP32 arithmetic.

A CPU without FP16 instructions multiplies FP16 matrices at least ten times slower than FP32 ones.
Inside ``fp16_with_fp32_sums()``, convolutions and matrix products of FP16 tensors are computed in
FP32 and rounded to FP16 once, in forward and backward: inputs and outputs are FP16, sums FP32. All
other operators are unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
}


class _FP32Sums(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _PRODUCTS or not any(_is_fp16(value) for value in args):
            return function(*args, **kwargs)
        result = function(*tree_map(_to_fp32, args), **tree_map(_to_fp32, kwargs))
        return tree_map(lambda v: v.half() if isinstance(v, Tensor) else v, result)


def fp16_with_fp32_sums() -> TorchDispatchMode:
    """Return the context in which to train."""
    return _FP32Sums()


def _is_fp16(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float16


def _to_fp32(value: Any) -> Any:
    return value.float() if _is_fp16(value) else value
