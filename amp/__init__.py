"""Mixed precision: what runs in which dtype. Needs torch only."""

from .forms import OPT_LEVELS, PRECISIONS, PrecisionForm
from .loss_scale import INITIAL_LOSS_SCALE, LOSS_SCALES, GradientOverflowError
from .masters import MasterWeights, full_precision_state_dict, reset_masters
from .precision import Precision, fastest
from .underflow import LOSS_SCALE_HEADROOM, LayerUnderflow, UnderflowReport, underflow_report

__all__ = [
    "INITIAL_LOSS_SCALE",
    "LOSS_SCALES",
    "LOSS_SCALE_HEADROOM",
    "OPT_LEVELS",
    "PRECISIONS",
    "GradientOverflowError",
    "LayerUnderflow",
    "MasterWeights",
    "Precision",
    "PrecisionForm",
    "UnderflowReport",
    "fastest",
    "full_precision_state_dict",
    "reset_masters",
    "underflow_report",
]
