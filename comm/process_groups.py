"""Process groups over disjoint parts of the ranks, made in one step where the back end can.

``torch.distributed.new_group`` makes one group, and every rank has to call it. A rank outside of
the group returns at once, unless the default group is bound to a device, as eager initialization
on NCCL does: then torch makes each group by ``ncclCommSplit`` of the default communicator, in
which all ranks take part, members or not (``_new_process_group_helper`` in torch's
distributed_c10d.py). 256 nodes of 8 GPUs would take 264 such steps, one after the other.
``split_group`` makes all groups of a partition in one.

``new_group(use_local_synchronization=True)``, which only members call, is not used: it derives the
name of a group from a number that ranks count on their own, and ranks that once made different
groups would wait for each other under different names (torch 2.13, ``_hash_ranks_to_str``).

torch has two back ends for NCCL, and several names for them: ``nccl`` is ProcessGroupNCCL, and from
torch 2.15 on ProcessGroupNCCL2, unless ``TORCH_DIST_USE_NCCL2=0`` was set when torch was imported;
``nccl-legacy``, ``nccl2`` and ``nccl-lazy`` name one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def nccl_class(group: ProcessGroup | None = None) -> str:
    """Return torch's class behind a group, such as ProcessGroupNCCL2; empty if it is not NCCL's.

    With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` it is that of a wrapper.
    """
    group = group or dist.distributed_c10d._get_default_group()
    on_nccl = "nccl" in dist.get_backend_config(group)
    return type(group._get_backend(torch.device("cuda"))).__name__ if on_nccl else ""


def device_of_messages() -> torch.device:
    """Return this rank's GPU if the default group is on NCCL, else the CPU."""
    return torch.device(f"cuda:{torch.cuda.current_device()}" if nccl_class() else "cpu")


def group_of_rank(
    parts: Iterable[Iterable[int]], timeout: timedelta | None = None
) -> ProcessGroup | None:
    """Make a process group of each part of the ranks, and return the one that holds this rank.

    Every rank must call it with the same parts, none of which overlap. Ranks are in ascending order
    in each group.

    Args:
        parts: Global ranks of each part.
        timeout: Time after which a collective in a group fails; None is that of the default group.

    Returns:
        The group; None if this rank's part has no other rank, or it is in none.
    """
    members = [sorted(part) for part in parts]
    if all(len(part) == 1 for part in members):
        return None
    if timeout is None:
        timeout = default_timeout()
    if _splits():
        # A rank on its own is split off as well: torch before 2.15 names a group by the number of
        # groups that this rank is in, and ends them in the order of their names on every rank.
        others = set(range(dist.get_world_size())).difference(*members)
        members += [[rank] for rank in sorted(others)]
        group: Any = dist.split_group(split_ranks=members, timeout=timeout)
        return group if dist.get_world_size(group) > 1 else None
    own = None
    for part in members:
        if len(part) > 1:
            group = dist.new_group(part, timeout=timeout)
            own = group if dist.get_rank() in part else own
    return own


def default_timeout() -> timedelta | None:
    """Return the timeout of the default group; None if its back end does not tell.

    torch gives new groups 10 minutes (NCCL) or 30 (others), whatever that of the default group is.
    """
    group = dist.distributed_c10d._get_default_group()
    # torch has no public way to read it. It is the same for all devices of a group.
    backend: Any = group._get_backend(group._device_types[0])
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def _splits() -> bool:
    """Whether torch would make each group by a split of the default group, on all ranks."""
    group = dist.distributed_c10d._get_default_group()
    device = group.bound_device_id
    if device is None or device.type == "cpu":  # split_group needs an accelerator before torch 2.15
        return False
    return bool(group._get_backend(device).supports_splitting)
