"""The steps of other people's LARS, written out by formula, each beside its source.

They are oracles, for torch tensors of any dtype: tests/lars/test_conventions.py and
benchmarks/lars/crosschecks.py hold :class:`~largebatch.lars.LARS` to them, and to the libraries
themselves where those are installed. w is the weight, g the gradient, ``state.v`` the momentum
buffer. ``decay`` is that of the group. Each step returns the new weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass
class State:
    """What a step keeps of a tensor: its momentum buffer and the last learning rate."""

    v: Tensor
    last_lr: float | None = None


def _norm(x: Tensor) -> float:
    return (x * x).sum().sqrt().item()


def _sgd(w: Tensor, d: Tensor, state: State, lr: float, momentum: float, nesterov: bool) -> Tensor:
    """Take a step of torch.optim.SGD in the direction ``d``."""
    state.v = momentum * state.v + d
    return w - lr * (d + momentum * state.v if nesterov else state.v)


def you2017(
    w: Tensor, g: Tensor, state: State, lr: float, decay: float, momentum: float = 0.9
) -> Tensor:
    """You, Gitman, Ginsburg 2017, arXiv 1708.03888, algorithm 1, with eta = 0.001.

    It leaves open what happens where a norm is zero; there its authors' nvcaffe takes q = 1.
    """
    q = 1.0
    if _norm(w) > 0 and _norm(g) > 0:
        q = 0.001 * _norm(w) / (_norm(g) + decay * _norm(w))
    state.v = momentum * state.v + lr * q * (g + decay * w)
    return w - state.v


def mlperf(
    w: Tensor,
    g: Tensor,
    state: State,
    lr: float,
    decay: float,
    momentum: float = 0.9,
    nesterov: bool = False,
) -> Tensor:
    """mlcommons/training, image_classification/tensorflow2/lars_optimizer.py.

    ``epsilon or backend_config.epsilon()`` makes 1e-7 of its default 0. The skip list names batch
    norm and biases, which have one dimension. The buffer holds the negative of the usual one.
    """
    rate = lr
    if w.dim() > 1:
        if _norm(w) > 0 and _norm(g) > 0:
            rate = lr * (0.001 * _norm(w) / (_norm(g) + decay * _norm(w) + 1e-7))
        g = g + decay * w
    state.v = state.v * momentum - g * rate
    return w + state.v * momentum - g * rate if nesterov else w + state.v


def nvidia_mlperf(
    w: Tensor, g: Tensor, state: State, lr: float, decay: float, momentum: float = 0.9
) -> Tensor:
    """mlcommons/training_results_v0.7, NVIDIA/.../mxnet/common/fit.py, SGDwFASTLARS.

    The momentum is multiplied by cur_lr / last_lr. Names that end in gamma, beta or bias do not
    adapt, and only weights (and the bias of the last layer) decay.
    """
    if state.last_lr:
        momentum = momentum * lr / state.last_lr
    state.last_lr = lr
    rate = lr
    if w.dim() <= 1:
        decay = 0.0
    elif _norm(w) > 0 and _norm(g) > 0:
        rate = 0.001 * _norm(w) / (_norm(g) + decay * _norm(w)) * lr
    state.v = momentum * state.v - rate * (g + decay * w)
    return w + state.v


def mxnet(
    w: Tensor, g: Tensor, state: State, lr: float, decay: float, momentum: float = 0.0
) -> Tensor:
    """apache/mxnet v1.x, python/mxnet/optimizer/optimizer.py, LARS with momentum_correction.

    As :func:`nvidia_mlperf`, of which it was made; the correction is left out after a learning rate
    of 0.
    """
    return nvidia_mlperf(w, g, state, lr, decay, momentum)


def paddle(
    w: Tensor, g: Tensor, state: State, lr: float, decay: float, momentum: float = 0.9
) -> Tensor:
    """PaddlePaddle/Paddle, paddle/phi/kernels/cpu/lars_momentum_kernel.cc."""
    rate = lr
    if decay > 0 and _norm(w) > 0 and _norm(g) > 0:
        rate = lr * 0.001 * _norm(w) / (_norm(g) + decay * _norm(w))
    state.v = state.v * momentum + rate * (g + decay * w)
    return w - state.v


def simclr(
    w: Tensor,
    g: Tensor,
    state: State,
    lr: float,
    decay: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    classic_momentum: bool = True,
) -> Tensor:
    """google-research/simclr, lars_optimizer.py; model_util.py exempts batch norm and biases."""
    exempt = w.dim() <= 1
    if not exempt:
        g = g + decay * w
    if classic_momentum:
        q = 1.0 if exempt else _ratio(w, g)
        state.v = momentum * state.v + lr * q * g
        return w - (momentum * state.v + lr * q * g if nesterov else state.v)
    state.v = momentum * state.v + g
    update = momentum * state.v + g if nesterov else state.v
    q = 1.0 if exempt else _ratio(w, update)
    return w - lr * q * update


def _ratio(w: Tensor, update: Tensor) -> float:
    return 0.001 * _norm(w) / _norm(update) if _norm(w) > 0 and _norm(update) > 0 else 1.0


def vicreg(
    w: Tensor, g: Tensor, state: State, lr: float, decay: float, momentum: float = 0.9
) -> Tensor:
    """facebookresearch/vicreg, main_vicreg.py, with exclude_bias_and_norm: ndim == 1.

    facebookresearch/barlowtwins, main.py, and facebookresearch/dino, utils.py, have the same step.
    """
    if w.dim() != 1:
        g = g + decay * w
        g = g * _ratio(w, g)
    return _sgd(w, g, state, lr, momentum, False)


def moco_v3(
    w: Tensor,
    g: Tensor,
    state: State,
    lr: float,
    decay: float,
    momentum: float = 0.9,
    nesterov: bool = False,
) -> Tensor:
    """facebookresearch/moco-v3, moco/optimizer.py.

    google-deepmind/deepmind-research, byol/utils/optimizers.py, exempts by name, and has the same
    step without Nesterov momentum.
    """
    if w.dim() > 1:
        g = g + decay * w
        g = g * _ratio(w, g)
    return _sgd(w, g, state, lr, momentum, nesterov)


def torchlars(
    w: Tensor,
    g: Tensor,
    state: State,
    lr: float,
    decay: float,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> Tensor:
    """kakaobrain/torchlars, torchlars/lars.py and adaptive_lr_cuda.cu, around torch.optim.SGD."""
    q = 1.0
    if _norm(w) > 0 and _norm(g) > 0:
        q = _norm(w) / (_norm(g) + decay * _norm(w) + 1e-8) * 0.001
    return _sgd(w, (g + decay * w) * q, state, lr, momentum, nesterov)


def lightly(
    w: Tensor,
    g: Tensor,
    state: State,
    lr: float,
    decay: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    trust_coefficient: float = 0.001,
) -> Tensor:
    """lightly-ai/lightly, lightly/utils/lars.py.

    It follows Lightning-Universe/lightning-bolts, pl_bolts/optimizers/lars.py, as does
    jettify/pytorch-optimizer, torch_optimizer/lars.py, with a coefficient of 0.01.
    """
    if decay != 0 and _norm(w) != 0 and _norm(g) != 0:
        q = trust_coefficient * _norm(w) / (_norm(g) + _norm(w) * decay + 1e-8)
        g = (g + decay * w) * q
    return _sgd(w, g, state, lr, momentum, nesterov)


def solo_learn(
    w: Tensor,
    g: Tensor,
    state: State,
    lr: float,
    decay: float,
    momentum: float = 0.9,
    nesterov: bool = False,
) -> Tensor:
    """vturrisi/solo-learn, solo/utils/lars.py, with exclude_bias_n_norm_lars and its momentum."""
    if w.dim() != 1 and _norm(w) != 0 and _norm(g) != 0:
        q = 0.001 * _norm(w) / (_norm(g) + _norm(w) * decay + 1e-8)
        g = (g + decay * w) * q
    return _sgd(w, g, state, lr, momentum, nesterov)


def apex(
    w: Tensor,
    g: Tensor,
    state: State,
    lr: float,
    decay: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    trust_coefficient: float = 0.02,
    clip: bool = True,
) -> Tensor:
    """NVIDIA/apex, apex/parallel/LARC.py, around torch.optim.SGD.

    facebookresearch/swav, main_swav.py, has clip=False, coefficient 0.001 and momentum 0.9.
    """
    if _norm(w) != 0 and _norm(g) != 0:
        q = trust_coefficient * _norm(w) / (_norm(g) + _norm(w) * decay + 1e-8)
        if clip:
            q = min(q / lr, 1.0)
        g = (g + decay * w) * q
    return _sgd(w, g, state, lr, momentum, nesterov)


#: The steps by their name in :data:`largebatch.lars.CONVENTIONS`, with the defaults of each source.
STEPS: dict[str, Callable[..., Tensor]] = {
    "you2017": you2017,
    "mlperf": mlperf,
    "nvidia-mlperf": nvidia_mlperf,
    "mxnet": mxnet,
    "paddle": paddle,
    "simclr": simclr,
    "simclr-popular": partial(simclr, classic_momentum=False),
    "barlow-twins": vicreg,
    "vicreg": vicreg,
    "dino": vicreg,
    "moco-v3": moco_v3,
    "byol": moco_v3,
    "torchlars": torchlars,
    "torch-optimizer": partial(lightly, trust_coefficient=0.01),
    "lightly": lightly,
    "lightning-bolts": lightly,
    "solo-learn": solo_learn,
    "apex": apex,
    "apex-scale": partial(apex, momentum=0.9, trust_coefficient=0.001, clip=False),
}


class Published(Optimizer):
    """An optimizer of one of :data:`STEPS`; ``options`` go to the step."""

    def __init__(
        self, name: str, params: Iterable[Any], lr: float, weight_decay: float = 0.0, **options: Any
    ) -> None:
        self.take = partial(STEPS[name], **options)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter, one by one."""
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["state"] = State(torch.zeros_like(p))
                state = self.state[p]["state"]
                p.copy_(self.take(p.clone(), p.grad, state, group["lr"], group["weight_decay"]))


class Optax(Optimizer):
    """``optax.lars`` itself, in float64. Each group is exempted by its ``adapt``.

    jax runs threads, so import it in a process that does not fork later.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, **options: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "adapt": True})
        import jax
        import optax

        def update(
            lr: Any, decay: float, adapt: bool, gradients: Any, state: Any, weights: Any
        ) -> Any:
            lars = optax.lars(lr, decay, trust_ratio_mask=adapt, **options)
            state = lars.init(weights) if state is None else state
            updates, state = lars.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), state

        self.update = jax.jit(update, static_argnums=(1, 2))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every group by its own transformation."""
        import jax
        import numpy as np

        with jax.enable_x64(True):
            for group in self.param_groups:
                weights = [jax.numpy.asarray(p.numpy()) for p in group["params"]]
                gradients = [jax.numpy.asarray(p.grad.numpy()) for p in group["params"]]
                options = group["lr"], group["weight_decay"], group["adapt"]
                state = group.get("optax")
                new, group["optax"] = self.update(*options, gradients, state, weights)
                for p, values in zip(group["params"], new, strict=True):
                    p.copy_(torch.from_numpy(np.array(values)))
