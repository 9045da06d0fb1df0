"""Mixed precision: what runs in which dtype. Needs torch only."""

from .fastest import fastest
from .forms import OPT_LEVELS, PRECISIONS, Form
from .loss_scale import INITIAL_SCALE, LOSS_SCALES, GradientOverflowError
from .masters import MasterWeights, full_precision_state_dict
from .precision import Precision
from .underflow import LayerUnderflow, UnderflowReport, underflow_report

__all__ = [
    "INITIAL_SCALE",
    "LOSS_SCALES",
    "OPT_LEVELS",
    "PRECISIONS",
    "Form",
    "GradientOverflowError",
    "LayerUnderflow",
    "MasterWeights",
    "Precision",
    "UnderflowReport",
    "fastest",
    "full_precision_state_dict",
    "underflow_report",
]
