"""The audit of a data set, as ``largebatch data check`` prints it, and the parts of its report."""

from .check import check_data
from .report import DataReport, Finding, Repeated, SplitReport, Spread

__all__ = ["DataReport", "Finding", "Repeated", "SplitReport", "Spread", "check_data"]
