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
from .calibration import Calibration
from .choice import choose
from .cost import Level, Links, predict_seconds
from .execute import all_reduce
from .fit import Measurement, fit_links
from .fusion import fuse, fused_bytes, segments_between
from .hook import register
from .plan import WIRE_DTYPES, Plan, PlanError, Rule
from .profile import Gradient, Profile, estimate_profile, measure_profile
from .rendezvous import rendezvous
from .roll_call import CollectiveError, missing_ranks_named
from .simulate import Cluster, Reduction, Simulation, candidates, predict_plan, simulate
from .topology import Grid, Groups, Topology, TopologyError
from .traffic import Traffic
from .tune import Tuned, tune

__all__ = [
    "ALGORITHMS",
    "WIRE_DTYPES",
    "Algorithm",
    "Calibration",
    "Cluster",
    "CollectiveError",
    "Gradient",
    "Grid",
    "Groups",
    "HalvingDoubling",
    "Hierarchical",
    "Leader",
    "Level",
    "Links",
    "Measurement",
    "ParameterServer",
    "Plan",
    "PlanError",
    "Profile",
    "Reduction",
    "Ring",
    "Rule",
    "Simulation",
    "Topology",
    "TopologyError",
    "Torus",
    "Traffic",
    "Tuned",
    "all_reduce",
    "candidates",
    "choose",
    "estimate_profile",
    "fit_links",
    "fuse",
    "fused_bytes",
    "measure_profile",
    "missing_ranks_named",
    "predict_plan",
    "predict_seconds",
    "register",
    "rendezvous",
    "segments_between",
    "simulate",
    "tune",
]
