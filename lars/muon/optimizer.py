"""The ``Muon`` optimizer: hidden layers by orthogonalised momentum, and the rest by another rule.

The arithmetic of a step is in :mod:`~largebatch.lars.muon.reference` (the definition, after Jordan
et al. 2024) and in the fast path :mod:`~largebatch.lars.muon.step`, which must agree with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import reference as lars
from ..batches import Batch, Kind
from ..implementations import implementation_for
from ..layerwise import LayerwiseOptimizer, Overflow
from ..options import check_keys, check_options, named_arguments
from ..sharding import on_whole_tensors, sum_over
from ..state import tensors_of
from ..state_dicts import converted
from . import adamw
from .newton_schulz import default_dtype, newton_schulz
from .options import DEFAULTS, OPTIONS, RANGES, STATE, loaded_group
from .reference import Hyper
from .share import Sharing
from .step import Directions, directions_of, update

_HYPER = tuple(Hyper.__dataclass_fields__)


class Muon(LayerwiseOptimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024, kellerjordan.github.io).

    The momentum of each hidden layer is replaced by the nearest orthogonal matrix, so that a step
    changes all singular directions of the layer alike. Biases, norm layers, the first layer and the
    classifier take a step of SGD, LARS or AdamW in the same optimizer.

    Args:
        params: the groups that :func:`~largebatch.lars.split_parameters` makes of a model with
            ``orthogonal=hidden_weights(model)``; or whatever any torch optimizer takes:
            parameters, ``(name, parameter)`` pairs, or groups of either. Groups are orthogonalised
            unless they set ``orthogonal=False``. A group may set any option below except
            ``others``, ``master_weights`` and ``process_group``.
        lr: learning rate, >= 0, a number or a 0-d tensor.
        momentum: momentum coefficient, in [0, 1); 0 needs ``nesterov=False``.
        nesterov: use Nesterov momentum.
        weight_decay: coefficient, >= 0. Muon and AdamW multiply weights by 1 - lr · weight decay;
            SGD and LARS add it to the gradient.
        adjust_lr_fn: the factor of a step, by torch's names; with m rows and n columns,

            - ``"original"``: sqrt(max(1, m / n)), as in Jordan's code;
            - ``"match_rms_adamw"``: 0.2 sqrt(max(m, n)), with which steps are as large as AdamW's;
            - ``"spectral_unclamped"``: sqrt(m / n);
            - ``"trust_ratio"``: trust coefficient · ||w|| / ||O||, with which the norm of a step is
              a set share of that of its weight, as in LARS;
            - ``"none"``: 1, as in airbench94_muon.
        trust_coefficient: of ``adjust_lr_fn="trust_ratio"`` and of the rule ``"lars"``, > 0.
        norm_projection: before each step, rescale each orthogonalised weight to the norm sqrt(m),
            as in airbench94_muon, in place of weight decay. For layers in front of a norm layer.
        conv_mode: convolutions as one matrix ``[out, in · height · width]`` (``"flatten"``) or one
            of ``[out, in]`` per position of the kernel (``"batched"``), by timm's names.
        ns_coefficients: name of the coefficients of Newton-Schulz (a key of
            :data:`~largebatch.lars.NS_COEFFICIENTS`), three numbers, or three for each step.
        ns_steps: number of Newton-Schulz steps, >= 1.
        ns_dtype: dtype of Newton-Schulz; None: BF16 on CUDA, FP32 on a CPU.
        maximize: maximize the objective.
        others: options of the groups with ``orthogonal=False`` that do not set them themselves:
            those above and

            - ``lr_scale``: in place of ``lr``, the learning rate that they begin with, as a
              multiple of Muon's. Schedulers keep the ratio; of a tensor ``lr`` they have a copy
              of their own, to be filled too;
            - ``rule``: ``"sgd"`` (the default), ``"lars"`` (dialect ``"torch"``) or ``"adamw"``;
            - ``adapt``: of ``"lars"``, whether the trust ratio applies, as in
              :class:`~largebatch.lars.LARS`;
            - ``betas``: of ``"adamw"``, by default (0.9, 0.999);
            - ``eps``: by default 0 for ``"lars"`` and 1e-8 for ``"adamw"``.
        master_weights: keep an FP32 master of each half-precision parameter in the optimizer's
            state, update the master, and round it into the parameter. Momentum is then FP32.
        process_group: a :class:`torch.distributed.ProcessGroup` whose ranks have the same
            gradients, as under :class:`torch.nn.parallel.DistributedDataParallel`: each rank
            orthogonalises some of the tensors and broadcasts their directions, in the dtype of
            Newton-Schulz. None: each rank does all. The ranks of a node suffice, and are best where
            the links between nodes are slow.

    The rules ``"sgd"`` and ``"lars"`` take the :attr:`implementation` ``"auto"`` of
    :class:`~largebatch.lars.LARS`, which may be set.

    Works with :class:`torch.amp.GradScaler` without a host sync on an accelerator: a step with an
    overflow changes nothing. Gradients are never modified. Parameters without a gradient are
    skipped, and must then be without one on all ranks of ``process_group``.

    Under FSDP2 each rank keeps its shard of the momentum. The moves of a group are gathered at
    once, so that each rank holds them and their directions whole for the time of a step, and
    orthogonalised on all ranks or, with their ``process_group``, on one of them.
    :class:`torch.distributed.optim.ZeroRedundancyOptimizer` shares the work by itself, since each
    rank updates parameters of its own.

    Raises:
        ValueError: an option is out of its range, a group has a key that would have no effect, a
            tensor that is orthogonalised has fewer than two dimensions, this rank is not in
            ``process_group`` or, in :meth:`step`, its ranks have gradients of other parameters.
        RuntimeError: in :meth:`step`, they have, and this rank has seen its own kind before. On
            CUDA it is raised by a later wait for the device, which is then lost to the process.
        TypeError: a parameter is complex or flattened by FSDP1 or, in :meth:`step`, a gradient is
            sparse or sharded differently from its parameter. Nothing has been changed then.

    Example::

        groups = split_parameters(model, 5e-4, orthogonal=hidden_weights(model))
        others = {"rule": "sgd", "lr_scale": 1.25, "momentum": 0.85}
        optimizer = Muon(groups, lr=0.24, momentum=0.6, norm_projection=True, others=others)
    """

    _own = (*LayerwiseOptimizer._own, "_others")
    _sharing: Sharing | None = None  # not pickled, as a process group cannot be

    @named_arguments
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = DEFAULTS["momentum"],
        *,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        adjust_lr_fn: str = "original",
        trust_coefficient: float = 1e-3,
        norm_projection: bool = False,
        conv_mode: str = "flatten",
        ns_coefficients: Any = "original",
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        maximize: bool = False,
        others: Mapping[str, Any] | None = None,
        master_weights: bool = False,
        process_group: Any = None,
    ) -> None:
        given = dict(locals())  # a copy: under a debugger, Python 3.12 adds names meanwhile
        defaults = {**DEFAULTS, **{name: given[name] for name in OPTIONS if name in given}}
        self._master_weights = master_weights
        self.process_group = process_group
        self._others = dict(others or {})
        check_options(defaults, RANGES)
        try:
            valid = [name for name in (*OPTIONS, "lr_scale") if name != "orthogonal"]
            check_keys(self._others, {}, options=valid, optimizer="Muon", only_options=True)
            check_options({**defaults, **_with_rate(self._others, lr)}, RANGES)
        except ValueError as error:
            raise ValueError(f"others: {error}") from None
        super().__init__(params, defaults)

    @property
    def process_group(self) -> Any:
        """The process group whose ranks share the orthogonalisation, or None.

        It may be set between steps, on all its ranks. A copy of the optimizer, and a pickled one,
        have none. State dicts do not depend on it.
        """
        return None if self._sharing is None else self._sharing.group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._sharing = None if group is None else Sharing(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, with the same checks and errors as in the constructor."""
        if isinstance(param_group, dict):  # else the base class raises the error
            whole = {
                "master_weights": self._master_weights,
                "others": self._others,
                "process_group": self.process_group,
            }
            check_keys(param_group, whole, options=OPTIONS, optimizer="Muon")
            if not param_group.get("orthogonal", True):
                others = _with_rate(self._others, self.defaults["lr"])
                param_group = {**others, **param_group, "orthogonal": False}
            check_options({**self.defaults, **param_group}, RANGES)
            if "rule" in param_group and "orthogonal" not in param_group:
                raise ValueError(
                    f"rule {param_group['rule']!r} has no effect in a group that is "
                    "orthogonalised; valid: orthogonal=False beside it"
                )
        super().add_param_group(param_group)

    def _prepare(self, batches: Sequence[Mapping[Kind, Batch]]) -> None:
        super()._prepare(batches)
        groups = [group for group in self.param_groups if group["orthogonal"]]
        device = next((p.device for group in groups for p in group["params"]), None)
        if self._sharing is None or device is None:
            return
        seen = []
        for index, (group, of_group) in enumerate(zip(self.param_groups, batches, strict=True)):
            for kind, batch in of_group.items() if group["orthogonal"] else ():
                layouts = tuple((g.shape, g.stride()) for g in batch.gradients)
                arithmetic = group["ns_dtype"], group["conv_mode"], group["nesterov"]
                seen.append((index, kind.dtype, tuple(batch.places), layouts, *arithmetic))
        self._sharing.agree(tuple(seen), device)

    def _step_of(
        self, group: dict[str, Any], kind: Kind, batch: Batch, overflow: Overflow
    ) -> Tensor | None:
        rule = "muon" if group["orthogonal"] else group["rule"]
        weights, gradients, buffers, halves = tensors_of(
            self.state,
            batch.parameters,
            batch.gradients,
            kind.layout,
            # Muon keeps a buffer without momentum too, and AdamW has averages of its own.
            momentum={"muon": 1.0, "adamw": 0.0}.get(rule, group["momentum"]),
            master_weights=self._master_weights,
        )
        if rule == "muon":
            shapes = [parameter.shape for parameter in batch.parameters]
            return update(
                weights,
                gradients,
                buffers,
                Hyper(**{name: group[name] for name in _HYPER}),
                *overflow,
                halves,
                on_whole_tensors(self._directions(group, weights[0]), kind.layout, shapes),
                shapes=shapes,
                sum_over_shards=None if kind.layout is None else sum_over(kind.layout),
            )
        if rule == "adamw":
            averages = adamw.prepare(
                self.state, batch.parameters, master_weights=self._master_weights
            )
            adamw.update(weights, gradients, averages, group, *overflow, halves)
            return None
        # SGD is the dialect of torch without ratios.
        names = ("lr", "momentum", "weight_decay", "trust_coefficient", "nesterov", "maximize")
        shared = {name: group[name] for name in names}
        adapts = kind.adapts and rule == "lars"
        hyper = lars.Hyper(**shared, eps=group["eps"] or 0.0, trust_clip=False, adapt=adapts)
        step = implementation_for(self._implementation, kind, "torch")
        ratios = step("torch", weights, gradients, buffers, hyper, *overflow, halves)
        return ratios if hyper.adapt else None

    def _directions(self, group: Mapping[str, Any], weight: Tensor) -> Directions:
        """Return the function that orthogonalises a group's moves, alone or shared among ranks."""
        dtype = group["ns_dtype"] or default_dtype(weight)
        orthogonalize = partial(
            newton_schulz,
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            dtype=dtype,
        )
        options = {"conv_mode": group["conv_mode"], "orthogonalize": orthogonalize}
        if self._sharing is None:
            return partial(directions_of, **options)
        return partial(self._sharing.directions_of, dtype=dtype, **options)

    def _converted(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        return converted(state_dict, self.param_groups, loaded_group, STATE)


def _with_rate(others: Mapping[str, Any], lr: float | Tensor) -> dict[str, Any]:
    """Return options with ``lr_scale`` replaced by the rate it means; ValueError for a bad one."""
    options = dict(others)
    scale = options.pop("lr_scale", None)
    if scale is not None:
        if not scale >= 0 or "lr" in options:
            raise ValueError(f"lr_scale must be >= 0, and without lr, not {scale!r}")
        options["lr"] = lr * scale
    return options
