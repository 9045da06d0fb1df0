"""The step of AdamW (Loshchilov & Hutter 2019) on tensors that Muon leaves to it, by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .. import capture
from ..memory import laid_out_as, moved, packed, store
from ..reference import compute_dtype
from ..sharding import local
from ..state import States, buffer_dtype

AVERAGES = ("exp_avg", "exp_avg_sq")


def prepare(
    states: States,
    parameters: Sequence[Tensor],
    *,
    master_weights: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return this rank's averages and step counts (0-d, FP32); make missing ones."""
    dtype = buffer_dtype(parameters[0], master_weights)
    for parameter in parameters:
        state = states[parameter]
        if "step" not in state:
            capture.refuse(parameter.device, "has no averages of some parameters")
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in AVERAGES:
                state[name] = torch.zeros_like(parameter, dtype=dtype)
        state["step"] = moved(state["step"], parameter.device)
    of = [states[parameter] for parameter in parameters]
    exp_avgs, exp_avg_sqs = (local([state[name] for state in of]) for name in AVERAGES)
    return exp_avgs, exp_avg_sqs, [state["step"] for state in of]


def update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
    options: Mapping[str, Any],
    inverse_scale: Tensor | None,
    found_inf: Tensor | None,
    halves: Sequence[Tensor],
) -> None:
    """Take one step in place, unless it overflowed; ``averages`` are from :func:`prepare`."""
    beta1, beta2 = options["betas"]
    lr = options["lr"]
    exp_avgs, exp_avg_sqs, steps = averages
    # The kernel walks through the memory of all four in one order, and does not check it on a CPU.
    # A loaded state, or that of a model that was moved to channels_last, may be in another order.
    w = [packed(weight) for weight in weights]
    g, first, second = (
        [laid_out_as(a, b, a.dtype) for a, b in zip(w, tensors, strict=True)]
        for tensors in (gradients, exp_avgs, exp_avg_sqs)
    )
    if inverse_scale is not None:
        scale = inverse_scale.to(compute_dtype(weights[0]))
        g = [(gradient * scale).to(gradient.dtype) for gradient in g]
    adamw(
        w,
        g,
        first,
        second,
        [],
        list(steps),
        foreach=False,
        fused=True,
        # The kernel skips where the flag is 1, and subtracts it from the step counts.
        found_inf=None if found_inf is None else (found_inf > 0).float(),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr.float() if isinstance(lr, Tensor) else lr,  # the kernel takes no FP64 tensor
        weight_decay=options["weight_decay"],
        eps=1e-8 if options["eps"] is None else options["eps"],
        maximize=options["maximize"],
    )
    for kept, updated in ((weights, w), (exp_avgs, first), (exp_avg_sqs, second)):
        for tensor, value in zip(kept, updated, strict=True):
            if value is not tensor:
                tensor.copy_(value)
    if halves:
        store(halves, w, found_inf)
