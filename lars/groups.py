"""Parameter groups: which tensors decay and which adapt.

Weight decay on biases and on the gain and bias of norm layers costs accuracy at large batches
(Jia et al. 2018, section on batch normalisation: +1.3 points on AlexNet without it), and every
MLPerf LARS leaves the trust ratio off for the same tensors: :func:`is_bias_or_norm`, the default.

Outside ResNets and EfficientNets there are more such tensors. The layer scales of ConvNeXt and the
class token of a ViT start at or near 0, and with steps in proportion to their norm would not get
away from there soon: :func:`is_vector` has them too. Position tables adapt, but timm's ViTs declare
that they do not decay: :func:`is_vector_or_position`. For these models::

    split_parameters(model, 0.05, no_decay=is_vector_or_position, no_adapt=is_vector)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

Predicate = Callable[[nn.Module, str, nn.Parameter], bool]

_NORMS = (
    nn.modules.batchnorm._NormBase,  # batch norm and instance norm of any dimension
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


def is_bias_or_norm(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a bias, or belongs to a norm layer.

    Args:
        module: the module that holds the parameter itself.
        name: the parameter's full name in the model.
        parameter: the parameter.

    A norm layer is known by its class (torch's norms and their subclasses) or, for norms written
    from scratch, by "Norm" in the name of its class; a linear layer or convolution that has it
    there normalises its own weight, and is none.
    """
    return (
        _own_name(name).endswith("bias")
        or isinstance(module, _NORMS)
        or ("Norm" in type(module).__name__ and not isinstance(module, _LAYERS))
    )


def is_vector(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a bias, belongs to a norm layer, or is another vector or number.

    A vector has at most one axis longer than 1, so that layer scales of shape ``[C, 1, 1]`` and
    class tokens of shape ``[1, 1, C]`` count. Weights with two axes or more do not, whatever
    their lengths: a linear layer with one output has a matrix all the same.

    It finds all that timm's rule finds (biases, and whatever has at most one axis).
    """
    if is_bias_or_norm(module, name, parameter) or parameter.ndim <= 1:
        return True
    longer = sum(size > 1 for size in parameter.shape)
    return longer <= 1 and "weight" not in _own_name(name)


def is_vector_or_position(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a vector (:func:`is_vector`) or a position table of a ViT.

    Such a table is added to every image of a batch, hence its shape: ``[1, ..., channels]``.
    """
    table = parameter.ndim > 2 and parameter.shape[0] == 1 and "weight" not in _own_name(name)
    return table or is_vector(module, name, parameter)


def split_parameters(
    model: nn.Module,
    weight_decay: float,
    no_decay: Predicate = is_bias_or_norm,
    no_adapt: Predicate = is_bias_or_norm,
) -> list[dict[str, Any]]:
    """Parameter groups of ``model`` for :class:`~largebatch.lars.LARS` or any torch optimizer.

    Args:
        model: its parameters that require a gradient are taken, a shared one once,
            where the first module holds it.
        weight_decay: for the parameters that decay; the others get 0.
        no_decay: which parameters do not decay.
        no_adapt: which parameters take the plain learning rate, without a trust ratio.

    Returns:
        Groups with ``params`` as ``(name, parameter)`` pairs, ``weight_decay`` and ``adapt``, one
        for each combination that occurs, in the order of the model's first parameter of each.
        :func:`describe` shows them.

    Example, with what a timm model declares as well::

        declared = model.no_weight_decay()
        groups = split_parameters(
            model, 0.05, no_decay=lambda m, name, p: name in declared or is_vector(m, name, p)
        )
    """
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{own_name}" if prefix else own_name
            decays = not no_decay(module, name, parameter)
            adapts = not no_adapt(module, name, parameter)
            group = groups.setdefault(
                (decays, adapts),
                {"params": [], "weight_decay": weight_decay if decays else 0.0, "adapt": adapts},
            )
            group["params"].append((name, parameter))
    return list(groups.values())


def describe(groups: Iterable[Mapping[str, Any]]) -> str:
    """A table of what decays and what adapts: a line for each tensor, then one for each group.

    Args:
        groups: from :func:`split_parameters`, or the ``param_groups`` of an optimizer. Parameters
            without a name are called ``group<i>.<j>``, as in :meth:`LARS.trust_ratios`.
    """
    rows = [("parameter", "shape", "decays", "adapts")]
    totals = []
    for index, group in enumerate(groups):
        decays = "yes" if group.get("weight_decay", 0.0) else "no"
        adapts = "yes" if group.get("adapt", True) else "no"
        numbers = 0
        for name, parameter in named(group, index):
            shape = " x ".join(str(size) for size in parameter.shape) or "scalar"
            rows.append((name, shape, decays, adapts))
            numbers += math.prod(parameter.shape)
        totals.append((f"{len(group['params'])} tensors", f"{numbers:,} numbers", decays, adapts))
    widths = [max(len(row[column]) for row in rows + totals) for column in range(4)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (rows[0], rule, *rows[1:], rule, *totals)
    )


def named(group: Mapping[str, Any], index: int) -> list[tuple[str, Tensor]]:
    """The parameters of a group with their names, which stand in either of torch's two places."""
    names = group.get("param_names") or [f"group{index}.{j}" for j in range(len(group["params"]))]
    return [
        entry if isinstance(entry, tuple) else (name, entry)
        for name, entry in zip(names, group["params"], strict=True)
    ]


def _own_name(name: str) -> str:
    return name.rpartition(".")[2]
