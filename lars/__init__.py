"""LARS: the optimizer, its parameter groups and its learning-rate schedules. Needs torch only."""

from .conventions import CONVENTIONS, Convention
from .groups import describe, is_bias_or_norm, is_vector, is_vector_or_position, split_parameters
from .history import TrustRatioHistory
from .optimizer import LARS
from .reference import DENOMINATORS, DIALECTS
from .schedules import (
    DECAY_FROM,
    WARMUP_SHAPES,
    Schedule,
    as_scheduler,
    constant,
    cosine,
    mlperf_polynomial,
    polynomial,
    step_decay,
    warmup,
)
from .span import Span

__all__ = [
    "CONVENTIONS",
    "DECAY_FROM",
    "DENOMINATORS",
    "DIALECTS",
    "LARS",
    "WARMUP_SHAPES",
    "Convention",
    "Schedule",
    "Span",
    "TrustRatioHistory",
    "as_scheduler",
    "constant",
    "cosine",
    "describe",
    "is_bias_or_norm",
    "is_vector",
    "is_vector_or_position",
    "mlperf_polynomial",
    "polynomial",
    "split_parameters",
    "step_decay",
    "warmup",
]
