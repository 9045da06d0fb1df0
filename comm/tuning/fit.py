"""Fit latency and bandwidth of each link level to measured all-reduces.

The model is linear in its five unknowns: alpha and beta of two levels, and the time per byte of the
medium that the ranks of a node share. None can be negative, so the fit is non-negative least
squares. Errors are relative to the measured time, so that a message of a kilobyte counts as much as
one of a hundred megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ..model.calibrate import Measurement
from ..model.cost import Level, Links, predict_seconds, traffic_of
from ..topology import Topology
from ..traffic import Traffic

_LARGE_BYTES = 2**20  # bandwidth dominates from this message size on

Matrix = npt.NDArray[np.float64]


def non_negative_least_squares(a: Matrix, b: Matrix) -> Matrix:
    """Return the ``x >= 0`` that minimizes ``|a x - b|``: the best over subsets of few unknowns."""
    unknowns = a.shape[1]
    best, least = np.zeros(unknowns), float(np.linalg.norm(b))
    for count in range(1, unknowns + 1):
        for columns in combinations(range(unknowns), count):
            part = a[:, columns]
            scale = np.linalg.norm(part, axis=0)
            if not scale.all():
                continue
            found = np.linalg.lstsq(part / scale, b, rcond=None)[0] / scale
            residual = float(np.linalg.norm(part @ found - b))
            if (found >= 0).all() and residual < least:
                best, least = np.zeros(unknowns), residual
                best[list(columns)] = found
    return best


@dataclass(frozen=True)
class Fit:
    """The fitted links, what the times do not determine, and their median relative error."""

    links: Links
    notes: tuple[str, ...]
    error: float


def fit_links(measurements: Sequence[Measurement], topology: Topology) -> Fit:
    """Fit both levels to all measurements without chunks in the gradients' own dtype.

    Times per byte are fitted to messages of 1 MiB and more, and then latencies to smaller ones: a
    link is rarely one straight line, and one that passes the first bytes at once, such as a token
    bucket, would otherwise seem faster than it is.

    If an algorithm keeps both levels busy at the same time, only the slower one costs time, which
    is not linear. The fit is therefore made three times, with either level as the slower one and
    with both equal, and the result closest to the measurements is kept.

    Raises:
        ValueError: there are no such measurements.
    """
    used = [m for m in measurements if m.rule.chunk_bytes is None and m.rule.wire_dtype is None]
    if not used:
        raise ValueError("measurements: nothing to fit, as all have chunks or a wire dtype")
    seconds = np.array([m.median_seconds for m in used])
    traffics = [traffic_of(m.rule, m.size_bytes, topology) for m in used]
    nodes = len(topology.nodes)

    def error(levels: Links) -> Matrix:
        predicted = [predict_seconds(m.rule, m.size_bytes, topology, levels) for m in used]
        difference: Matrix = np.abs(np.array(predicted) / seconds - 1)
        return difference

    large = np.array([m.size_bytes >= _LARGE_BYTES for m in used])
    if len({m.size_bytes for m in used if m.size_bytes >= _LARGE_BYTES}) < 2:
        large[:] = True  # too few large sizes: fit latencies and times per byte together
    found = []
    for slower in ("intra", "inter", "equal"):
        terms = np.array([_terms(t, nodes, slower) for t in traffics]) / seconds[:, None]
        if slower == "equal":  # one beta for both levels
            terms[:, 1] += terms[:, 3]
            terms[:, 3] = 0
        x = non_negative_least_squares(terms[large], np.ones(large.sum()))
        if not large.all():
            latency, volume = [0, 2], [1, 3, 4]
            left = 1 - terms[~large][:, volume] @ x[volume]
            x[latency] = non_negative_least_squares(terms[~large][:, latency], left)
        if slower == "equal":
            x[3] = x[1]
        alpha, beta, inter_alpha, inter_beta, host = x.tolist()
        found.append(Links(Level(alpha, beta), Level(inter_alpha, inter_beta), host))
    best = min(found, key=lambda levels: float(np.linalg.norm(error(levels)[large])))
    links = Links(
        best.intra if any(t.intra_messages or t.intra_bytes for t in traffics) else None,
        best.inter if any(t.inter_messages or t.inter_bytes for t in traffics) else None,
        best.host_seconds_per_byte,
    )
    return Fit(links, tuple(_notes(links)), float(np.median(error(best))))


def _terms(traffic: Traffic, nodes: int, slower: str) -> tuple[float, ...]:
    """Return the coefficients of alpha and beta of both levels, and of the host's time per byte."""
    intra, inter = traffic.intra_bytes, traffic.inter_bytes
    host = traffic.total_intra_bytes / nodes
    if traffic.concurrent:
        intra, inter, host = (0.0, inter, 0.0) if slower == "inter" else (intra, 0.0, host)
    return traffic.intra_messages, intra, traffic.inter_messages, inter, host


def _notes(links: Links) -> Iterable[str]:
    for where, level in (("inside a node", links.intra), ("between nodes", links.inter)):
        if level is None:
            yield f"links {where} cannot be fitted: no message crosses them on these ranks"
