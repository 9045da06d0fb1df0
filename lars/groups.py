"""Parameter groups: which tensors decay, have a trust ratio ("adapt"), and are orthogonalised.

Weight decay on biases and on the gain and bias of norm layers costs accuracy at large batches
(Jia et al. 2018, section on batch normalisation: +1.3 points on AlexNet without it), and every
MLPerf LARS leaves the trust ratio off for the same tensors: :func:`is_bias_or_norm`, the default.

Models other than ResNets and EfficientNets have more such tensors. The layer scales of ConvNeXt
and the class token of a ViT start at or near 0, where steps in proportion to their norm would hold
them for long: :func:`is_vector` includes them. Position embeddings adapt, but timm's ViTs declare
that they do not decay: :func:`is_vector_or_position`. For these models::

    split_parameters(model, 0.05, no_decay=is_vector_or_position, no_adapt=is_vector)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

Predicate = Callable[[nn.Module, str, nn.Parameter], bool]

_NORMS = (
    nn.modules.batchnorm._NormBase,  # batch norm and instance norm of any dimension
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
# Norm layers of timm and torchvision that are no subclasses of torch's, by where they are defined.
_OTHER_NORMS = re.compile(
    r"timm\.layers\.(\w*norm\w*|grn|inplace_abn)\.|torchvision\.ops\.misc\.FrozenBatchNorm2d$"
)
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def is_bias_or_norm(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a bias or belongs to a norm layer.

    Args:
        module: the module that holds the parameter directly.
        name: the parameter's full name in the model.
        parameter: the parameter.

    The last part of a bias's name ends with ``bias`` or begins with ``bias_``, as in torch's
    recurrent and attention layers (``bias_ih_l0``, ``in_proj_bias``, ``bias_k``).

    Norm layers of torch, timm and torchvision, and their subclasses, own norm parameters of any
    shape. In other modules with "Norm" in the name of their class, those with at most one axis
    longer than 1 belong to a norm, and matrices are matrices (``NormedLinear``). Excepted are
    torch's linear layers and convolutions, which normalise their own weight, and blocks whose child
    modules have parameters (``ConvNormAct``). :mod:`largebatch.amp` has the same rule.
    """
    own_name = _own_name(name)
    return (
        own_name.endswith("bias")
        or own_name.startswith("bias_")
        or _is_known_norm(module)
        or (_is_called_norm(module) and sum(size > 1 for size in parameter.shape) <= 1)
    )


def _is_known_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or any(
        _OTHER_NORMS.match(f"{base.__module__}.{base.__name__}") for base in type(module).__mro__
    )


def _is_called_norm(module: nn.Module) -> bool:
    return (
        "Norm" in type(module).__name__
        and not isinstance(module, _LAYERS)
        and not any(True for child in module.children() for _ in child.parameters())
    )


def is_vector(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a bias, belongs to a norm layer, or is another vector or scalar.

    A vector has at most one axis longer than 1, which includes layer scales of shape ``[C, 1, 1]``
    and class tokens of shape ``[1, 1, C]``. A parameter named ``weight`` with two axes or more is
    never a vector, not even the one-row matrix of a linear layer with one output.

    Every parameter that timm excludes from weight decay by shape or name (biases, and tensors with
    at most one axis) is included.
    """
    if is_bias_or_norm(module, name, parameter) or parameter.ndim <= 1:
        return True
    longer = sum(size > 1 for size in parameter.shape)
    return longer <= 1 and "weight" not in _own_name(name)


def is_vector_or_position(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a vector (:func:`is_vector`) or a position embedding of a ViT.

    A position embedding is added to every image of a batch, hence its shape,
    ``[1, ..., channels]``.
    """
    table = parameter.ndim > 2 and parameter.shape[0] == 1 and "weight" not in _own_name(name)
    return table or is_vector(module, name, parameter)


def hidden_weights(model: nn.Module) -> Predicate:
    """Return the predicate of the weights that Muon is meant for: the matrices of hidden layers.

    They are the weights of linear layers and convolutions, and the input projections of
    :class:`torch.nn.MultiheadAttention`. Queries, keys and values that one layer computes are one
    matrix. Left out are:

    - the input layer: the first of the linear layers, convolutions and embeddings;
    - the classifiers: what ``model.get_classifier()`` returns, as timm's models have it, or else
      the last linear layer or convolution;
    - grouped (and depthwise) convolutions, whose weight is not one matrix, and transposed ones,
      whose rows are inputs;
    - weights with a single row or column, and whatever belongs to no such layer: embeddings,
      tokens, recurrent layers, and weights that are reparametrized.

    First and last are in the order in which the model's layers were registered, which is that of
    use in the models of timm and torchvision. Other layers, such as auxiliary classifiers, are
    left out by a predicate around this one::

        hidden = hidden_weights(model)
        groups = split_parameters(
            model, 5e-4, orthogonal=lambda m, name, p: hidden(m, name, p) and "aux" not in name
        )

    Args:
        model: the model, bare or in DDP.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    layers = [module for module in model.modules() if isinstance(module, (*_LAYERS, *_EMBEDDINGS))]
    outer = {id(p) for layer in (*layers[:1], *_classifiers(model)) for p in layer.parameters()}

    def is_hidden(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter is the matrix of a hidden layer."""
        if isinstance(module, nn.MultiheadAttention):
            is_weight = _own_name(name) in _PROJECTIONS
        else:
            is_weight = isinstance(module, _LAYERS) and parameter is module.weight
        return (
            is_weight
            and id(parameter) not in outer
            and getattr(module, "groups", 1) == 1
            and not getattr(module, "transposed", False)
            and min(parameter.shape[0], math.prod(parameter.shape[1:])) > 1
        )

    return is_hidden


def _classifiers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that compute the outputs of a model."""
    get: Any = getattr(model, "get_classifier", None)
    if get is None:
        layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, _LAYERS)]
        return layers[-1:]
    found = get()  # None or nn.Identity in a model without a head
    found = found if isinstance(found, list | tuple) else [found]
    return [module for module in found if isinstance(module, nn.Module)]


def split_parameters(
    model: nn.Module,
    weight_decay: float,
    no_decay: Predicate = is_bias_or_norm,
    no_adapt: Predicate = is_bias_or_norm,
    *,
    orthogonal: Predicate | None = None,
    named: bool = True,
) -> list[dict[str, Any]]:
    """Split the parameters of a model into groups for :class:`~largebatch.lars.LARS` or Muon.

    Any other torch optimizer takes the groups too, and ignores ``adapt``.

    Args:
        model: the model; only parameters that require a gradient are taken. A shared parameter is
            taken once, from the first module that holds it.
        weight_decay: weight decay of the parameters that decay; it is 0 for the others.
        no_decay: predicate that selects the parameters without weight decay.
        no_adapt: predicate that selects the parameters without a trust ratio, which take the
            plain learning rate.
        orthogonal: predicate that selects the parameters whose momentum
            :class:`~largebatch.lars.Muon` orthogonalises, such as ``hidden_weights(model)``.
        named: whether to put names into the groups, as torch's optimizers take them.
            :class:`torch.distributed.optim.ZeroRedundancyOptimizer` does not: pass False for it.

    Returns:
        Groups with ``params``, ``weight_decay``, ``adapt`` and, where it is given, ``orthogonal``,
        one for each combination that occurs, in the order of the model's first parameter of each.
        ``params`` are ``(name, parameter)`` pairs or, without names, parameters. In Muon, ``adapt``
        is for groups that are updated by LARS (``rule="lars"``), and has no effect elsewhere.
        :func:`describe` prints the groups as a table.

    Example that also follows what a timm model declares::

        declared = model.no_weight_decay()
        groups = split_parameters(
            model, 0.05, no_decay=lambda m, name, p: name in declared or is_vector(m, name, p)
        )
    """
    groups: dict[tuple[bool, ...], dict[str, Any]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{own_name}" if prefix else own_name
            decays = not no_decay(module, name, parameter)
            adapt = not no_adapt(module, name, parameter)
            options = {"weight_decay": weight_decay if decays else 0.0, "adapt": adapt}
            if orthogonal is not None:
                options["orthogonal"] = orthogonal(module, name, parameter)
            key = (decays, *(bool(value) for value in list(options.values())[1:]))
            group = groups.setdefault(key, {"params": [], **options})
            group["params"].append((name, parameter) if named else parameter)
    return list(groups.values())


def describe(groups: Iterable[Mapping[str, Any]]) -> str:
    """Return a table of which tensors decay, adapt and, in Muon's groups, are orthogonalised.

    A summary of each group follows.

    Args:
        groups: from :func:`split_parameters`, or the ``param_groups`` of an optimizer. Parameters
            without a name are called ``group<i>.<j>``, as in :meth:`LARS.trust_ratios`.
    """
    groups = list(groups)
    header = ["parameter", "shape", "decays", "adapts"]
    if any("orthogonal" in group for group in groups):
        header.append("orthogonal")
    rows, totals = [header], []
    for index, group in enumerate(groups):
        decays = "yes" if group.get("weight_decay", 0.0) else "no"
        last = ["yes" if group.get("orthogonal", True) else "no"] * (len(header) - 4)
        numbers = 0
        answers = set()
        for name, parameter in named(group, index):
            shape = " x ".join(str(size) for size in parameter.shape) or "scalar"
            answer = "yes" if adapts(group, parameter) else "no"
            rows.append([name, shape, decays, answer, *last])
            answers.add(answer)
            numbers += math.prod(parameter.shape)
        adapting = answers.pop() if len(answers) == 1 else "some"
        tensors = f"{len(group['params'])} tensors"
        totals.append([tensors, f"{numbers:,} numbers", decays, adapting, *last])
    widths = [max(len(row[i]) for row in rows + totals) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (rows[0], rule, *rows[1:], rule, *totals)
    )


def adapts(group: Mapping[str, Any], parameter: Tensor) -> bool:
    """Whether the trust ratio applies; by default to tensors of two dimensions or more."""
    adapt = group.get("adapt")
    return parameter.dim() > 1 if adapt is None else bool(adapt)


def named(group: Mapping[str, Any], index: int) -> list[tuple[str, Tensor]]:
    """Return the parameters of group number ``index`` with their names."""
    names = group.get("param_names") or [f"group{index}.{j}" for j in range(len(group["params"]))]
    return [
        entry if isinstance(entry, tuple) else (name, entry)
        for name, entry in zip(names, group["params"], strict=True)
    ]


def has_names(group: Mapping[str, Any]) -> bool:
    """Whether the parameters of a group have names, before or after the optimizer is built."""
    return "param_names" in group or any(isinstance(entry, tuple) for entry in group["params"])


def _own_name(name: str) -> str:
    before, parametrized, after = name.partition("parametrizations.")
    if parametrized:  # such as layer.parametrizations.bias.original
        return after.partition(".")[0]
    return before.rpartition(".")[2]
