"""Processes that are the ranks of one GPU, or of the CPU, for a check or a measurement."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.child import Child

_TIMEOUT = timedelta(seconds=60)

#: Several ranks share one GPU, and groups beside the default one are made, which NCCL must order.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}


def backends(device: torch.device) -> list[str]:
    """Return the back ends of this machine for a device's tensors, each by one name.

    In torch 2.15 ``nccl`` is what ``nccl2`` is, unless ``TORCH_DIST_USE_NCCL2=0``, and
    ``nccl-legacy`` what ``nccl`` was before.
    """
    if device.type != "cuda":
        return ["gloo"]
    same = "nccl-legacy" if os.environ.get("TORCH_DIST_USE_NCCL2") == "0" else "nccl2"
    known = [name for name in ("nccl", "nccl-legacy", "nccl2") if name in dist.Backend.backend_list]
    return [name for name in known if name != same and dist.is_nccl_available()]


def on_ranks(
    ranks: int,
    run: Callable[..., None],
    *arguments: Any,
    backend: str,
    device: torch.device,
    seconds: float,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run a function in a process for each rank, in a process group, for at most ``seconds``.

    It takes a function that reports a value by its name, and ``arguments``.
    """
    found: list[dict[str, Any]] = [{} for _ in range(ranks)]
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        store, end = f"file://{folder}/store", time.monotonic() + seconds
        group = {"backend": backend, "init_method": store, "world_size": ranks, "timeout": _TIMEOUT}
        children = [
            Child(_rank, {**group, "rank": i}, device, run, arguments) for i in range(ranks)
        ]
        running = {child.pipe: (rank, child) for rank, child in enumerate(children)}
        while running and time.monotonic() < end:
            for pipe in wait([*running], timeout=max(0.0, end - time.monotonic())):
                rank, child = running[pipe]
                try:
                    name, value = child.reply(0)
                    found[rank][name] = value
                except ChildProcessError as error:
                    del running[pipe]
                    if child.died:
                        problems.append(f"rank {rank} {error}")
        problems += [f"rank {rank} had no more time" for rank, _ in running.values()]
        for child in children:
            child.end()
    return found, problems


def _rank(
    pipe: Any,
    group: dict[str, Any],
    device: torch.device,
    run: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(_ENVIRONMENT)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if group["backend"] != "gloo":
            group["device_id"] = device
    dist.init_process_group(**group)
    run(lambda name, value: pipe.send((name, value)), *arguments)
    dist.destroy_process_group()
