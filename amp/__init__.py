"""Mixed precision: what runs in which dtype. Needs torch only."""

from typing import TYPE_CHECKING

from .._lazy import lazily

if TYPE_CHECKING:
    from .forms import PRECISIONS, PrecisionForm
    from .loss_scale import INITIAL_LOSS_SCALE, GradientOverflowError
    from .masters import MasterWeights, full_precision_state_dict, reset_masters
    from .names import LOSS_SCALES, OPT_LEVELS, PRECISION_NAMES
    from .precision import Precision, auto_precision
    from .underflow import LOSS_SCALE_HEADROOM, LayerUnderflow, UnderflowReport, underflow_report
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = [
    "INITIAL_LOSS_SCALE",
    "LOSS_SCALES",
    "LOSS_SCALE_HEADROOM",
    "OPT_LEVELS",
    "PRECISIONS",
    "PRECISION_NAMES",
    "GradientOverflowError",
    "LayerUnderflow",
    "MasterWeights",
    "Precision",
    "PrecisionForm",
    "UnderflowReport",
    "auto_precision",
    "full_precision_state_dict",
    "reset_masters",
    "underflow_report",
]
