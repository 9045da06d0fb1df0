"""Measure every algorithm on the ranks of the running job, and make the plan that suits them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..model.calibrate import Calibration, Measurement
from ..model.choose import TOLERANCE, choose
from ..model.cost import Level, Links
from ..model.profile import Profile
from ..model.simulate import Cluster, best_threshold, candidates
from ..plan import Plan, Rule
from ..topology import Topology
from .fit import fit_links
from .race import FAR_BEHIND, Race

#: What is measured unless told otherwise: 1 KiB to 64 MiB.
SIZES_BYTES = tuple(4**k for k in range(5, 14))

#: Chunks of the rules that pipeline their phases.
CHUNKS_BYTES = (2**21, 2**22, 2**23)

#: A fusion threshold may cost this share of the rate of larger messages.
RATE_TOLERANCE = 0.03

_VERSION = 1


@dataclass(frozen=True)
class Tuned:
    """What :func:`tune` found out.

    Attributes:
        plan: for the ranks that were measured.
        cluster: they, with the fitted links and the calibration, for :func:`simulate`.
        measurements: of each candidate at each size.
        fit_error: the median relative difference between the fitted links alone and the
            measurements that they were fitted to.
        notes: what could not be measured or told, one sentence each.
        element_bytes: of one number of the messages.
    """

    plan: Plan
    cluster: Cluster
    measurements: tuple[Measurement, ...]
    fit_error: float
    notes: tuple[str, ...]
    element_bytes: int

    @property
    def links(self) -> Links:
        return self.cluster.links

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of it as JSON. The plan has a file of its own: ``plan.save``."""
        content = {
            "version": _VERSION,
            "nodes": [len(node) for node in self.cluster.topology.nodes],
            "links": asdict(self.links),
            "fit_error": self.fit_error,
            "element_bytes": self.element_bytes,
            "notes": self.notes,
            "plan": asdict(self.plan),
            "measurements": [
                {"rule": asdict(m.rule), "size_bytes": m.size_bytes, "seconds": m.seconds}
                for m in self.measurements
            ],
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tuned:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: the file cannot be read, or is of another form; the message names it.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content["version"] != _VERSION:
                raise ValueError(f"version must be {_VERSION}")
            ends = [sum(content["nodes"][: i + 1]) for i in range(len(content["nodes"]))]
            nodes = zip(content["nodes"], ends, strict=True)
            topology = Topology(tuple(tuple(range(end - n, end)) for n, end in nodes))
            host = content["links"].pop("host_seconds_per_byte")
            links = Links(
                **{k: v and Level(**v) for k, v in content["links"].items()},
                host_seconds_per_byte=host,
            )
            measurements = tuple(
                Measurement(Rule(**m["rule"]), m["size_bytes"], tuple(m["seconds"]))
                for m in content["measurements"]
            )
            rules = tuple(Rule(**rule) for rule in content["plan"].pop("rules"))
            return cls(
                Plan(rules, **content["plan"]),
                Cluster(
                    topology,
                    links,
                    Calibration.of(
                        measurements, topology, links, element_bytes=content["element_bytes"]
                    ),
                ),
                measurements,
                content["fit_error"],
                tuple(content["notes"]),
                content["element_bytes"],
            )
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not what tune writes: {error}") from error


def tune(
    topology: Topology,
    *,
    budget_seconds: float = 110.0,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    wire_dtypes: Sequence[str] = (),
    chunks_bytes: Sequence[int] = CHUNKS_BYTES,
    dtype: torch.dtype = torch.float32,
    profile: Profile | None = None,
    far_behind: float = FAR_BEHIND,
    progress: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Measure, fit and plan. Every rank must call it; all get the same.

    Args:
        budget_seconds: that measuring may take. Large sizes that do not fit are left out.
        sizes_bytes: of the messages, in ``dtype``.
        wire_dtypes: keys of ``WIRE_DTYPES`` that gradients may be sent in. They lose precision,
            so none are tried unless asked for.
        chunks_bytes: tried for algorithms whose phases can be pipelined.
        dtype: of the gradients.
        profile: of the model that the plan is for; the fusion threshold is then the one with the
            shortest simulated step (:func:`best_threshold`). Without it, it is the smallest
            measured size whose rate is within 3 % of the best: buckets then start as early, and
            leave as little after backward, as can be had for that.
        far_behind: from 1 MiB on, a candidate that is so many times slower than the fastest is
            not measured at larger sizes.
        progress: called on rank 0 with a line of text per round.

    Raises:
        RuntimeError: there are no ranks to reduce over.
        ValueError: a size that is not a positive multiple of the dtype's.
    """
    if topology.world_size < 2:
        raise RuntimeError("an all-reduce needs at least 2 ranks: start them with torchrun")
    for size in sizes_bytes:
        if size < 1 or size % dtype.itemsize:
            raise ValueError(f"{size} bytes are not a positive number of {dtype} elements")
    rules = candidates(topology, chunks_bytes=chunks_bytes, wire_dtypes=wire_dtypes)
    race = Race(topology, rules, dtype, budget_seconds, far_behind=far_behind, progress=progress)
    left_out = race.run(sorted(set(sizes_bytes)))
    notes = [f"no time was left to measure {size:,} bytes" for size in left_out]
    measurements = race.measurements()
    return conclude(measurements, topology, profile=profile, notes=notes, dtype=dtype)


def conclude(
    measurements: Sequence[Measurement],
    topology: Topology,
    *,
    profile: Profile | None = None,
    notes: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    tolerance: float = TOLERANCE,
) -> Tuned:
    """From measurements to the fitted links and the plan, without measuring."""
    topology = Topology(topology.nodes)  # nobody's in particular, and without groups
    fit = fit_links(measurements, topology)
    calibration = Calibration.of(measurements, topology, fit.links, element_bytes=dtype.itemsize)
    cluster = Cluster(topology, fit.links, calibration)
    times: dict[int, dict[Rule, float]] = {}
    for m in measurements:
        times.setdefault(m.size_bytes, {})[m.rule] = m.median_seconds
    rules = choose(times, tolerance=tolerance)
    if profile is not None:
        threshold = best_threshold(profile, cluster, rules)
    else:
        threshold = _threshold_by_rate(Plan(rules), times)
    return Tuned(
        Plan(rules, threshold),
        cluster,
        tuple(measurements),
        fit.error,
        (*notes, *fit.notes),
        dtype.itemsize,
    )


def _threshold_by_rate(plan: Plan, times: dict[int, dict[Rule, float]]) -> int:
    """The smallest measured size that is reduced about as fast per byte as any."""

    def seconds_per_byte(size: int) -> float:
        return times[size][replace(plan.rule_for(size), max_bytes=None)] / size

    costs = {size: seconds_per_byte(size) for size in sorted(times)}
    limit = min(costs.values()) * (1 + RATE_TOLERANCE)
    return next(size for size, cost in costs.items() if cost <= limit)
