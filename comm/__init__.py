"""Gradient all-reduce: algorithms, plans, prediction, the DDP hook. Needs only torch and numpy."""

from typing import TYPE_CHECKING

from .._lazy import lazily

if TYPE_CHECKING:
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
    from .averaging import average
    from .execute import all_reduce
    from .failure.rendezvous import rendezvous
    from .failure.roll_call import (
        CollectiveError,
        join_roll_call,
        missing_ranks_named,
        ranks_named,
        with_missing_ranks,
    )
    from .failure.stall import StallWatch
    from .fsdp2 import register_fsdp2
    from .fusion import fused_bytes
    from .hook import PlanState, plan_hook, register
    from .launch_order import launches_are_ordered, nccl_class, order_launches
    from .model.calibrate import Measurement
    from .model.choose import choose
    from .model.cost import Level, Links, predict_seconds
    from .model.nccl import Nccl
    from .model.profile import Gradient, Profile, estimate_profile
    from .model.simulate import Cluster, Simulation, candidates, predict_plan, simulate
    from .model.step_time import StepTime, straggler_slowdown
    from .names import ALGORITHM_NAMES
    from .plan import SUM_DTYPES, WIRE_DTYPES, Plan, PlanError, Rule
    from .ranges import ranged
    from .topology import Grid, Groups, Topology, TopologyError, group_of_rank
    from .traffic import Traffic
    from .tuning.race import Final, Finalist
    from .tuning.tune import Tuned, tune
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = [
    "ALGORITHMS",
    "ALGORITHM_NAMES",
    "SUM_DTYPES",
    "WIRE_DTYPES",
    "Algorithm",
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
    "Nccl",
    "ParameterServer",
    "Plan",
    "PlanError",
    "PlanState",
    "Profile",
    "Ring",
    "Rule",
    "Simulation",
    "StallWatch",
    "StepTime",
    "Topology",
    "TopologyError",
    "Torus",
    "Traffic",
    "Tuned",
    "all_reduce",
    "average",
    "candidates",
    "choose",
    "estimate_profile",
    "fused_bytes",
    "group_of_rank",
    "join_roll_call",
    "launches_are_ordered",
    "missing_ranks_named",
    "nccl_class",
    "order_launches",
    "plan_hook",
    "predict_plan",
    "predict_seconds",
    "ranged",
    "ranks_named",
    "register",
    "register_fsdp2",
    "rendezvous",
    "simulate",
    "straggler_slowdown",
    "tune",
    "with_missing_ranks",
]
