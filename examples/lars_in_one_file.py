"""LARS in one file to copy: torch alone, for any model, in its two common forms.

LARS (You et al. 2017, arXiv 1708.03888) gives each layer a step in proportion to the norm of its
weights. With w the weight, g the gradient, l the weight decay, v the momentum buffer, m the
momentum and t the trust coefficient::

    q = t ||w|| / (||g|| + l ||w||),  or 1 where a norm is zero and for biases and norm layers

    dialect "mlperf":  v = m v + lr q (g + l w),  w = w - v     (You et al.; MLPerf's reference)
    dialect "torch":   v = m v + q (g + l w),     w = w - lr v  (torch.optim.SGD; timm's Lars)

The two agree while the learning rate is constant, and differ where it changes: do not carry
hyper-parameters over from one to the other. ``largebatch.lars`` has this and more: FP32 masters,
GradScaler without a host sync, fused kernels, sharded parameters, other dialects. A test holds
this file to it.

    optimizer = LARS(groups(model, weight_decay=5e-5), lr=10.5)

Run as a program, it fits a small convolutional network to random labels.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: biases and norm layers neither decay nor use the trust ratio.

    Args:
        model: the model. Parameters without a gradient are left out.
        weight_decay: coefficient of the others.
    """
    matrices, vectors = [], []
    seen: set[int] = set()  # weights may be shared
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                is_vector = isinstance(module, NORMS) or name.endswith("bias")
                (vectors if is_vector else matrices).append(parameter)
    exempt = {"params": vectors, "weight_decay": 0.0, "adapt": False}
    return [{"params": matrices, "weight_decay": weight_decay, "adapt": True}, exempt]


class LARS(Optimizer):
    """LARS for any torch scheduler; ``lr`` is read from the groups in each step.

    Args:
        params: what any torch optimizer takes, such as :func:`groups`. A group may set any option.
        lr: the global learning rate.
        momentum: momentum coefficient.
        weight_decay: coefficient of the groups that set none.
        trust_coefficient: t above.
        adapt: whether groups that do not say so use the trust ratio.
        dialect: ``"mlperf"`` or ``"torch"``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        adapt: bool = True,
        dialect: str = "mlperf",
    ) -> None:
        if dialect not in ("mlperf", "torch"):
            raise ValueError(f"dialect must be mlperf or torch, not {dialect!r}")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        defaults |= {"trust_coefficient": trust_coefficient, "adapt": adapt, "dialect": dialect}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Take a step; gradients stay as they are, and nothing waits for the device."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            inside = group["dialect"] == "mlperf"
            for parameter in group["params"]:
                if parameter.grad is not None:
                    step = parameter.grad + group["weight_decay"] * parameter
                    if group["adapt"]:
                        step *= self._trust_ratio(parameter, group)
                    state = self.state[parameter]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    buffer = state["momentum_buffer"].mul_(group["momentum"])
                    buffer.add_(step, alpha=group["lr"] if inside else 1.0)
                    parameter.sub_(buffer, alpha=1.0 if inside else group["lr"])
        return loss

    @staticmethod
    def _trust_ratio(parameter: Tensor, group: dict[str, Any]) -> Tensor:
        weight, gradient = parameter.norm(), parameter.grad.norm()
        ratio = group["trust_coefficient"] * weight / (gradient + group["weight_decay"] * weight)
        return torch.where((weight > 0) & (gradient > 0), ratio, 1.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    images, labels = torch.randn(64, 3, 8, 8), torch.arange(64) % 10
    layers = nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(32 * 36, 10))
    optimizer = LARS(groups(model, weight_decay=5e-5), lr=5.0)
    for _ in range(50):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")
