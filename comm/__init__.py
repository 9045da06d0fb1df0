"""Gradient all-reduce: algorithms, plans and the DDP hook. Needs torch.distributed only."""

from .algorithms import ALGORITHMS, Algorithm, Hierarchical, Ring
from .hook import register
from .plan import WIRE_DTYPES, Plan, PlanError, Rule
from .topology import Groups, Topology, TopologyError
from .traffic import Traffic

__all__ = [
    "ALGORITHMS",
    "WIRE_DTYPES",
    "Algorithm",
    "Groups",
    "Hierarchical",
    "Plan",
    "PlanError",
    "Ring",
    "Rule",
    "Topology",
    "TopologyError",
    "Traffic",
    "register",
]
