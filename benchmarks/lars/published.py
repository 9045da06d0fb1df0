"""The steps of other people's LARS, written out by formula, each beside its source.

They are oracles, for torch tensors of any dtype: tests/lars/test_conventions.py holds
:class:`~largebatch.lars.LARS` to them, and to the libraries themselves where those are installed. w
is the weight, g the gradient, ``s.v`` the momentum buffer. Each step returns the new weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass
class State:
    """What a step keeps of a tensor: its momentum buffer and the last learning rate."""

    v: Tensor
    last_lr: float | None = None


@dataclass
class Options:
    """What a step is given beside its tensors; ``decay`` is that of the group."""

    lr: float
    decay: float
    momentum: float = 0.9
    nesterov: bool = False
    trust_coefficient: float = 0.001


def _norm(x: Tensor) -> float:
    return (x * x).sum().sqrt().item()


def _sgd(w: Tensor, d: Tensor, s: State, o: Options) -> Tensor:
    """Take a step of torch.optim.SGD in the direction ``d``."""
    s.v = o.momentum * s.v + d
    return w - o.lr * (d + o.momentum * s.v if o.nesterov else s.v)


def _ratio(w: Tensor, g: Tensor, o: Options, decay: float = 0.0, eps: float = 0.0) -> float:
    """Return the trust ratio with a sum of norms in the denominator; 1 where a norm is zero."""
    if _norm(w) == 0 or _norm(g) == 0:
        return 1.0
    return o.trust_coefficient * _norm(w) / (_norm(g) + decay * _norm(w) + eps)


def you2017(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """You, Gitman, Ginsburg 2017, arXiv 1708.03888, algorithm 1, with eta = 0.001.

    It leaves open what happens where a norm is zero; there its authors' nvcaffe takes a ratio of 1.
    """
    s.v = o.momentum * s.v + o.lr * _ratio(w, g, o, o.decay) * (g + o.decay * w)
    return w - s.v


def mlperf(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """mlcommons/training, image_classification/tensorflow2/lars_optimizer.py.

    ``epsilon or backend_config.epsilon()`` makes 1e-7 of its default 0. The skip list names batch
    norm and biases, which have one dimension. The buffer holds the negative of the usual one.
    """
    rate = o.lr
    if w.dim() > 1:
        rate = o.lr * _ratio(w, g, o, o.decay, 1e-7)
        g = g + o.decay * w
    s.v = s.v * o.momentum - g * rate
    return w + s.v * o.momentum - g * rate if o.nesterov else w + s.v


def nvidia_mlperf(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """mlcommons/training_results_v0.7, NVIDIA/.../mxnet/common/fit.py, SGDwFASTLARS.

    The momentum is multiplied by cur_lr / last_lr. Names that end in gamma, beta or bias do not
    adapt, and only weights (and the bias of the last layer) decay. apache/mxnet v1.x,
    python/mxnet/optimizer/optimizer.py, LARS with momentum_correction, was made of it; there the
    correction is left out after a learning rate of 0.
    """
    momentum = o.momentum * o.lr / s.last_lr if s.last_lr else o.momentum
    s.last_lr = o.lr
    decay = o.decay if w.dim() > 1 else 0.0
    rate = o.lr * (_ratio(w, g, o, decay) if w.dim() > 1 else 1.0)
    s.v = momentum * s.v - rate * (g + decay * w)
    return w + s.v


def paddle(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """PaddlePaddle/Paddle, paddle/phi/kernels/cpu/lars_momentum_kernel.cc."""
    rate = o.lr * (_ratio(w, g, o, o.decay) if o.decay > 0 else 1.0)
    s.v = s.v * o.momentum + rate * (g + o.decay * w)
    return w - s.v


def simclr(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """google-research/simclr, lars_optimizer.py; model_util.py exempts batch norm and biases."""
    exempt = w.dim() <= 1
    g = g if exempt else g + o.decay * w
    update = o.lr * (1.0 if exempt else _ratio(w, g, o)) * g
    s.v = o.momentum * s.v + update
    return w - (o.momentum * s.v + update if o.nesterov else s.v)


def simclr_popular(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """The same file with ``classic_momentum=False``."""
    exempt = w.dim() <= 1
    g = g if exempt else g + o.decay * w
    s.v = o.momentum * s.v + g
    update = o.momentum * s.v + g if o.nesterov else s.v
    return w - o.lr * (1.0 if exempt else _ratio(w, update, o)) * update


def vicreg(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """facebookresearch/vicreg, main_vicreg.py, with exclude_bias_and_norm: ndim == 1.

    facebookresearch/barlowtwins, main.py, and facebookresearch/dino, utils.py, have the same step.
    """
    if w.dim() != 1:
        g = g + o.decay * w
        g = g * _ratio(w, g, o)
    return _sgd(w, g, s, o)


def moco_v3(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """facebookresearch/moco-v3, moco/optimizer.py.

    google-deepmind/deepmind-research, byol/utils/optimizers.py, exempts by name, and has the same
    step without Nesterov momentum.
    """
    if w.dim() > 1:
        g = g + o.decay * w
        g = g * _ratio(w, g, o)
    return _sgd(w, g, s, o)


def torchlars(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """kakaobrain/torchlars, torchlars/lars.py and adaptive_lr_cuda.cu, around torch.optim.SGD."""
    return _sgd(w, (g + o.decay * w) * _ratio(w, g, o, o.decay, 1e-8), s, o)


def lightly(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """lightly-ai/lightly, lightly/utils/lars.py.

    It follows Lightning-Universe/lightning-bolts, pl_bolts/optimizers/lars.py, as does
    jettify/pytorch-optimizer, torch_optimizer/lars.py, with a coefficient of 0.01.
    """
    if o.decay != 0 and _norm(w) != 0 and _norm(g) != 0:
        g = (g + o.decay * w) * _ratio(w, g, o, o.decay, 1e-8)
    return _sgd(w, g, s, o)


def solo_learn(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """vturrisi/solo-learn, solo/utils/lars.py, with exclude_bias_n_norm_lars and its momentum."""
    if w.dim() != 1 and _norm(w) != 0 and _norm(g) != 0:
        g = (g + o.decay * w) * _ratio(w, g, o, o.decay, 1e-8)
    return _sgd(w, g, s, o)


def apex_scale(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """NVIDIA/apex, apex/parallel/LARC.py, around torch.optim.SGD, with ``clip=False``.

    facebookresearch/swav, main_swav.py, has a coefficient of 0.001 and momentum 0.9.
    """
    if _norm(w) != 0 and _norm(g) != 0:
        g = (g + o.decay * w) * _ratio(w, g, o, o.decay, 1e-8)
    return _sgd(w, g, s, o)


def apex(w: Tensor, g: Tensor, s: State, o: Options) -> Tensor:
    """The same, with ``clip=True``: the ratio over the rate is at most 1, and 1 at a rate of 0."""
    if _norm(w) != 0 and _norm(g) != 0:
        g = (g + o.decay * w) * (min(_ratio(w, g, o, o.decay, 1e-8) / o.lr, 1.0) if o.lr else 1.0)
    return _sgd(w, g, s, o)


Step = Callable[[Tensor, Tensor, State, Options], Tensor]

#: The steps by their name in :data:`largebatch.lars.CONVENTIONS`, with the defaults of each source
#: where they are not those of :class:`Options`.
STEPS: dict[str, tuple[Step, dict[str, float]]] = {
    "you2017": (you2017, {}),
    "mlperf": (mlperf, {}),
    "nvidia-mlperf": (nvidia_mlperf, {}),
    "mxnet": (nvidia_mlperf, {"momentum": 0.0}),
    "paddle": (paddle, {}),
    "simclr": (simclr, {}),
    "simclr-popular": (simclr_popular, {}),
    "barlow-twins": (vicreg, {}),
    "vicreg": (vicreg, {}),
    "dino": (vicreg, {}),
    "moco-v3": (moco_v3, {}),
    "byol": (moco_v3, {}),
    "torchlars": (torchlars, {"momentum": 0.0}),
    "torch-optimizer": (lightly, {"momentum": 0.0, "trust_coefficient": 0.01}),
    "lightly": (lightly, {"momentum": 0.0}),
    "lightning-bolts": (lightly, {"momentum": 0.0}),
    "solo-learn": (solo_learn, {}),
    "apex": (apex, {"momentum": 0.0, "trust_coefficient": 0.02}),
    "apex-scale": (apex_scale, {}),
}


class Published(Optimizer):
    """An optimizer of one of :data:`STEPS`; ``options`` go to the step."""

    def __init__(
        self, name: str, params: Iterable[Any], lr: float, weight_decay: float = 0.0, **options: Any
    ) -> None:
        self.take, defaults = STEPS[name]
        self.options = defaults | options
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter, one by one."""
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["state"] = State(torch.zeros_like(p))
                given = Options(group["lr"], group["weight_decay"], **self.options)
                p.copy_(self.take(p.clone(), p.grad, self.state[p]["state"], given))


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
