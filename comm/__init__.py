"""Gradient all-reduce: algorithms, plans, prediction, the DDP hook. Needs only torch and numpy."""

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
from .failure.rendezvous import rendezvous
from .failure.roll_call import CollectiveError, missing_ranks_named
from .fusion import fuse, fused_bytes, segments_between
from .hook import register
from .launch_order import launches_are_ordered, order_launches
from .model.calibrate import Calibration, Measurement
from .model.choose import choose
from .model.cost import Level, Links, predict_seconds
from .model.profile import Gradient, Profile, estimate_profile, measure_profile
from .model.simulate import Cluster, Reduction, Simulation, candidates, predict_plan, simulate
from .plan import WIRE_DTYPES, Plan, PlanError, Rule
from .process_groups import group_of_rank
from .topology import Grid, Groups, Topology, TopologyError
from .traffic import Traffic
from .tuning.final import Final, Finalist
from .tuning.fit import fit_links
from .tuning.tune import Tuned, tune
from .tuning.verdict import Ratio

__all__ = [
    "ALGORITHMS",
    "WIRE_DTYPES",
    "Algorithm",
    "Calibration",
    "Cluster",
    "CollectiveError",
    "Final",
    "Finalist",
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
    "Ratio",
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
    "group_of_rank",
    "launches_are_ordered",
    "measure_profile",
    "missing_ranks_named",
    "order_launches",
    "predict_plan",
    "predict_seconds",
    "register",
    "rendezvous",
    "segments_between",
    "simulate",
    "tune",
]
