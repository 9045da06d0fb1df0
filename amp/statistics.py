"""Running statistics of modules in training mode, put back where a step is skipped.

A forward pass that overflows leaves infinities and NaNs in the running statistics of batch norm,
and in whatever else modules keep of their inputs. The skipped step does not mend them, since they
are no parameters, and a running average never forgets a NaN.

Hooks on the model notice each forward pass that trains. They are plain functions, so copies and
pickles of a model and of its parts have them too, and belong to the first precision that steps
after their first forward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import skips
from .gradients import moved, parameters_of

#: Larger buffers (queues, memory banks) are copied only if the caller names them.
MOST_ELEMENTS = 1_000_000
#: Attribute of a module: the names of its buffers that the caller has named.
_NAMED = "_largebatch_put_back"

_Buffers = dict[str, Tensor | None]
Skips = Callable[[nn.Module], Tensor | bool | None]


class _Copies:
    """Buffers of a module and of those below it, as they were before an iteration.

    Attributes:
        modules: those in training mode whose buffers are here.
    """

    def __init__(self) -> None:
        self.modules: WeakSet[nn.Module] = WeakSet()
        # Where each buffer of one device and dtype is, and their former values, flat in a row. The
        # places do not refer to modules, so that copies never keep a model alive.
        self._groups: list[tuple[list[tuple[_Buffers, str, Tensor]], Tensor]] = []

    @torch.no_grad()
    def add(self, modules: Sequence[nn.Module]) -> None:
        """Copy the statistics of modules."""
        self.modules.update(modules)
        groups: dict[Any, list[tuple[_Buffers, str, Tensor]]] = defaultdict(list)
        for module in modules:
            for name, buffer in _statistics_of(module):
                groups[buffer.device, buffer.dtype].append((module._buffers, name, buffer))
        self._groups += [(places, _flat([p[2] for p in places])) for places in groups.values()]

    @torch.no_grad()
    def put_back(self, skipped: Tensor | bool) -> None:
        """Put back all where ``skipped`` (0-d) is true, and else values that are not finite now.

        The latter are of a batch that the caller has dropped without a word.
        """
        known = skipped is True or (
            isinstance(skipped, Tensor) and skips.is_free_to_read(skipped) and bool(skipped)
        )
        for places, before in self._groups:
            # A module may have replaced a tensor, even by one of another form.
            now = [buffers.get(name) for buffers, name, _ in places]
            pairs = [(tensor, was) for tensor, (_, _, was) in zip(now, places, strict=True)]
            flat = _flat([tensor if _alike(tensor, was) else was for tensor, was in pairs])
            here = moved(skipped, before.device) if isinstance(skipped, Tensor) else skipped
            back = ~flat.isfinite() | here
            if skips.is_free_to_read(back) and not back.any():
                continue
            values = torch.where(back, before, flat).split([was.numel() for _, was in pairs])
            changed, into = [], []
            for (buffers, name, was), is_now, part in zip(places, now, values, strict=True):
                value = part if was.dim() == 1 else part.view(was.shape)
                if is_now is was:  # in place: a CUDA graph reads there
                    if 0 not in was.stride():  # an expanded tensor takes no values
                        into.append(was)
                        changed.append(value)
                elif known or _alike(is_now, was):
                    buffers[name] = value.clone()
            if into:
                torch._foreach_copy_(into, changed)


#: Copies of iterations that have begun, by the outermost module that has been called.
_begun: WeakKeyDictionary[nn.Module, _Copies] = WeakKeyDictionary()
#: The precision's statistics that a model belongs to.
_owners: WeakKeyDictionary[nn.Module, ReferenceType[Statistics]] = WeakKeyDictionary()


class Statistics:
    """The models of a precision, and what an iteration changes in their running statistics.

    A copied or pickled one has no models: their hooks bring them back.
    """

    @property
    def models(self) -> list[nn.Module]:
        """The models that there still are."""
        return [model for model, owner in list(_owners.items()) if owner() is self]

    def watch(self, model: nn.Module, hooks: bool, named: Iterable[str] = ()) -> None:
        """Take a model over, with hooks for loops that enter no context, and for its copies."""
        _owners[model] = ref(self)
        for name in named:
            path, _, buffer = name.rpartition(".")
            module = model.get_submodule(path)
            setattr(module, _NAMED, (*getattr(module, _NAMED, ()), buffer))
        for module in model.modules() if hooks else ():
            has_hook = _before_forward in module._forward_pre_hooks.values()
            if (module is model or module._buffers) and not has_hook:
                module.register_forward_pre_hook(_before_forward)

    def remember(self) -> None:
        """Copy the buffers of all models, once in an iteration, before a pass that trains."""
        if torch.is_grad_enabled():
            for model in self.models:
                _remember(model)

    def end(self, optimizers: Sequence[Optimizer], skips_of: Skips) -> None:
        """End the iteration of some optimizers; the host does not wait for an accelerator.

        Args:
            optimizers: the optimizers that have stepped.
            skips_of: whether a model's step was skipped (0-d); None to leave its buffers as they
                are, even if they are not finite.
        """
        for model in list(_begun):
            if self._takes(model, optimizers):
                copies, skipped = _begun.pop(model), skips_of(model)
                if skipped is not None:
                    copies.put_back(skipped)

    def _takes(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
        """Take a model over if it is nobody's or these optimizers', and say whether it is ours."""
        owners = [
            owner()
            for whole, owner in list(_owners.items())
            if whole is model or any(module is model for module in whole.modules())
        ]
        if self in owners:
            return True
        own = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
        if any(owners) and own.isdisjoint(map(id, model.parameters())):
            return False
        _owners[model] = ref(self)
        return True


def _before_forward(module: nn.Module, args: object) -> None:
    # Not while the model is compiled, where Precision.forward has remembered it.
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        _remember(module)


def _remember(model: nn.Module) -> None:
    begun = [copies.modules for copies in _begun.values()]
    if any(model in modules for modules in begun):
        return
    new = [
        module
        for module in model.modules()
        if (module._buffers or module is model)
        and module.training
        and not any(module in modules for modules in begun)
    ]
    if new:
        _begun.setdefault(model, _Copies()).add(new)


def _statistics_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return what a module is taken to keep of its inputs, by name.

    These are its buffers that are not large if a floating one is among them (with what counts
    batches, therefore), and those that the caller has named.
    """
    small: list[tuple[str, Tensor]] = []
    named: list[tuple[str, Tensor]] = []
    floats, names = False, getattr(module, _NAMED, ())
    for name, buffer in module._buffers.items():  # buffers() would take ten times as long
        if buffer is None or buffer.numel() == 0:
            continue
        if name in names:
            named.append((name, buffer))
        elif buffer.numel() <= MOST_ELEMENTS:
            small.append((name, buffer))
            floats = floats or buffer.is_floating_point()
    return named + small if floats else named


def _alike(tensor: Tensor | None, other: Tensor) -> TypeGuard[Tensor]:
    return tensor is other or (
        tensor is not None
        and (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
    )


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])
