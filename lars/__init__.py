"""LARS: the optimizer, its parameter groups and its learning-rate schedules. Needs torch only."""

from .groups import is_bias_or_norm, split_parameters
from .optimizer import LARS
from .schedules import Schedule, Span, as_scheduler, polynomial

__all__ = [
    "LARS",
    "Schedule",
    "Span",
    "as_scheduler",
    "is_bias_or_norm",
    "polynomial",
    "split_parameters",
]
