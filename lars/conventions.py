"""What other libraries mean by LARS: the table behind :meth:`largebatch.lars.LARS.like`.

Published forms of LARS differ in the formula (see :mod:`~largebatch.lars.reference`), in the
defaults, and in which tensors they exempt. Each row of :data:`CONVENTIONS` states one of them in
the options of :class:`~largebatch.lars.LARS`, as read in the source that it names. Tests hold each
row to that library, or to its formula, over 40 steps in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

#: Which tensors have a trust ratio. Those exempt by their dimensions do not decay either.
ADAPTING = {
    "all": "all",
    "matrices": "2 or more dimensions",
    "not vectors": "all but 1 dimension",
    "decayed": "weight decay not 0",
}


@dataclass(frozen=True)
class Convention:
    """How a library or project computes LARS, in the options of :class:`~largebatch.lars.LARS`.

    No library uses Nesterov momentum by default.

    Attributes:
        library: the library or project, and the class where it has several.
        source: the file that says so.
        dialect: option of :class:`~largebatch.lars.LARS`, as are the next five, which have the
            default of the library's class or of the project's training script.
        adapting: which tensors have a trust ratio, a key of :data:`ADAPTING`.
        note: what else a reader should know.
    """

    library: str
    source: str
    dialect: str
    momentum: float = 0.9
    trust_coefficient: float = 1e-3
    eps: float = 0.0
    denominator: str = "sum-of-norms"
    decay_at_zero_norm: bool = True
    adapting: str = "all"
    note: str = ""


_NORM_OF_SUM = "norm-of-sum"
_BY_NAME = "It exempts biases and batch norm by name, `LARS.like` by their dimensions."

# Two forms that many have: in self-supervised learning, and around torch's SGD.
_self_supervised = partial(Convention, dialect="torch", denominator=_NORM_OF_SUM)
_around_sgd = partial(Convention, dialect="torch", momentum=0.0, eps=1e-8)

#: The conventions by the name that :meth:`largebatch.lars.LARS.like` takes.
CONVENTIONS: dict[str, Convention] = {
    "you2017": Convention("You, Gitman, Ginsburg 2017, algorithm 1", "arXiv 1708.03888", "mlperf"),
    "mlperf": Convention(
        "MLPerf reference (TensorFlow)",
        "mlcommons/training, image_classification/tensorflow2/lars_optimizer.py",
        "mlperf",
        eps=1e-7,
        adapting="matrices",
        note=f"{_BY_NAME} Its default eps of 0 becomes Keras's, 1e-7; MLPerf's rules say 0.",
    ),
    "nvidia-mlperf": Convention(
        "NVIDIA's MLPerf submissions (MXNet), SGDwFASTLARS",
        "mlcommons/training_results_v0.7, NVIDIA/benchmarks/resnet/implementations/mxnet/"
        "common/fit.py",
        "mlperf-corrected",
        adapting="matrices",
        note=f"{_BY_NAME} It decays the bias of the last layer.",
    ),
    "mxnet": Convention(
        "Apache MXNet 1.x, LARS",
        "apache/mxnet (v1.x), python/mxnet/optimizer/optimizer.py",
        "mlperf-corrected",
        momentum=0.0,
        adapting="matrices",
        note=f"{_BY_NAME} MXNet 2 dropped the correction of the momentum: dialect mlperf.",
    ),
    "paddle": Convention(
        "PaddlePaddle, LarsMomentumOptimizer",
        "PaddlePaddle/Paddle, paddle/phi/kernels/cpu/lars_momentum_kernel.cc",
        "mlperf",
        adapting="decayed",
        note="It has no default momentum, and a default weight decay of 5e-4.",
    ),
    "optax": Convention(
        "optax.lars",
        "google-deepmind/optax, optax/_src/alias.py",
        "mlperf",
        denominator=_NORM_OF_SUM,
        note="Its masks are the groups' `weight_decay` and `adapt` here.",
    ),
    "simclr": Convention(
        "SimCLR, LARSOptimizer",
        "google-research/simclr, lars_optimizer.py, model_util.py",
        "mlperf",
        denominator=_NORM_OF_SUM,
        adapting="matrices",
        note=_BY_NAME,
    ),
    "simclr-popular": Convention(
        "SimCLR, LARSOptimizer with classic_momentum=False",
        "google-research/simclr, lars_optimizer.py",
        "simclr-popular",
        adapting="matrices",
        note=_BY_NAME,
    ),
    "barlow-twins": _self_supervised(
        "Barlow Twins",
        "facebookresearch/barlowtwins, main.py",
        adapting="not vectors",
        note="Learning rates of 0.2 for weights and 0.0048 for vectors, which are its two groups.",
    ),
    "vicreg": _self_supervised(
        "VICReg", "facebookresearch/vicreg, main_vicreg.py", adapting="not vectors"
    ),
    "dino": _self_supervised("DINO", "facebookresearch/dino, utils.py", adapting="not vectors"),
    "moco-v3": _self_supervised(
        "MoCo v3", "facebookresearch/moco-v3, moco/optimizer.py", adapting="matrices"
    ),
    "byol": _self_supervised(
        "BYOL",
        "google-deepmind/deepmind-research, byol/utils/optimizers.py",
        adapting="matrices",
        note=_BY_NAME,
    ),
    "timm": _around_sgd(
        "timm, Lars",
        "huggingface/pytorch-image-models, timm/optim/lars.py",
        adapting="decayed",
        note="Its `always_adapt=True` is `adapt=True` here.",
    ),
    "torchlars": _around_sgd(
        "torchlars around SGD", "kakaobrain/torchlars, torchlars/lars.py, adaptive_lr_cuda.cu"
    ),
    "pytorch-optimizer": Convention(
        "pytorch_optimizer, LARS",
        "kozistr/pytorch_optimizer, pytorch_optimizer/optimizer/lars.py",
        "torch",
        adapting="matrices",
        note="Where the gradient is zero, its ratio is coefficient / weight decay, and ours 1.",
    ),
    "torch-optimizer": _around_sgd(
        "torch_optimizer, LARS",
        "jettify/pytorch-optimizer, torch_optimizer/lars.py",
        trust_coefficient=0.01,
        decay_at_zero_norm=False,
        adapting="decayed",
        note="Its docstring says 0.001.",
    ),
    "lightly": _around_sgd(
        "lightly, LARS",
        "lightly-ai/lightly, lightly/utils/lars.py",
        decay_at_zero_norm=False,
        adapting="decayed",
    ),
    "solo-learn": Convention(
        "solo-learn, LARS with exclude_bias_n_norm_lars=True",
        "vturrisi/solo-learn, solo/utils/lars.py",
        "torch",
        eps=1e-8,
        decay_at_zero_norm=False,
        adapting="not vectors",
        note="Its `eta` is `trust_coefficient` here, its `clip_lars_lr=True` is `trust_clip=True`.",
    ),
    "lightning-bolts": _around_sgd(
        "Lightning Bolts, LARS",
        "Lightning-Universe/lightning-bolts, pl_bolts/optimizers/lars.py",
        decay_at_zero_norm=False,
        adapting="decayed",
    ),
    "apex": Convention(
        "apex, LARC around SGD",
        "NVIDIA/apex, apex/parallel/LARC.py",
        "larc",
        momentum=0.0,
        trust_coefficient=0.02,
        eps=1e-8,
        decay_at_zero_norm=False,
        note="The rate of a tensor is the smaller of its ratio and the learning rate.",
    ),
    "apex-scale": Convention(
        "apex, LARC with clip=False, as in SwAV",
        "facebookresearch/swav, main_swav.py",
        "torch",
        eps=1e-8,
        decay_at_zero_norm=False,
        note="Momentum and coefficient are SwAV's; apex's own coefficient is 0.02.",
    ),
}


def arguments(library: str, params: Iterable[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of LARS, except ``lr``, for a row of :data:`CONVENTIONS`."""
    if library not in CONVENTIONS:
        raise ValueError(f"library must be one of {', '.join(CONVENTIONS)}, not {library!r}")
    convention = CONVENTIONS[library]
    names = ["dialect", "momentum", "trust_coefficient", "eps", "denominator", "decay_at_zero_norm"]
    values = {name: getattr(convention, name) for name in names} | dict(options)
    if convention.adapting == "all":
        values.setdefault("adapt", True)  # of groups that are added later, too
    return values | {"params": _groups(convention.adapting, params, options)}


def _groups(adapting: str, params: Any, options: Mapping[str, Any]) -> Any:
    """Set ``adapt`` in groups without it, and split groups of which a part is exempt."""
    if isinstance(params, Tensor):
        return params
    entries = list(params)
    if entries and not isinstance(entries[0], dict):
        entries = [{"params": entries}]
    groups = []
    for group in entries:
        if "adapt" in group or isinstance(group["params"], set):
            groups.append(group)
            continue
        weight_decay = group.get("weight_decay", options.get("weight_decay", 0.0))
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        for adapts in (True, False):
            part = [m for m in members if _adapts(adapting, m, weight_decay) is adapts]
            if not part and (members or not adapts):
                continue
            changes: dict[str, Any] = {"params": part}
            if "adapt" not in options:
                changes["adapt"] = adapts
            if not adapts:
                changes["weight_decay"] = 0.0
            groups.append({**group, **changes})
    return groups


def _adapts(adapting: str, member: Any, weight_decay: float) -> bool:
    tensor = member[1] if isinstance(member, tuple) else member
    if adapting == "decayed":
        return weight_decay != 0
    if adapting == "all" or not isinstance(tensor, Tensor):
        return True
    return tensor.dim() > 1 or (adapting == "not vectors" and tensor.dim() == 0)
