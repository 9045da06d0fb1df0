"""The frame of an optimizer that updates each layer by norms or matrices of its own.

It batches the tensors of each group, reads overflow flags without a host sync, keeps the ratios of
the last step, and loads state dicts. :class:`~largebatch.lars.LARS` and
:class:`~largebatch.lars.Muon` add the arithmetic.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import capture
from .batches import Batch, Kind, Ratios, after_step, batches_of
from .groups import has_names, named
from .implementations import IMPLEMENTATIONS, implementation_for, triton_error_on_any
from .masters import Written, with_current_masters
from .memory import moved
from .options import check_parameter, check_rate
from .state import plain, restore_dtypes

Overflow = tuple[Tensor | None, Tensor | None]


class LayerwiseOptimizer(Optimizer):
    """Base class; see :mod:`largebatch.lars.layerwise`."""

    # GradScaler then calls step() directly and leaves unscaling and skipping to it.
    _step_supports_amp_scaling = True

    _implementation = "auto"
    _master_weights: bool
    _ratios: dict[tuple[int, int], Ratios]
    #: Attributes that are pickled with the optimizer.
    _own: tuple[str, ...] = ("_implementation", "_master_weights", "_ratios")

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._ratios = {}
        self._written = Written(type(self).__name__)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; where only some have names, the others get ``group<i>.<j>``."""
        known = len(self.param_groups)
        nameless = []
        if isinstance(param_group, dict) and not isinstance(param_group["params"], set):
            params = param_group["params"]
            param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
            groups = enumerate((*self.param_groups, param_group))
            nameless = [(i, group) for i, group in groups if not has_names(group)]
            nameless = nameless if len(nameless) <= known else []
        for index, group in nameless:
            group["param_names"] = [name for name, _ in named(group, index)]
        try:
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            for name, parameter in named(group, known):
                check_parameter(name, parameter, type(self).__name__)
                if group.get("orthogonal", False) and parameter.dim() < 2:
                    raise ValueError(
                        f"parameter {name} has {parameter.dim()} dimensions, and only matrices and "
                        "convolutions are orthogonalised; valid: orthogonal=False in its group, as "
                        "split_parameters(model, ..., orthogonal=hidden_weights(model)) sets it"
                    )
        except (TypeError, ValueError):
            del self.param_groups[known:]
            for _, group in nameless:
                del group["param_names"]
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._written = Written(type(self).__name__)  # forgets steps before a load
        self.defaults.pop("differentiable", None)  # set by the base class; there is no such option

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Check all rates and gradients before any parameter changes.
        for group in () if torch.compiler.is_compiling() else self.param_groups:
            check_rate(group["lr"])
        name = type(self).__name__
        batches = [batches_of(group, i, name) for i, group in enumerate(self.param_groups)]
        self._prepare(batches)
        devices = {kind.device for of_group in batches for kind in of_group}
        overflow = {device: self._overflow(device) for device in devices}
        traced = torch.compiler.is_compiling() or any(map(capture.captures, devices))
        if self._master_weights and not traced:
            self._written.take_over(self.state)
        for index, group in enumerate(self.param_groups):
            self._update_group(index, group, batches[index], overflow)
        if self._master_weights and not traced:
            self._written.note(self.state)
        updated = {(i, j) for i, of_group in enumerate(batches) for j in range(len(of_group))}
        # Not replaced: torch.compile of torch 2.11 cannot set an attribute of an optimizer.
        for key in [key for key in self._ratios if key not in updated]:
            del self._ratios[key]
        return loss

    def _prepare(self, batches: Sequence[Mapping[Kind, Batch]]) -> None:
        """Check what a step needs, before anything changes."""
        for group, of_group in zip(self.param_groups, batches, strict=True):
            for kind in of_group if takes_step_of_lars(group) else ():
                implementation_for(self._implementation, kind, group.get("dialect", "torch"))

    def _update_group(
        self,
        index: int,
        group: dict[str, Any],
        batches: Mapping[Kind, Batch],
        overflow: Mapping[torch.device, Overflow],
    ) -> None:
        """Update the parameters of group number ``index``, and keep their trust ratios."""
        for number, (kind, batch) in enumerate(batches.items()):
            key, of_device = (index, number), overflow[kind.device]
            ratios = self._step_of(group, kind, batch, of_device)
            if ratios is not None:
                self._ratios[key] = after_step(
                    self._ratios.get(key),
                    batch.places,
                    ratios,
                    adapts=kind.adapts or group.get("orthogonal", False),
                    found_inf=of_device[1],
                    captured=capture.captures(kind.device),
                )

    @abstractmethod
    def _step_of(
        self, group: dict[str, Any], kind: Kind, batch: Batch, overflow: Overflow
    ) -> Tensor | None:
        """Update a batch of a group; return its trust ratios, or None where it has none."""

    @abstractmethod
    def _converted(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict that can be loaded, or raise ValueError."""

    def _overflow(self, device: torch.device) -> Overflow:
        """Return the reciprocal of the loss scale and the overflow flag, as GradScaler set them."""
        scale, found_inf = (
            None if value is None else moved(value, device)
            for value in (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        )
        return None if scale is None else scale.reciprocal(), found_inf

    @property
    def implementation(self) -> str:
        """The implementation of LARS's steps; it may be set between steps, alike on all ranks."""
        return self._implementation

    @implementation.setter
    def implementation(self, name: str) -> None:
        names = ("auto", *IMPLEMENTATIONS)
        if name not in names:
            raise ValueError(f"implementation {name!r} is not one of {', '.join(names)}")
        self._implementation = name

    def triton_launch_error(self) -> str | None:
        """Try once to launch Triton's kernels on these devices; return why it fails, or None."""
        groups = [group for group in self.param_groups if takes_step_of_lars(group)]
        devices = {parameter.device for group in groups for parameter in group["params"]}
        return triton_error_on_any(devices)

    @property
    def master_weights(self) -> bool:
        """Whether the optimizer keeps FP32 masters of half-precision parameters."""
        return self._master_weights

    def trust_ratios(self) -> dict[str, float]:
        """Return the trust ratio of every tensor in the last step that was not skipped, by name.

        Names are those given with the parameters, else ``group<i>.<j>``. Tensors that had no
        gradient in that step are left out. This call waits for the device; the step does not.
        """
        return {
            name: ratio
            for (index, _), (places, ratios, *_) in sorted(self._ratios.items())
            for name, ratio in zip(self._names(index, places), ratios.tolist(), strict=True)
        }

    def _names(self, index: int, places: Iterable[int]) -> list[str]:
        """Return the names of the parameters at some places of a group."""
        pairs = named(self.param_groups[index], index)
        return [pairs[place][0] for place in places]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with masters that have the parameters' values and no numbers of NumPy.

        Where a parameter has changed since the last step, its master here does too, but not in the
        optimizer. This call waits for the device.
        """

        def refresh(_: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
            content = with_current_masters(content, self.param_groups)
            return {**content, "param_groups": plain(content["param_groups"])}

        handle = self.register_state_dict_post_hook(refresh, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict.

        Hooks run as in any torch optimizer: what the pre-hooks return is loaded, and the post-hooks
        see the finished state.

        Raises:
            ValueError: the state is for other parameters, or of another optimizer. Nothing has
                been changed then.
        """
        loaded: dict[str, Any] = {}

        def convert(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            loaded.update(self._converted(state_dict))
            return loaded

        # After the user's pre-hooks and before the user's post-hooks.
        before = self.register_load_state_dict_pre_hook(convert)
        after = self.register_load_state_dict_post_hook(
            lambda _: restore_dtypes(self.state, self.param_groups, loaded, self._master_weights),
            prepend=True,
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()


def takes_step_of_lars(group: Mapping[str, Any]) -> bool:
    """Whether a group of LARS or Muon is updated by an implementation of LARS, as is SGD."""
    return not group.get("orthogonal", False) and group.get("rule") != "adamw"
