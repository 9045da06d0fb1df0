"""LARS and Muon, their parameter groups and learning-rate schedules. Needs torch only."""

from typing import TYPE_CHECKING

from .._lazy import lazily

if TYPE_CHECKING:
    from .conventions import CONVENTIONS, Convention
    from .groups import (
        describe,
        hidden_weights,
        is_bias_or_norm,
        is_vector,
        is_vector_or_position,
        split_parameters,
    )
    from .history import TrustRatioHistory
    from .muon.newton_schulz import NS_COEFFICIENTS, newton_schulz
    from .muon.optimizer import Muon
    from .muon.reference import ADJUST_LR_FNS, CONV_MODES, polar_factor
    from .names import DENOMINATORS, DIALECT_NAMES
    from .noise import GradientNoise, NoiseScale
    from .optimizer import LARS
    from .range_test import RangeTest, lr_range_test
    from .reference import DIALECTS
    from .scheduler import as_scheduler
    from .schedules import (
        DECAY_FROM,
        WARMUP_SHAPES,
        Schedule,
        constant,
        cosine,
        polynomial,
        step_decay,
        warmup,
    )
    from .span import Span
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = [
    "ADJUST_LR_FNS",
    "CONVENTIONS",
    "CONV_MODES",
    "DECAY_FROM",
    "DENOMINATORS",
    "DIALECTS",
    "DIALECT_NAMES",
    "LARS",
    "NS_COEFFICIENTS",
    "WARMUP_SHAPES",
    "Convention",
    "GradientNoise",
    "Muon",
    "NoiseScale",
    "RangeTest",
    "Schedule",
    "Span",
    "TrustRatioHistory",
    "as_scheduler",
    "constant",
    "cosine",
    "describe",
    "hidden_weights",
    "is_bias_or_norm",
    "is_vector",
    "is_vector_or_position",
    "lr_range_test",
    "newton_schulz",
    "polar_factor",
    "polynomial",
    "split_parameters",
    "step_decay",
    "warmup",
]
