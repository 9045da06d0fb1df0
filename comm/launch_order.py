"""NCCL: torch's class behind a group, and plans that can deadlock without an order of launches.

Kernels of different NCCL communicators that run at the same time can wait for each other on a GPU.
NCCL's guide ("Using multiple NCCL communicators concurrently") asks for one order of all
operations on all ranks: by dependencies between CUDA streams, or, from NCCL 2.26, by
``NCCL_LAUNCH_ORDER_IMPLICIT=1``, with which the order of calls on the host counts.

The hook calls the collectives of all buckets from one thread. Without chunks, each also waits on
the hook's stream for the one before, and nothing else communicates during backward, except batch
norm over several ranks and DDP with ``find_unused_parameters``. With chunks, those within nodes and
those between nodes run at the same time. A plain ring takes the default group, as DDP alone does.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from .plan import Plan, PlanError, Rule
from .topology import Topology

VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"

#: The first version of NCCL that has the variable.
_FIRST_VERSION = (2, 26)


def nccl_class(group: ProcessGroup | None = None) -> str:
    """Return torch's class behind a group, such as ProcessGroupNCCL2; empty if it is not NCCL's.

    ``nccl`` is ProcessGroupNCCL2 from torch 2.15 on, unless ``TORCH_DIST_USE_NCCL2=0`` is set;
    with ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` it is the class of a wrapper.
    """
    group = group or dist.distributed_c10d._get_default_group()
    on_nccl = "nccl" in dist.get_backend_config(group)
    return type(group._get_backend(torch.device("cuda"))).__name__ if on_nccl else ""


def device_of_messages() -> torch.device:
    """Return this rank's GPU if the default group is on NCCL, else the CPU."""
    return torch.device(f"cuda:{torch.cuda.current_device()}" if nccl_class() else "cpu")


def order_launches() -> None:
    """Set ``NCCL_LAUNCH_ORDER_IMPLICIT`` to 1 for this process, unless it is set already.

    Call it before ``init_process_group``: NCCL reads the variable once, at the latest in its first
    operation, and ignores later changes.
    """
    os.environ.setdefault(VARIABLE, "1")


def launches_are_ordered() -> bool:
    """Whether ``NCCL_LAUNCH_ORDER_IMPLICIT`` is set to something other than 0, as NCCL reads it."""
    try:
        return int(os.environ.get(VARIABLE, "0"), 0) != 0
    except ValueError:
        return False


def launch_order_is_open() -> bool:
    """Whether the back end is NCCL, and nothing orders the operations of its communicators."""
    if not nccl_class():
        return False
    return torch.cuda.nccl.version()[:2] < _FIRST_VERSION or not launches_are_ordered()


def check_launch_order(model: DistributedDataParallel, plan: Plan, topology: Topology) -> None:
    """Raise PlanError if the plan may deadlock for this model, as nothing orders operations."""
    if model.device_type != "cuda" or not launch_order_is_open():
        return
    hazard = _hazard(model, plan, topology)
    if hazard is not None:
        raise _unordered(*hazard)


def check_launch_order_of_fsdp2() -> None:
    """Check the same for FSDP2, which reduce-scatters and gathers while the plan communicates."""
    if launch_order_is_open():
        raise _unordered(
            "model: FSDP2 communicates in backward at the same time as the plan",
            "a 2-d mesh of copies x ranks per copy, without a plan",
        )


def _unordered(problem: str, instead: str) -> PlanError:
    version, where = torch.cuda.nccl.version(), ""
    valid = f"{VARIABLE}=1 in the environment of every rank before init_process_group"
    if version[:2] < _FIRST_VERSION:
        where = f" in NCCL {'.'.join(map(str, version))}"
        valid = f"NCCL 2.26 or later with {VARIABLE}=1"
    return PlanError(f"{problem}, which can deadlock{where}; valid: {valid}, or {instead}")


def _hazard(
    model: DistributedDataParallel, plan: Plan, topology: Topology
) -> tuple[str, str] | None:
    """What would run at the same time in several communicators, and how to do without."""
    for rule in plan.rules:
        if rule.chunk_bytes is not None and _has_two_levels(rule, topology):
            return (
                f"chunk_bytes: {rule.algorithm} with chunks communicates within and between nodes "
                "at the same time",
                "a plan without chunk_bytes",
            )
    own = [rule.algorithm for rule in plan.rules if not rule.is_plain]
    beside = [
        f"{name} of the model"
        for name, module in model.module.named_modules()
        if isinstance(module, torch.nn.SyncBatchNorm) or getattr(module, "process_group", None)
    ]
    if model.find_unused_parameters and not model.static_graph:
        beside.append("DDP with find_unused_parameters")
    if not (own and beside) or topology.world_size == 1:
        return None
    problem = f"{own[0]} communicates in backward at the same time as {beside[0]}"
    return f"algorithm: {problem}", "ring without a wire dtype for every size"


def _has_two_levels(rule: Rule, topology: Topology) -> bool:
    """Whether the phases of an algorithm use two communicators."""
    x, y = rule.shape or (max(map(len, topology.nodes)), len(topology.nodes))
    return x > 1 and y > 1
