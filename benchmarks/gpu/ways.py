"""The ways to call collectives with one GPU, and what of the hook can be checked in each.

- ``gloo`` takes CUDA tensors, which exercises streams and futures, but not NCCL's;
- ``nccl`` allows several ranks on one GPU from 2.30 on, with ``NCCL_MULTI_RANK_GPU_ENABLE=1``;
- ``nccl, one rank`` works with any NCCL: the groups within and across nodes, which
  :class:`Topology` leaves out for a single rank, are made nevertheless.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.gpu.report import Skipped
from largebatch.comm import ALGORITHMS, Rule

CHUNKS = 12

#: Algorithms that send messages from rank to rank on gloo, which it does not do on CUDA.
_POINT_TO_POINT = ("leader", "halving-doubling", "parameter-server")


@dataclass(frozen=True)
class Way:
    """A way to call collectives on one device.

    Attributes:
        name: for the report.
        backend: of torch.distributed.
        ranks: number of processes.
        ranks_per_node: ranks that count as one node.
    """

    name: str
    backend: str
    ranks: int
    ranks_per_node: int

    def check(self) -> None:
        """Raise :class:`Skipped` if this machine cannot do it."""
        if not dist.is_backend_available(self.backend):
            raise Skipped(f"needs {self.backend}")
        if self.backend == "nccl" and self.ranks > 1:
            version = torch.cuda.nccl.version()
            if version < (2, 30):
                shown = ".".join(map(str, version))
                raise Skipped(f"NCCL {shown} refuses several ranks on one GPU; 2.30 allows it")


def ways(device: torch.device) -> list[Way]:
    """Return the ways for a device."""
    if device.type != "cuda":
        return [Way("gloo", "gloo", 2, 1), Way("gloo, one rank", "gloo", 1, 1)]
    return [
        Way("gloo", "gloo", 4, 2),
        Way("nccl", "nccl", 4, 2),
        Way("nccl, one rank", "nccl", 1, 1),
    ]


def cases(way: Way, device: torch.device, bucket_bytes: int) -> dict[str, Rule]:
    """Return the rules to check: every algorithm, in chunks if it has phases, in every dtype."""
    rules = {}
    for wire in (None, "bf16", "fp16"):
        chunk = bucket_bytes // CHUNKS // (2 if wire else 1)
        of_dtype = f", {wire}" if wire else ""
        for name in ALGORITHMS:
            if name in left_out(way, device):
                continue
            rules[name + of_dtype] = Rule(name, wire_dtype=wire)
        for name in ("hierarchical", "leader", "torus"):
            if name + of_dtype not in rules:
                continue
            # The torus of one column sends nothing in the first of its phases.
            shape = (1, way.ranks) if name == "torus" else None
            rules[f"{name}{of_dtype}, in chunks"] = Rule(name, None, wire, chunk, shape)
            if wire and name != "leader":
                summed = Rule(name, None, wire, chunk, shape, sum_dtype="fp32")
                rules[f"{name}{of_dtype} summed in fp32, in chunks"] = summed
    return rules


def left_out(way: Way, device: torch.device) -> tuple[str, ...]:
    """Return the algorithms that cannot be checked in this way."""
    return _POINT_TO_POINT if (way.backend, device.type) == ("gloo", "cuda") else ()
