"""A plan for FSDP2, between the copies of a model, each of which some ranks share.

``fully_shard`` over a 1-d mesh averages gradients over the mesh by a reduce-scatter, then calls the
module's all-reduce hook with this rank's shard, on a stream of its own (``foreach_reduce`` in
torch's _fsdp_collectives.py, 2.11 to 2.15). Over a 2-d mesh, and in ``replicate()``, torch first
all-reduces by itself, which a hook cannot replace.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .averaging import average
from .failure.roll_call import described_failure, join_roll_call
from .launch_order import check_launch_order_of_fsdp2
from .plan import Plan, PlanError
from .topology import Topology


def register_fsdp2(model: nn.Module, plan: Plan, topology: Topology | None = None) -> None:
    """Make ``model`` average its gradients over all ranks, between its copies by ``plan``.

    Every rank must call it after the last ``fully_shard``, with the same weights and plan. Its
    rules see the bytes of a module's shard, in the dtype that FSDP2 reduces in. ``topology`` has
    the nodes; None stands for those of :meth:`Topology.from_environment`.

    Raises:
        PlanError: the model is not sharded over 1-d meshes, or the plan may deadlock on NCCL.
        TopologyError: an algorithm does not support the layout of the ranks that hold a shard, or
            the process group has other ranks. Backward raises :class:`CollectiveError`.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    tensors = [p for p in model.parameters() if isinstance(p, DTensor)]
    is_sharded = all([type(place) for place in p.placements] == [Shard] for p in tensors)
    if not (modules and is_sharded and len({p.device_mesh for p in tensors}) == 1):
        raise PlanError(
            f"model: {type(model).__name__} is not sharded by FSDP2 over one 1-d mesh; "
            "valid: fully_shard(module, mesh=...) over the ranks that share a copy of the model"
        )
    alike = _ranks_alike(tensors[0].device_mesh, plan, Topology.of_job(topology))
    for module in modules:
        module.set_all_reduce_hook(partial(_average_shard, plan, alike))


def _average_shard(plan: Plan, alike: Topology, shard: Tensor) -> None:
    if shard.is_cuda:  # torch before 2.15 frees it while this stream still uses it
        shard.record_stream(torch.cuda.current_stream(shard.device))
    rule = plan.rule_for(shard.nbytes)
    try:
        average(shard, alike, rule)
    except Exception as error:
        where = f"rank {alike.rank}: {rule.algorithm} all-reduce of {shard.nbytes} bytes"
        raise described_failure(where, error) from error


def _ranks_alike(mesh: Any, plan: Plan, topology: Topology) -> Topology:
    """Connect the ranks that have the same shard, and return those of this rank on their nodes."""
    found: list[Any] = [None] * topology.world_size
    dist.all_gather_object(found, tuple(dist.get_process_group_ranks(mesh.get_group())))
    copies, nodes = sorted(set(found)), len(topology.nodes)
    sizes = [len(ranks) for ranks in copies]
    if len(set(sizes)) > 1 or sum(sizes) != topology.world_size or len(sizes) == 1 < nodes:
        text = f"mesh: copies of the model on {', '.join(map(str, sizes))} ranks"
        raise PlanError(f"{text}; valid: one copy per node, on as many ranks each")
    if mesh.device_type == "cuda" and len(copies) > 1:
        check_launch_order_of_fsdp2()
    parts = [topology.among(ranks) for ranks in zip(*copies, strict=True)]
    for step in (plan.check, plan.connect):
        for part in parts:
            step(part)
    join_roll_call()
    return next(part for part in parts if topology.rank in part.order)
