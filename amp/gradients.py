"""The norm of gradients in FP32, and operations on tensors that may be sharded.

FP16 does not hold the norm of scaled gradients: 65504 is its largest number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

#: Added to the norm when gradients are clipped, as in torch.nn.utils.clip_grad_norm_.
_EPS = 1e-6


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters, without those that have none."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Compute the norm of all gradients as one vector, 0-d, FP32; a collective if sharded."""
    groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if not is_sharded(gradient) and gradient.numel() == 0:
            continue  # an empty tensor has no largest value
        key: tuple[Any, ...] = (gradient.device, gradient.dtype)
        if is_sharded(gradient):
            key += (gradient.device_mesh, tuple(gradient.placements))  # type: ignore[attr-defined]
        groups[key].append(gradient)
    totals = [torch.zeros((), device=gradients[0].device)]
    for group in groups.values():
        # Not narrower than the gradients, which torch refuses.
        dtype = torch.promote_types(group[0].dtype, torch.float32)
        if is_sharded(group[0]):  # torch has no multi-tensor norm in another dtype for DTensors
            norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype) for g in group]
        else:
            norms = list(torch._foreach_norm(group, norm_type, dtype=dtype))
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        totals.append(whole(norm).float())
    device = gradients[0].device
    norms = [moved(total, device) for total in totals]
    total_of_all: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total_of_all


@torch.no_grad()
def multiply_(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a 0-d tensor, in place."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        part = local(gradient)
        groups[part.device, part.dtype].append(part)
    for (device, _), group in groups.items():
        torch._foreach_mul_(group, moved(factor, device))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return ``max_norm / norm``, at most 1, as in :func:`torch.nn.utils.clip_grad_norm_`."""
    return torch.clamp(max_norm / (norm + _EPS), max=1.0)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; writing to it writes to the tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor; of a sharded one, a collective over the ranks that hold it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``; the host waits for the copy only if that is the CPU."""
    # A copy to the CPU that does not wait may be read before it has arrived.
    return tensor.to(device, non_blocking=device.type != "cpu")
