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
from .hook import register
from .plan import WIRE_DTYPES, Plan, PlanError, Rule
from .topology import Grid, Groups, Topology, TopologyError
from .traffic import Traffic

__all__ = [
    "ALGORITHMS",
    "WIRE_DTYPES",
    "Algorithm",
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
    "register",
]
