"""The ``LARS`` optimizer: parameter groups, state, FP32 master weights and overflow handling.

The arithmetic of a step is in :mod:`~largebatch.lars.reference` (the definition, after You et al.
2017) and in the fast implementations, which must agree with it; this file makes it a
:class:`torch.optim.Optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import conventions
from .batches import Batch, Kind
from .implementations import implementation_for
from .layerwise import LayerwiseOptimizer, Overflow
from .memory import moved
from .options import OPTIONS, check_keys, check_options, named_arguments
from .reference import Hyper
from .state import CORRECTED, add_previous_lr, remember_lr, tensors_of
from .state_dicts import converted, loaded_group

_HYPER = tuple(name for name in Hyper.__dataclass_fields__ if name != "previous_lr")


class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv 1708.03888).

    Momentum SGD in which the step of each tensor is multiplied by its trust ratio, which is
    ``trust_coefficient`` times the norm of its weight over the norm of its gradient. The relative
    change per step is then similar in all layers. This lets SGD keep its accuracy at batch sizes of
    many thousands.

    Args:
        params: the groups that :func:`~largebatch.lars.split_parameters` makes of a model, in which
            biases and norm layers neither decay nor adapt; or whatever any torch optimizer takes:
            parameters, ``(name, parameter)`` pairs, or groups of either. A group may set any option
            below except ``master_weights`` and ``implementation``.
        lr: learning rate, >= 0, a number or a 0-d tensor.
        momentum: momentum coefficient, in [0, 1). Like :class:`torch.optim.SGD`, LARS takes it as
            the third positional argument; all further arguments are given by keyword.
        weight_decay: L2 coefficient, >= 0. The decay is added to the gradient before the trust
            ratio is applied, and is part of the ratio's denominator.
        trust_coefficient: the paper's eta, > 0.
        eps: added to the denominator of the trust ratio, >= 0.
        dialect: the published form of LARS. :mod:`largebatch.lars.reference` defines them; learning
            rates tuned with a schedule do not carry over from one to another. :meth:`like` chooses
            the dialect and the other options of a library.

            - ``"mlperf"``: the learning rate is inside the momentum buffer, as in the paper and the
              MLPerf reference.
            - ``"mlperf-corrected"``: inside, and the buffer is rescaled when the learning rate
              changes, as in NVIDIA's MLPerf submissions.
            - ``"torch"``: outside, as in timm's ``Lars``.
            - ``"larc"``: outside, with ``trust_clip`` and without ``decay_at_zero_norm``, as in
              apex LARC with its default ``clip=True``.
            - ``"simclr-popular"``: outside, with the trust ratio of the momentum.
        nesterov: use Nesterov momentum; needs ``momentum > 0``.
        trust_clip: let each tensor that adapts take the smaller of its trust ratio and ``lr`` as
            its learning rate, in place of their product (apex LARC's "clip", timm's
            ``trust_clip``).
        denominator: of the trust ratio: ``"sum-of-norms"``, ||g|| + weight decay · ||w||, as in
            the LARS paper and MLPerf, or ``"norm-of-sum"``, ||g + weight decay · w||, as in SimCLR,
            VICReg, Barlow Twins and optax. They agree where the weight decay is 0. The dialect
            ``"simclr-popular"`` has its own: the norm of the momentum.
        decay_at_zero_norm: whether a tensor that adapts decays where a norm of its trust ratio is
            zero. With False it takes a plain step without decay and without ``trust_clip`` there,
            as in apex LARC, lightly and torch_optimizer.
        maximize: maximize the objective, as in :class:`torch.optim.SGD`.
        adapt: whether the trust ratio applies, independently of ``weight_decay``. None: to tensors
            of two dimensions or more, so that biases and norm layers take the plain learning rate,
            as in every MLPerf LARS, whoever made the groups.
        master_weights: keep an FP32 master of each half-precision parameter in the optimizer's
            state, update the master, and round it into the parameter. The momentum buffer is then
            FP32.
        implementation: ``"reference"``, ``"foreach"`` (any device), ``"fused"`` (CPU),
            ``"triton"`` (CUDA), or ``"auto"``: the fastest one for the device. On CUDA that is
            ``"triton"`` if its kernels can be built and launched, which the first step tries, and
            else ``"foreach"`` with a warning; or an error where other ranks may take another one.
            Sharded parameters (DTensor, as made by FSDP2) always use ``"foreach"``, with norms
            summed over their shards.

    Works with :class:`torch.amp.GradScaler`: gradients are unscaled before their norms are taken,
    and a step with an overflow changes nothing, without a host sync on an accelerator. Gradients
    are never modified. Parameters without a gradient are skipped. To change the learning rate of a
    captured CUDA graph, pass ``lr`` as a tensor on the device.

    Works under FSDP2 and in :class:`torch.distributed.optim.ZeroRedundancyOptimizer`, whose groups
    have no names (``split_parameters(..., named=False)``). FSDP1 flattens tensors, so that their
    norms are not known, and is refused.

    Of the options of :class:`torch.optim.SGD`, it has no ``dampening`` and no ``differentiable``;
    ``implementation`` takes the place of ``foreach`` and ``fused``.

    A state dict may be of any implementation, with or without master weights.

    Raises:
        ValueError: an option is out of its range, or a group has a key that would have no effect.
            In :meth:`step`, a learning rate that was set since is out of its range (the value of a
            tensor is not read), or the implementation does not run on the parameters' device, or
            not on that of this rank among several. In :meth:`load_state_dict`, the state is for
            other parameters, of another dialect or of another optimizer. Keys that torch's
            schedulers, timm or layer-wise learning rates add (``initial_lr``, ``lr_scale``,
            ``name``) are accepted.
        TypeError: an argument is no option, or ``lr`` is missing; a parameter is complex or
            flattened by FSDP1 or, in :meth:`step`, a gradient is sparse or sharded differently from
            its parameter. Nothing has been changed then.

    Example::

        groups = split_parameters(model, weight_decay=5e-5)
        optimizer = LARS(groups, lr=10.5, momentum=0.9)
    """

    @named_arguments
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        *,
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
        given = dict(locals())  # a copy: under a debugger, Python 3.12 adds names meanwhile
        self.implementation = implementation
        self._master_weights = master_weights
        super().__init__(params, {name: given[name] for name in OPTIONS})

    @classmethod
    def like(
        cls, library: str, params: Iterable[Any], lr: float | Tensor | None = None, **options: Any
    ) -> LARS:
        """Make a LARS that takes the steps of another library, with its defaults.

        Learning rates and weight decays tuned there carry over. The groups of ``params`` are split
        where the library exempts some of their tensors from weight decay and trust ratio; a group
        that sets ``adapt``, as those of :func:`~largebatch.lars.split_parameters`, stays as it is.
        The weight decay is 0 unless it is given. A group that is added later takes the options, but
        its tensors are not sorted: let it set ``adapt`` and ``weight_decay``.

        Args:
            library: a key of :data:`~largebatch.lars.CONVENTIONS`, for example ``"timm"``.
            params: as above.
            lr: as above; it has to be given.
            options: any other option, in place of the library's.

        Raises:
            ValueError: there is no such library, or an option is out of its range.
            TypeError: there is no such option, or no ``lr``.

        Example::

            optimizer = LARS.like("vicreg", model.parameters(), lr=1.6, weight_decay=1e-6)
        """
        # Without a rate, the constructor raises the error.
        rate: dict[str, Any] = {} if lr is None else {"lr": lr}
        return cls(**rate, **conventions.arguments(library, params, options))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            add_previous_lr(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, with the same checks and errors as in the constructor."""
        if isinstance(param_group, dict):  # else the base class raises the error
            check_keys(
                param_group,
                {"master_weights": self._master_weights, "implementation": self._implementation},
            )
            check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        add_previous_lr(self.param_groups[-1])

    def _update_group(
        self,
        index: int,
        group: dict[str, Any],
        batches: Mapping[Kind, Batch],
        overflow: Mapping[torch.device, Overflow],
    ) -> None:
        if group["dialect"] == CORRECTED and batches:
            # The model may have been moved to its device after the optimizer was made.
            group["previous_lr"] = group["previous_lr"].to(next(iter(batches)).device)
        super()._update_group(index, group, batches, overflow)
        if group["dialect"] == CORRECTED and (batches or not group["params"]):
            # Also in an empty group: under ZeroRedundancyOptimizer the state dict may be of a rank
            # that has none of the group's parameters.
            remember_lr(group, getattr(self, "found_inf", None))

    def _step_of(
        self, group: dict[str, Any], kind: Kind, batch: Batch, overflow: Overflow
    ) -> Tensor:
        weights, gradients, buffers, halves = tensors_of(
            self.state,
            batch.parameters,
            batch.gradients,
            kind.layout,
            momentum=group["momentum"],
            master_weights=self._master_weights,
        )
        hyper = {name: group[name] for name in _HYPER} | {"adapt": kind.adapts}
        if group["dialect"] == CORRECTED:
            hyper["previous_lr"] = moved(group["previous_lr"], kind.device)
        dialect = group["dialect"]
        update = implementation_for(self._implementation, kind, dialect)
        return update(dialect, weights, gradients, buffers, Hyper(**hyper), *overflow, halves)

    def _converted(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        return converted(state_dict, self.param_groups, loaded_group)
