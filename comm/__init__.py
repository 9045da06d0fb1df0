"""Gradient all-reduce: algorithms, plans and the DDP hook. Needs torch.distributed only."""

from .algorithms import (
    ALGORITHMS,
    Algorithm,
    HalvingDoubling,
    Hierarchical,
    Leader,
    ParameterServer,
    Ring,
    Torus,
)
from .execute import all_reduce
from .fusion import fuse, fused_bytes, segments_between
from .hook import register
from .plan import WIRE_DTYPES, Plan, PlanError, Rule
from .rendezvous import rendezvous
from .roll_call import CollectiveError, missing_ranks_named
from .topology import Grid, Groups, Topology, TopologyError
from .traffic import Traffic

__all__ = [
    "ALGORITHMS",
    "WIRE_DTYPES",
    "Algorithm",
    "CollectiveError",
    "Grid",
    "Groups",
    "HalvingDoubling",
    "Hierarchical",
    "Leader",
    "ParameterServer",
    "Plan",
    "PlanError",
    "Ring",
    "Rule",
    "Topology",
    "TopologyError",
    "Torus",
    "Traffic",
    "all_reduce",
    "fuse",
    "fused_bytes",
    "missing_ranks_named",
    "register",
    "rendezvous",
    "segments_between",
]
