"""How far a measured all-reduce is from the model, by rule and size.

Two numbers per level of link cannot tell how a back end cuts messages, or that the ranks of a node
share its processor. NCCL's own model multiplies its prediction by a measured factor for each power
of two of the size (``treeCorrectionFactor`` in its src/graph/tuning.cc); here the factors are what
``tune`` measured, and between two sizes they are interpolated over the logarithm of the size.
They hold on the ranks that they were measured on, and for no others.
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
    """How long a rule took for one size.

    Attributes:
        rule: the candidate; its ``max_bytes`` is None.
        size_bytes: of the message, in the gradients' dtype.
        seconds: of each repeat, on the slowest rank.
    """

    rule: Rule
    size_bytes: int
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return float(np.median(self.seconds))


@dataclass(frozen=True)
class Calibration:
    """Factors on the model's time.

    Attributes:
        curves: by rule, pairs of size in bytes and factor, ascending.
    """

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
        """The factors that make the model tell what was measured."""
        curves: dict[Rule, list[tuple[int, float]]] = {}
        for m in sorted(measurements, key=lambda m: m.size_bytes):
            told = predict_seconds(
                m.rule, m.size_bytes, topology, links, element_bytes=element_bytes
            )
            if told > 0:
                factor = m.median_seconds / told
                curves.setdefault(m.rule, []).append((m.size_bytes, factor))
        return cls(curves)

    def factor(self, rule: Rule, size_bytes: int) -> float:
        """The factor for one message; 1 for a rule that was not measured.

        Beyond the measured sizes it is that of the nearest one. A rule that cuts into chunks goes
        on, below its own sizes, with the curve of whole messages, as it sends them whole.
        """
        rule = replace(rule, max_bytes=None)
        points = list(self.curves.get(rule, ()))
        if rule.chunk_bytes is not None:
            whole = self.curves.get(replace(rule, chunk_bytes=None), ())
            points = [p for p in whole if p[0] <= rule.chunk_bytes] + points
        if not points:
            return 1.0
        sizes, factors = zip(*points, strict=True)
        return float(np.interp(np.log(max(1, size_bytes)), np.log(sizes), factors))
