"""Muon in one file to copy: torch alone, for models with convolutions too.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum of each hidden
layer by the nearest orthogonal matrix, so that a step changes all singular directions of the layer
alike. A convolution ``[out, in, height, width]`` is the matrix ``[out, in * height * width]``. With
w the weight, g the gradient, b the momentum buffer, m the momentum and l the weight decay::

    b = m b + (1 - m) g
    u = m b + (1 - m) g                                       (Nesterov momentum)
    O = U V^T of u = U S V^T, by five Newton-Schulz iterations
    w = (1 - lr l) w - lr sqrt(max(1, rows / columns)) O

Biases, norm layers, the first layer and the classifier take a step of SGD with momentum, at their
own multiple of the learning rate. ``largebatch.lars`` has this and more: FP32 masters, GradScaler
without a host sync, work shared between ranks, other factors and coefficients. A test holds this
file to it.

    optimizer = Muon(groups(model, weight_decay=0.01, sgd_scale=5.0), lr=0.02)

Run as a program, it fits a small convolutional network to random labels.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
JORDAN = (3.4445, -4.7750, 2.0315)  # the steepest slope at zero; singular values end in 0.7 to 1.2


def groups(model: nn.Module, weight_decay: float, sgd_scale: float = 1.0) -> list[dict[str, Any]]:
    """Return three parameter groups: hidden weights, other weights, and biases and norm layers.

    Hidden are the weights of linear layers and convolutions, except for the first and the last of
    them in the order of registration, and grouped convolutions, which are not one matrix.

    Args:
        model: the model. Parameters without a gradient are left out.
        weight_decay: coefficient of all weights; it is decoupled for hidden ones.
        sgd_scale: learning rate of the other groups as a multiple of Muon's.
    """
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    inner = {m.weight for m in layers[1:-1] if getattr(m, "groups", 1) == 1}
    hidden, weights, vectors = [], [], []
    seen: set[int] = set()  # weights may be shared
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                is_vector = isinstance(module, NORMS) or name.endswith("bias")
                chosen = hidden if parameter in inner else vectors if is_vector else weights
                chosen.append(parameter)
    sgd = {"orthogonal": False, "lr_factor": sgd_scale}
    return [
        {"params": hidden, "weight_decay": weight_decay, "orthogonal": True, "lr_factor": 1.0},
        {"params": weights, "weight_decay": weight_decay, **sgd},
        {"params": vectors, "weight_decay": 0.0, **sgd},
    ]


class Muon(Optimizer):
    """Muon, and SGD for groups with ``orthogonal=False``, for any torch scheduler.

    Args:
        params: :func:`groups`, or what any torch optimizer takes. A group may set any option.
        lr: the learning rate, which a group multiplies by its ``lr_factor``.
        momentum: momentum coefficient, of Nesterov's form.
        weight_decay: coefficient of the groups that set none.
        orthogonal: whether groups that do not say so are orthogonalised.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        orthogonal: bool = True,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "orthogonal": orthogonal, "lr_factor": 1.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Take a step; gradients stay as they are, and nothing waits for the device."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            lr, m = group["lr"] * group["lr_factor"], group["momentum"]
            decay, orthogonal = group["weight_decay"], group["orthogonal"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                if orthogonal:
                    buffer = state["momentum_buffer"].lerp_(gradient, 1 - m)
                    matrix = gradient.lerp(buffer, m).flatten(1)
                    scale = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
                    direction = orthogonalize(matrix).view_as(parameter)
                    parameter.mul_(1 - lr * decay).sub_(direction, alpha=lr * scale)
                else:
                    gradient = gradient + decay * parameter
                    buffer = state["momentum_buffer"].mul_(m).add_(gradient)
                    parameter.sub_(gradient.add(buffer, alpha=m), alpha=lr)
        return loss


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return about U V^T of ``matrix`` = U S V^T, ``[rows, columns]``; in BF16 on a GPU."""
    dtype = torch.bfloat16 if matrix.is_cuda else matrix.dtype
    x = (matrix / matrix.norm().clamp(min=torch.finfo(matrix.dtype).tiny)).to(dtype)
    x = x.mT if x.shape[0] > x.shape[1] else x
    a, b, c = JORDAN
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


if __name__ == "__main__":
    torch.manual_seed(0)
    images, labels = torch.randn(64, 3, 8, 8), torch.arange(64) % 10
    first = nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU()
    second = nn.Conv2d(32, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*first, *second, nn.Linear(32 * 16, 10))
    optimizer = Muon(groups(model, weight_decay=0.01, sgd_scale=5.0), lr=0.02)
    for _ in range(50):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")
