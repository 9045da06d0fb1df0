"""What a plan cannot serve: wrappers that reduce gradients otherwise, and uses of DDP beside it.

Without these checks, gradients would be wrong in silence, or backward fail far from the cause.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .plan import PlanError
from .topology import Topology

_DDP = "DistributedDataParallel(model, **plan.ddp_options()), or register_fsdp2 for FSDP2"
_PYTHON_REDUCER = (
    "optimize_ddp: python_reducer reduces each gradient on its own, so there are no buckets for a "
    "plan; valid: ddp_optimizer, torch's default, when DistributedDataParallel is built"
)


def require_ddp(model: nn.Module) -> DistributedDataParallel:
    """Return the DDP model, which may be compiled; refuse any other, and say what to use."""
    ddp = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(ddp, DistributedDataParallel):
        return ddp
    name = type(ddp).__name__
    raise PlanError(f"model: {name} has no buckets that a plan could reduce; valid: {_DDP}")


def check_model(model: DistributedDataParallel, topology: Topology) -> None:
    """Check that DDP gives buckets to its hooks, and that it spans the ranks of the topology."""
    if model._use_python_reducer:
        raise PlanError(_PYTHON_REDUCER)
    ranks = dist.get_process_group_ranks(model.process_group)
    if sorted(ranks) != sorted(topology.order):
        raise PlanError(
            f"process_group: DistributedDataParallel has {len(ranks)} ranks, and the topology "
            f"{topology.world_size}; valid: DistributedDataParallel over the default group"
        )


def check_bucket(bucket: Any) -> None:
    """Refuse a gradient in place of a bucket, as torch's Python reducer and FSDP1 call a hook."""
    if isinstance(bucket, tuple):
        raise PlanError(_PYTHON_REDUCER)
    if isinstance(bucket, Tensor):
        raise PlanError(f"model: FSDP1 has no buckets that a plan could reduce; valid: {_DDP}")


def check_join(model: DistributedDataParallel) -> None:
    """Refuse ``join`` where DDP divides by the ranks with inputs left, which no hook is told."""
    config = model._join_config
    if not config.enable or config.throw_on_early_termination:
        return
    if not getattr(model, "_divide_by_initial_world_size", True):
        raise PlanError(
            "divide_by_initial_world_size: False in join, but a plan divides by all ranks; "
            "valid: True, its default, or DistributedDataParallel without a plan"
        )


def check_one_model(models: Sequence[DistributedDataParallel]) -> None:
    """Refuse models of one state that have no common parameter, as wrappers of one model have."""
    for one, other in combinations(models, 2):
        if not _have_common_parameters(one, other):
            names = " and ".join(type(model.module).__name__ for model in (one, other))
            raise PlanError(
                f"state: one PlanState is registered with two models, {names}; "
                "valid: a PlanState(plan) of its own for each"
            )


def models_of(state: object) -> list[DistributedDataParallel]:
    """Return the models that a hook's state is registered with, in the first bucket of a model."""
    # DDP tells its hook nothing of the model, so this looks through all objects of the process.
    models = _registered_with(state)
    if all(_have_common_parameters(models[0], other) for other in models[1:]):
        return models
    del models  # one of them may be garbage that Python has not collected yet
    gc.collect()
    return _registered_with(state)


def _have_common_parameters(one: DistributedDataParallel, other: DistributedDataParallel) -> bool:
    return not set(map(id, one.parameters())).isdisjoint(map(id, other.parameters()))


def _registered_with(state: object) -> list[DistributedDataParallel]:
    things = _all_objects()
    # isinstance would ask proxies for their class, and run their code.
    kinds = {kind for kind in set(map(type, things)) if DistributedDataParallel in kind.__mro__}
    models = [thing for thing in things if type(thing) in kinds]
    return [m for m in models if any(other is state for _, other in getattr(m, "_comm_hooks", ()))]


def _all_objects() -> list[Any]:
    """All objects that Python's garbage collector tracks, those that gc.freeze has hidden too."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        if is_frozen:
            gc.freeze()  # which also takes what was made since
