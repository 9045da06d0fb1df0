"""Parameter groups: which tensors decay and which adapt.

Weight decay on biases and on the gain and bias of norm layers costs accuracy at large batches
(Jia et al. 2018, section on batch normalisation: +1.3 points on AlexNet without it), and every
MLPerf LARS leaves the trust ratio off for the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Predicate = Callable[[nn.Module, str, nn.Parameter], bool]

_NORMS = (
    nn.modules.batchnorm._NormBase,  # batch norm and instance norm of any dimension
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def is_bias_or_norm(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a bias, or belongs to a norm layer.

    Args:
        module: the module that holds the parameter itself.
        name: the parameter's full name in the model.
        parameter: the parameter.

    A norm layer is known by its class (torch's norms and their subclasses) or, for norms written
    from scratch, by "Norm" in the name of its class.
    """
    return (
        name.rpartition(".")[2].endswith("bias")
        or isinstance(module, _NORMS)
        or "Norm" in type(module).__name__
    )


def split_parameters(
    model: nn.Module,
    weight_decay: float,
    no_decay: Predicate = is_bias_or_norm,
    no_adapt: Predicate = is_bias_or_norm,
) -> list[dict[str, Any]]:
    """Parameter groups of ``model`` for :class:`~largebatch.lars.LARS` or any torch optimizer.

    Args:
        model: its parameters that require a gradient are taken, a shared one once.
        weight_decay: for the parameters that decay; the others get 0.
        no_decay: which parameters do not decay.
        no_adapt: which parameters take the plain learning rate, without a trust ratio.

    Returns:
        Groups with ``params`` as ``(name, parameter)`` pairs, ``weight_decay`` and ``adapt``, one
        for each combination that occurs, in the order of the model's first parameter of each.
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
