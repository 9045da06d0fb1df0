"""LARS entirely in FP16 arithmetic, for comparison: Jia et al. 2018 warn against it.

The formula is that of :mod:`largebatch.lars.reference`, dialect ``mlperf``. Every tensor is FP16,
including norms, ratio and products, and gradients are unscaled in FP16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch.lars import split_parameters
from largebatch.recipes.schema.recipe import Recipe


class FP16LARS(Optimizer):
    """LARS whose arithmetic is in the dtype of each parameter."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter, unless a gradient overflowed."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad if scale is None else p.grad / scale.to(p.dtype)
                g = g + group["weight_decay"] * p
                if group["adapt"]:
                    weight, gradient = p.norm(), (g - group["weight_decay"] * p).norm()
                    ratio = (
                        group["trust_coefficient"]
                        * weight
                        / (gradient + group["weight_decay"] * weight)
                    )
                    g = torch.where((weight > 0) & (gradient > 0), ratio, 1.0).to(p.dtype) * g
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(group["lr"] * g)
                p.sub_(buffer)


def fp16_lars(recipe: Recipe, model: nn.Module, device_type: str) -> Optimizer:
    """Build the optimizer of a recipe; replaces ``training.build.build_optimizer``."""
    options = recipe.optimizer
    defaults = {
        "lr": options.lr,
        "momentum": options.momentum,
        "trust_coefficient": options.trust_coefficient,
        "adapt": True,
    }
    return FP16LARS(split_parameters(model, options.weight_decay), defaults)
