"""Calibration: measured correction factors on the cost model, by rule and message size.

Two numbers per link level cannot express how a back end splits messages. NCCL's own model has such
factors too (``treeCorrectionFactor`` in src/graph/tuning.cc). They are interpolated over the
logarithm of the size, and are valid only for the ranks on which they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..plan import Rule
from ..topology import Topology
from .cost import Links, predict_seconds


@dataclass(frozen=True)
class Measurement:
    """Measured times of one rule at one message size."""

    rule: Rule  #: The candidate; its ``max_bytes`` is None.
    size_bytes: int  #: Message size, in the gradients' dtype.
    seconds: tuple[float, ...]  #: Time of each repeat on the slowest rank.

    @property
    def median_seconds(self) -> float:
        """Median over the repeats."""
        return float(np.median(self.seconds))


@dataclass(frozen=True)
class Calibration:
    """Correction factors on predicted times: for each rule, (bytes, factor), ascending."""

    curves: Mapping[Rule, Sequence[tuple[int, float]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        measurements: Sequence[Measurement],
        topology: Topology,
        links: Links,
        *,
        element_bytes: int = 4,
    ) -> Calibration:
        """Compute the factors with which the model reproduces the measured medians."""
        curves: dict[Rule, list[tuple[int, float]]] = {}
        for m in sorted(measurements, key=lambda m: m.size_bytes):
            predicted = predict_seconds(
                m.rule, m.size_bytes, topology, links, element_bytes=element_bytes
            )
            if predicted > 0:
                factor = m.median_seconds / predicted
                curves.setdefault(m.rule, []).append((m.size_bytes, factor))
        return cls(curves)

    def factor(self, rule: Rule, size_bytes: int) -> float:
        """Return the factor for one message; 1 for a rule that was not measured."""
        # Outside the measured sizes, the factor of the nearest one applies. A rule with chunks
        # sends messages up to ``chunk_bytes`` whole.
        rule = replace(rule, max_bytes=None)
        points = list(self.curves.get(rule, ()))
        if rule.chunk_bytes is not None:
            whole = self.curves.get(replace(rule, chunk_bytes=None), ())
            points = [p for p in whole if p[0] <= rule.chunk_bytes] + points
        if not points:
            return 1.0
        sizes, factors = zip(*points, strict=True)
        return float(np.interp(np.log(max(1, size_bytes)), np.log(sizes), factors))
