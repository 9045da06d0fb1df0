"""Mixed precision: what runs in which dtype. Needs torch only."""

from .fastest import fastest
from .forms import OPT_LEVELS, PRECISIONS, Form
from .loss_scale import LOSS_SCALES, GradientOverflowError
from .masters import MasterWeights, full_precision_state_dict
from .precision import Precision

__all__ = [
    "LOSS_SCALES",
    "OPT_LEVELS",
    "PRECISIONS",
    "Form",
    "GradientOverflowError",
    "MasterWeights",
    "Precision",
    "fastest",
    "full_precision_state_dict",
]
