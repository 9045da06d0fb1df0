"""The ``LARS`` optimizer: parameter groups, state, FP32 master weights and overflow handling.

The arithmetic of a step is in :mod:`~largebatch.lars.reference` (the definition, after You et al.
2017) and in the fast implementations, which must agree with it; this file makes it a
:class:`torch.optim.Optimizer`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import foreach, fused, reference
from .groups import adapts, named
from .reference import DENOMINATORS, DIALECTS, Hyper
from .sharding import Layout, layout_of, local, sum_over
from .triton import step as triton_update

_IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "reference": reference.update,
    "foreach": foreach.update,
    "fused": fused.update,
    "triton": triton_update.update,
}
_HYPER = tuple(name for name in Hyper.__dataclass_fields__ if name != "previous_lr")
_HALF = (torch.float16, torch.bfloat16)
_CORRECTED = "mlperf-corrected"


class _Kind(NamedTuple):
    """The properties that tensors must share to be updated in one batch."""

    device: torch.device
    dtype: torch.dtype
    layout: Layout
    adapts: bool


class _Ratios(NamedTuple):
    """The trust ratios of one batch of tensors in the last step, on their device."""

    names: list[str]
    values: Tensor
    adapts: bool


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv 1708.03888).

    The step of each tensor is scaled by the ratio of its weight norm to its gradient norm, so that
    the relative change is similar in all layers. This lets momentum SGD keep its accuracy at batch
    sizes of many thousands.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or groups of either. A group may set any
            option below except ``master_weights`` and ``implementation``.
            :func:`~largebatch.lars.split_parameters` makes the usual groups.
        lr: learning rate, >= 0, a number or a 0-d tensor.
        momentum: momentum coefficient, in [0, 1).
        weight_decay: L2 coefficient, >= 0. The decay is added to the gradient before the trust
            ratio is applied, and is part of the ratio's denominator.
        trust_coefficient: the paper's eta, > 0.
        eps: added to the denominator of the trust ratio, >= 0.
        dialect: ``"mlperf"`` (learning rate inside the momentum buffer), ``"mlperf-corrected"``
            (inside, with the buffer rescaled when the learning rate changes, as in NVIDIA's MLPerf
            submissions), ``"torch"`` (outside, as in timm's ``Lars``) or ``"larc"`` (apex LARC
            with clipping) or ``"simclr-popular"`` (outside, with the trust ratio of the momentum).
            :mod:`largebatch.lars.reference` defines them. Learning rates tuned with a schedule do
            not carry over from one dialect to another.
        nesterov: use Nesterov momentum; needs ``momentum > 0``.
        trust_clip: let each tensor that adapts take the smaller of its trust ratio and ``lr`` as
            its learning rate, in place of their product (apex LARC's "clip", timm's
            ``trust_clip``).
        denominator: of the trust ratio: ``"sum-of-norms"``, ||g|| + weight decay · ||w||, as in
            the LARS paper and MLPerf, or ``"norm-of-sum"``, ||g + weight decay · w||, as in SimCLR,
            VICReg, Barlow Twins and optax. They agree where the weight decay is 0.
        decay_at_zero_norm: whether a tensor that adapts, but whose gradient is zero, decays. False
            is the rule of apex LARC, lightly and torch_optimizer.
        maximize: maximize the objective, as in :class:`torch.optim.SGD`.
        adapt: whether the trust ratio applies, independently of ``weight_decay``. None: to tensors
            of two dimensions or more, so that biases and norm layers take the plain learning rate,
            as in every MLPerf LARS, whoever made the groups.
        master_weights: keep an FP32 master of each half-precision parameter in the optimizer's
            state, update the master, and round it into the parameter. The momentum buffer is then
            FP32.
        implementation: ``"reference"``, ``"foreach"`` (any device), ``"fused"`` (CPU),
            ``"triton"`` (CUDA), or ``"auto"``: the fastest one installed for the device. Sharded
            parameters (DTensor, as made by FSDP2) always use ``"foreach"``, with norms summed over
            their shards.

    Works with :class:`torch.amp.GradScaler`: gradients are unscaled before their norms are taken,
    and a step with an overflow changes nothing, without a host sync on an accelerator. Gradients
    are never modified. Parameters without a gradient are skipped. To change the learning rate of a
    captured CUDA graph, pass ``lr`` as a tensor on the device.

    Raises:
        ValueError: an option is out of its range or, in :meth:`step`, the implementation does not
            run on the parameters' device.
        TypeError: a parameter is complex or, in :meth:`step`, a gradient is sparse or sharded
            differently from its parameter. Nothing has been changed then.

    Example::

        groups = split_parameters(model, weight_decay=5e-5)
        optimizer = LARS(groups, lr=10.5, momentum=0.9)
    """

    # GradScaler then calls step() directly and leaves unscaling and skipping to it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 0.0,
        dialect: str = "mlperf",
        nesterov: bool = False,
        trust_clip: bool = False,
        denominator: str = "sum-of-norms",
        decay_at_zero_norm: bool = True,
        maximize: bool = False,
        adapt: bool | None = None,
        master_weights: bool = False,
        implementation: str = "auto",
    ) -> None:
        names = ("auto", *_IMPLEMENTATIONS)
        if implementation not in names:
            raise ValueError(f"implementation {implementation!r} is not one of {', '.join(names)}")
        self._master_weights = master_weights
        self._implementation = implementation
        self._ratios: dict[tuple[int, int], _Ratios] = {}
        defaults: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "dialect": dialect,
            "nesterov": nesterov,
            "trust_clip": trust_clip,
            "denominator": denominator,
            "decay_at_zero_norm": decay_at_zero_norm,
            "maximize": maximize,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_master_weights", "_implementation", "_ratios")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, with the same checks as in the constructor.

        Raises:
            ValueError: an option is out of its range.
            TypeError: a parameter is complex.
        """
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for name, parameter in named(self.param_groups[-1], len(self.param_groups) - 1):
            if parameter.is_complex():
                self.param_groups.pop()
                raise TypeError(f"parameter {name} is complex; LARS takes real parameters")
        group = self.param_groups[-1]
        if group["dialect"] == _CORRECTED and "previous_lr" not in group:
            # State of the group. A tensor, because only the device knows whether a step overflowed.
            device = group["params"][0].device
            group["previous_lr"] = torch.zeros((), dtype=torch.float64, device=device)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Check all gradients before any parameter changes.
        batches = [_batches(group, index) for index, group in enumerate(self.param_groups)]
        kinds = {kind for of_group in batches for kind in of_group}
        update = {kind: self._implementation_for(kind) for kind in kinds}
        for index, group in enumerate(self.param_groups):
            if group["dialect"] == _CORRECTED and batches[index]:
                # The model may have been moved to its device after the optimizer was made.
                group["previous_lr"] = group["previous_lr"].to(next(iter(batches[index])).device)
            for number, (kind, batch) in enumerate(batches[index].items()):
                self._update((index, number), group, kind, batch, update[kind])
            if group["dialect"] == _CORRECTED and batches[index]:
                _remember_lr(group, getattr(self, "found_inf", None))
        return loss

    def _update(
        self,
        key: tuple[int, int],
        group: dict[str, Any],
        kind: _Kind,
        batch: list[tuple[str, Tensor]],
        update: Callable[..., Tensor],
    ) -> None:
        names = [name for name, _ in batch]
        parameters = [parameter for _, parameter in batch]
        grad_scale, found_inf = (
            None if value is None else value.to(kind.device, non_blocking=True)
            for value in (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        )
        weights, buffers = self._prepare(parameters, momentum=group["momentum"])
        hyper = {name: group[name] for name in _HYPER} | {"adapt": kind.adapts}
        if group["dialect"] == _CORRECTED:
            hyper["previous_lr"] = group["previous_lr"].to(kind.device, non_blocking=True)
        ratios = update(
            group["dialect"],
            local(weights),
            local([p.grad for p in parameters if p.grad is not None]),
            local(buffers),
            Hyper(**hyper),
            None if grad_scale is None else grad_scale.reciprocal(),
            found_inf,
            local(parameters) if weights[0] is not parameters[0] else (),
        )
        if found_inf is not None and key in self._ratios and self._ratios[key].names == names:
            last = self._ratios[key].values
            ratios = torch.where(found_inf > 0, last, ratios)
            if not torch.compiler.is_compiling() and triton_update.captures(last.device):
                ratios = last.copy_(ratios)  # a CUDA graph reads them at this address
        self._ratios[key] = _Ratios(names, ratios, kind.adapts)

    def _implementation_for(self, kind: _Kind) -> Callable[..., Tensor]:
        name = self._implementation
        if kind.layout is not None:
            return partial(foreach.update, sum_over_shards=sum_over(kind.layout))
        if name == "auto":
            if torch.compiler.is_compiling():
                name = "foreach"  # the only fast one that can be traced
            elif kind.device.type == "cpu":
                name = "fused"
            else:
                name = "triton" if triton_update.runs_on(kind.device) else "foreach"
        if (name == "fused" and kind.device.type != "cpu") or (
            name == "triton" and not triton_update.runs_on(kind.device)
        ):
            raise ValueError(
                f"implementation {name!r} does not run on {kind.device}; valid there: auto, "
                "foreach, reference"
            )
        return _IMPLEMENTATIONS[name]

    @property
    def master_weights(self) -> bool:
        """Whether the optimizer keeps FP32 masters of half-precision parameters."""
        return self._master_weights

    def trust_ratios(self) -> dict[str, float]:
        """Return the trust ratio of every tensor in the last step that was not skipped, by name.

        Names are those given with the parameters, else ``group<i>.<j>``. The dict is empty before
        the first step. This call waits for the device; the step itself does not.
        """
        return {
            name: ratio
            for names, ratios, _ in self._ratios.values()
            for name, ratio in zip(names, ratios.tolist(), strict=True)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of any implementation, with or without master weights.

        Raises:
            ValueError: the state is for other parameters or another dialect. Nothing has been
                changed then.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved_groups = state_dict["param_groups"]
        saved_ids = [i for group in saved_groups for i in group["params"]]
        if len(saved_ids) == len(parameters):
            for parameter, saved_id in zip(parameters, saved_ids, strict=True):
                for key, value in state_dict["state"].get(saved_id, {}).items():
                    if value.shape != parameter.shape:
                        raise ValueError(
                            f"{key} of parameter {saved_id} has shape {tuple(value.shape)} in the "
                            f"loaded state, but the parameter has {tuple(parameter.shape)}"
                        )
        for group, saved in zip(self.param_groups, saved_groups, strict=False):
            dialect = saved.get("dialect", group["dialect"])
            if dialect != group["dialect"]:
                raise ValueError(
                    f"the loaded state is of dialect {dialect!r}, this optimizer of dialect "
                    f"{group['dialect']!r}; their momentum buffers are not interchangeable"
                )
        super().load_state_dict(state_dict)
        # The base class casts state to the parameter's dtype, which masters must not be.
        for parameter, saved_id in zip(parameters, saved_ids, strict=True):
            saved_state = state_dict["state"].get(saved_id, {})
            state = self.state[parameter]
            if "momentum_buffer" in saved_state:
                state["momentum_buffer"] = saved_state["momentum_buffer"].to(
                    parameter.device, self._buffer_dtype(parameter), copy=True
                )
            if "master" in saved_state and self._has_master(parameter):
                state["master"] = saved_state["master"].to(
                    parameter.device, torch.float32, copy=True
                )
            else:
                state.pop("master", None)

    def _has_master(self, parameter: Tensor) -> bool:
        return self._master_weights and parameter.dtype in _HALF

    def _buffer_dtype(self, parameter: Tensor) -> torch.dtype:
        return torch.float32 if self._has_master(parameter) else parameter.dtype

    def _prepare(
        self, parameters: list[Tensor], *, momentum: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors to update and their momentum buffers (none without momentum)."""
        weights, buffers = [], []
        for parameter in parameters:
            state = self.state[parameter]
            if self._has_master(parameter) and "master" not in state:
                state["master"] = parameter.detach().to(torch.float32)
            if momentum > 0 and "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(
                    parameter, dtype=self._buffer_dtype(parameter)
                )
            weights.append(state.get("master", parameter))
            if momentum > 0:
                buffers.append(state["momentum_buffer"])
        return weights, buffers


def _check_options(options: dict[str, Any]) -> None:
    for name, valid, rule in (
        ("lr", options["lr"] >= 0, ">= 0"),
        ("momentum", 0 <= options["momentum"] < 1, "in [0, 1)"),
        ("weight_decay", options["weight_decay"] >= 0, ">= 0"),
        ("trust_coefficient", options["trust_coefficient"] > 0, "> 0"),
        ("eps", options["eps"] >= 0, ">= 0"),
        ("dialect", options["dialect"] in DIALECTS, "one of " + ", ".join(DIALECTS)),
        (
            "denominator",
            options["denominator"] in DENOMINATORS,
            "one of " + ", ".join(DENOMINATORS),
        ),
        (
            "nesterov",
            not options["nesterov"] or options["momentum"] > 0,
            "False unless momentum > 0",
        ),
    ):
        if not valid:
            raise ValueError(f"{name} must be {rule}, not {options[name]!r}")


def _batches(group: dict[str, Any], index: int) -> dict[_Kind, list[tuple[str, Tensor]]]:
    """Return the named parameters of a group that have a gradient, batched by kind."""
    batches = defaultdict(list)
    for name, parameter in named(group, index):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise TypeError(f"the gradient of {name} is sparse; LARS takes dense gradients")
        kind = _Kind(
            parameter.device, parameter.dtype, layout_of(parameter), adapts(group, parameter)
        )
        if layout_of(gradient) != kind.layout:
            raise TypeError(
                f"the gradient of {name} is sharded as {layout_of(gradient)}, the parameter "
                f"as {kind.layout}; both must be sharded alike"
            )
        batches[kind].append((name, parameter))
    return batches


def _remember_lr(group: dict[str, Any], found_inf: Tensor | None) -> None:
    """Store the current learning rate as the previous one, unless the step was skipped."""
    previous = group["previous_lr"]
    lr = torch.ones_like(previous) * group["lr"]
    if found_inf is not None:
        lr = torch.where(found_inf.to(previous.device, non_blocking=True) > 0, previous, lr)
    previous.copy_(lr)  # in place: a CUDA graph reads it at this address
