"""Mixed precision: what runs in which dtype. Needs torch only."""

from .fastest import fastest
from .precision import PRECISIONS, Precision

__all__ = ["PRECISIONS", "Precision", "fastest"]
