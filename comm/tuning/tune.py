"""Tune a plan for the running job: measure every algorithm, fit the links, and choose the rules."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from ..launch_order import launch_order_is_open
from ..model.calibrate import Calibration, Measurement
from ..model.choose import choose
from ..model.cost import Level, Links
from ..model.profile import Profile
from ..model.simulate import Cluster, best_threshold, candidates, simulate
from ..plan import Plan, Rule
from ..topology import Topology
from .fit import fit_links
from .measure import FAR_BEHIND, measure
from .race import Final, backward_for, finalists, plain_profile, race

#: Message sizes measured by default: 1 KiB to 64 MiB.
SIZES_BYTES = tuple(4**k for k in range(5, 14))

#: Chunk sizes tried by default for algorithms that can pipeline their phases.
CHUNKS_BYTES = (2**21, 2**22, 2**23)

#: Gradients in place of a model's, about those of a ResNet-50.
_PLAIN_BYTES = 100 * 2**20

_VERSION = 1


@dataclass(frozen=True)
class Tuned:
    """The result of :func:`tune`."""

    plan: Plan  #: For the measured ranks.
    cluster: Cluster  #: The measured ranks with the fitted links and the calibration.
    measurements: tuple[Measurement, ...]  #: Of each candidate at each size.
    #: Median relative difference between the times predicted by the fitted links, without
    #: calibration, and the measurements that they were fitted to.
    fit_error: float
    notes: tuple[str, ...]  #: One sentence for each quantity that could not be determined.
    element_bytes: int  #: Size of one element of the messages.
    final: Final | None = None  #: The race of the best plans, which ``plan`` has won.

    @property
    def links(self) -> Links:
        """The fitted links."""
        return self.cluster.links

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole result as JSON; ``plan.save`` writes a file with the plan alone."""
        content = {
            "version": _VERSION,
            "nodes": [len(node) for node in self.cluster.topology.nodes],
            "links": asdict(self.links),
            "fit_error": self.fit_error,
            "element_bytes": self.element_bytes,
            "notes": self.notes,
            "plan": asdict(self.plan),
            "final": self.final and asdict(self.final),
            "measurements": [
                {"rule": asdict(m.rule), "size_bytes": m.size_bytes, "seconds": m.seconds}
                for m in self.measurements
            ],
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tuned:
        """Read a file written by :meth:`save`.

        Raises:
            ValueError: the file cannot be read or has another format; the message names it.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']!r}; valid: {_VERSION}")
            edges = pairwise(accumulate(content["nodes"], initial=0))
            topology = Topology(tuple(tuple(range(start, end)) for start, end in edges))
            levels = content["links"]
            intra, inter = (levels[name] and Level(**levels[name]) for name in ("intra", "inter"))
            links = Links(intra, inter, levels["host_seconds_per_byte"])
            measurements = tuple(
                Measurement(Rule(**m["rule"]), m["size_bytes"], tuple(m["seconds"]))
                for m in content["measurements"]
            )
            element = content["element_bytes"]
            calibration = Calibration.of(measurements, topology, links, element_bytes=element)
            return cls(
                Plan.of(content["plan"]),
                Cluster(topology, links, calibration),
                measurements,
                content["fit_error"],
                tuple(content["notes"]),
                element,
                content.get("final") and Final.of(content["final"]),
            )
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} was not written by comm tune: {error}") from error


def tune(
    topology: Topology,
    *,
    budget_seconds: float = 110.0,
    race_seconds: float = 60.0,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    wire_dtypes: Sequence[str] = (),
    sum_dtype: str | None = None,
    chunks_bytes: Sequence[int] = CHUNKS_BYTES,
    dtype: torch.dtype = torch.float32,
    profile: Profile | None = None,
    far_behind: float = FAR_BEHIND,
    progress: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Measure all-reduces on the running job and make a plan from the times.

    Every rank must call it; all ranks get the same result.

    Args:
        topology: the layout of the running job.
        budget_seconds: time for the measurements. Large sizes that do not fit are skipped.
        race_seconds: further time for the race of the three plans predicted to be best, and DDP's
            default, under a running backward pass (:mod:`.race`); 0 leaves it out.
        sizes_bytes: message sizes, in bytes of ``dtype``.
        wire_dtypes: keys of ``WIRE_DTYPES`` in which gradients may be sent. These lose precision,
            so none are tried by default.
        sum_dtype: a key of ``SUM_DTYPES``: with ``wire_dtypes``, only sums in it are tried.
        chunks_bytes: chunk sizes to try for algorithms whose phases can be pipelined; none on NCCL
            without ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` on all ranks.
        dtype: dtype of the gradients.
        profile: profile of the model that the plan is for, whose simulated step chooses the fusion
            threshold (:func:`best_threshold`). By default equal gradients of 100 MiB in all, in a
            backward pass as long as their communication.
        far_behind: from 1 MiB on, a candidate that takes this many times as long as the fastest
            is not measured at larger sizes.
        progress: function called on rank 0 with a line of text for each size.

    Raises:
        RuntimeError: there is only one rank.
        ValueError: a size is not a positive multiple of the element size.
    """
    if topology.world_size < 2:
        raise RuntimeError(
            "topology: 1 rank has nothing to all-reduce; valid: 2 ranks or more, as torchrun "
            "starts them"
        )
    for size in sizes_bytes:
        if size < 1 or size % dtype.itemsize:
            raise ValueError(
                f"sizes_bytes: {size} bytes are not a whole number of {dtype} elements; "
                f"valid: positive multiples of {dtype.itemsize}"
            )
    notes = []
    if chunks_bytes and launch_order_is_open():
        chunks_bytes = ()
        notes.append("chunks left out: they need NCCL 2.26 and NCCL_LAUNCH_ORDER_IMPLICIT=1")
    rules = candidates(
        topology, chunks_bytes=chunks_bytes, wire_dtypes=wire_dtypes, sum_dtype=sum_dtype
    )
    sizes = sorted(set(sizes_bytes))
    measurements, left_out = measure(
        *(topology, rules, sizes, dtype, budget_seconds), far_behind=far_behind, progress=progress
    )
    notes += [f"no time was left to measure {size:,} bytes" for size in left_out]
    found = fit_and_plan(measurements, topology, profile=profile, notes=notes, dtype=dtype)
    if race_seconds <= 0:
        return found
    if profile is None:
        profile = _as_long_as_its_communication(found.cluster, found.plan, dtype.itemsize)
    measured = tuple(dict.fromkeys(m.rule for m in measurements))
    final = race(
        finalists(found.plan, measured, profile, found.cluster),
        found.plan,
        topology,
        profile,
        budget_seconds=race_seconds,
        backward_seconds=backward_for(profile, found.cluster, found.plan),
        dtype=dtype,
        progress=progress,
    )
    undecided = "the race had no time for three rounds: its predicted winner was taken"
    found_notes = found.notes if final.decided else (*found.notes, undecided)
    return replace(found, plan=final.plan, final=final, notes=found_notes)


def fit_and_plan(
    measurements: Sequence[Measurement],
    topology: Topology,
    *,
    profile: Profile | None = None,
    notes: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Tuned:
    """Fit the links and make the plan from given measurements."""
    topology = Topology(topology.nodes)  # the layout alone, without this rank and its groups
    fit = fit_links(measurements, topology)
    calibration = Calibration.of(measurements, topology, fit.links, element_bytes=dtype.itemsize)
    cluster = Cluster(topology, fit.links, calibration)
    times: dict[int, dict[Rule, float]] = {}
    for m in measurements:
        times.setdefault(m.size_bytes, {})[m.rule] = m.median_seconds
    rules, notes = choose(times), (*notes, *fit.notes)
    profile = profile or _as_long_as_its_communication(cluster, Plan(rules), dtype.itemsize)
    plan = Plan(rules, best_threshold(profile, cluster, rules))
    return Tuned(plan, cluster, tuple(measurements), fit.error, notes, dtype.itemsize)


def _as_long_as_its_communication(cluster: Cluster, plan: Plan, element_bytes: int) -> Profile:
    """Return a profile without a model, whose backward takes as long as its all-reduces."""
    unit = plain_profile(_PLAIN_BYTES, 1.0, element_bytes)
    seconds = simulate(unit, cluster, plan).communication_seconds
    return plain_profile(_PLAIN_BYTES, seconds, element_bytes)
