"""The readings of a run's meters: what is measured between two of them, and what a reading holds.

Between readings nothing waits for the device. A reading waits for it, and is a collective.

It also names ranks that hold the others up. In data-parallel training every step takes as long as
the slowest rank. A rank's *own work* is the time of its steps without its wait for the all-reduce.
A rank that is slower than all others hardly waits, and the others wait for it. Where a link is
slow, all of them wait.
"""

from __future__ import annotations

import resource
import socket
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from ....comm import ranks_named
from ....lars import GradientNoise, Schedule
from ....pipeline import Loader
from ...ranks import Job
from ..evaluate import Meter
from ..step import TrainingStep
from ..timeline import Timeline
from .clocks import RunClock

#: Share of the time of a step by which ranks must be slower than all others to be named.
SHARE = 0.2
#: A warning is given once it held for this many readings in a row, and for this many seconds.
READINGS, SECONDS = 3, 3.0


class Readings:
    """Measures the training steps of a run, and reads what was measured."""

    def __init__(
        self,
        loader: Loader,
        timeline: Timeline,
        schedule: Schedule,
        step: TrainingStep,
        job: Job,
        clock: RunClock,
        skipped: SkippedImages,
        noise: GradientNoise | None,
        warn: Callable[[str], None],
        sums: list[list[float]] | None = None,
    ) -> None:
        self._loader, self._timeline, self._job, self._warn = loader, timeline, job, warn
        self._schedule, self._precision, self._clock = schedule, step.precision, clock
        self._skipped, self._noise, self._phases = skipped, noise, step.phases
        self.stragglers = StragglerReport(job, warn)
        self.meter = Meter(job.device)  # sums of loss and accuracy since the last reading
        self._images_before = 0  # of steps made before a resume, which are not in the time
        self.restart()
        if sums is not None:
            self._go_on_from(sums)

    def restart(self) -> None:
        """Start the time of the next reading."""
        self._trained = self._clock.spent()["training"]
        self._waited = self._loader.wait_seconds
        self._waits: list[float] = []  # of each step for its data

    def state_dict(self) -> list[list[float]]:
        """Return each rank's sums since the last reading, so that a resumed run logs the same."""
        return self._job.gather(self.meter.sums())

    def _go_on_from(self, sums: list[list[float]]) -> None:
        """Take over the sums of any number of ranks."""
        job, total = self._job, [sum(numbers) for numbers in zip(*sums, strict=True)]
        if len(sums) != job.world_size:
            sums = [total, *[[0.0] * len(total)] * (job.world_size - 1)]
        self.meter.go_on_from(sums[job.rank])
        self._images_before = round(total[1])

    @property
    def steps(self) -> int:
        """Number of steps since the last reading."""
        return len(self._waits)

    def step_end(self) -> None:
        """Note that a step has been made."""
        before, self._waited = self._waited, self._loader.wait_seconds
        self._waits.append(self._waited - before)

    def read(self, step: int) -> tuple[dict[str, float], list[float]]:
        """Return the metrics since the last reading, and the longest wait for data of each step."""
        values, images = self.meter.read(self._job)
        own = self._clock.spent()["training"] - self._trained
        memory = peak_memory_bytes(self._job.device)
        seconds, memory, skips, *waits = self._job.all_reduce_max(
            own, memory, self._skipped.news, *self._waits
        )
        if skips:
            self._skipped.show(self._warn)
        values |= {
            "lr": self._schedule(step - 1),
            "images_per_second": (images - self._images_before) / seconds,
            "wait_seconds": sum(waits),
            "seconds": seconds,
            **self._phases.read(),
            "memory_bytes": memory,
        }
        self._images_before = 0
        if "all_reduce_seconds" in values:
            all_reduce = values["all_reduce_seconds"]
            values |= self.stragglers.read(own, sum(self._waits), all_reduce, self.steps)
        if self._noise and (noise := self._noise.estimate()).steps + noise.left_out:
            values |= {"noise_scale": noise.noise_scale, "noise_scale_error": noise.standard_error}
        if self._timeline.changes:
            values["batch_size"] = self._timeline.batch_size(step - 1)
        if self._precision.scales:
            values |= {
                "loss_scale": self._precision.loss_scale,
                "skipped_steps": float(self._precision.skipped_steps),
            }
        self._clock.read(values)
        return values, [round(wait, 6) for wait in waits]


class SkippedImages:
    """Warns of each image that could not be used, once, whichever ranks have met it."""

    def __init__(self, job: Job, *loaders: Loader | None) -> None:
        self._job, self._loaders = job, [loader for loader in loaders if loader]
        self._shown = 0  # images of this rank
        self._known: set[str] = set()

    @property
    def news(self) -> int:
        """Number of images that this rank has met since the last :meth:`show`."""
        return sum(len(loader.skipped) for loader in self._loaders) - self._shown

    @property
    def count(self) -> int:
        """Number of images that have been shown."""
        return len(self._known)

    def show(self, warn: Callable[[str], None]) -> None:
        """Warn of the images that are new; a collective."""
        found = [pair for loader in self._loaders for pair in loader.skipped.items()]
        self._shown = len(found)
        for image, what in (pair for pairs in self._job.gather(found) for pair in pairs):
            if image not in self._known:
                self._known.add(image)
                warn(f"skipped {image}: {what}")


def peak_memory_bytes(device: torch.device) -> float:
    """The most memory in use: on a GPU since the last reading, of the process on a CPU so far."""
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float(memory)
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- ranks that hold the others up -----------------------------------------------------------


class RankTimes(NamedTuple):
    """Seconds of a rank in some steps."""

    total: float  # without evaluations and checkpoints
    input: float  # it waited for its data
    wait: float  # it waited for the all-reduce, after its own backward pass

    @property
    def own(self) -> float:
        """Time of its own work, with the wait for data."""
        return self.total - self.wait


class Slow(NamedTuple):
    """Ranks that are slower than all others."""

    ranks: tuple[int, ...]
    own: float  # seconds of own work of the fastest of them
    others: float  # seconds of own work of the slowest of the other ranks
    share: float  # of the total time: what the others could save
    by_input: bool  # whether most of the difference is waiting for data


def slow_ranks(times: Sequence[RankTimes]) -> Slow | None:
    """Return few ranks that stand apart from all others by the largest gap in own work, or None."""
    order = sorted(range(len(times)), key=lambda rank: times[rank].own)
    total = max(time.total for time in times)
    gaps = [times[b].own - times[a].own for a, b in pairwise(order)]
    if not gaps or total <= 0 or max(gaps) <= SHARE * total:
        return None
    split = gaps.index(max(gaps)) + 1
    fast, slow = order[:split], order[split:]
    if len(slow) > max(1, len(times) // 4):
        return None
    waited = [statistics.median(times[rank].input for rank in ranks) for ranks in (slow, fast)]
    own, others = times[order[split]].own, times[order[split - 1]].own
    by_input = waited[0] - waited[1] > max(gaps) / 2
    return Slow(tuple(sorted(slow)), own, others, max(gaps) / total, by_input)


class StragglerReport:
    """Gathers the times of all ranks at each reading of the meters, and warns of what is slow."""

    def __init__(self, job: Job, warn: Callable[[str], None]) -> None:
        self._job, self._warn, self.slow = job, warn, ""
        self._found, self._lasted = "", [0.0]  # by the last readings, and their seconds
        self._is_first = True

    def read(self, total: float, waited: float, all_reduce: float, steps: int) -> dict[str, float]:
        """Return the metrics of the steps since the last reading; a collective."""
        times = [RankTimes(*numbers) for numbers in self._job.all_gather(total, waited, all_reduce)]
        if not self._is_first:  # in which libraries choose kernels, and compile
            self._look(times, steps)
        self._is_first = False
        order = sorted(range(len(times)), key=lambda rank: times[rank].own)
        waits = [time.wait for time in times]
        return {
            "all_reduce_wait_seconds": statistics.median(waits),
            "least_all_reduce_wait_seconds": min(waits),
            "slowest_rank": order[-1],
            "slowest_rank_seconds": times[order[-1]].own - times[order[-2]].own,
        }

    def _look(self, times: list[RankTimes], steps: int) -> None:
        slow = slow_ranks(times)
        name = ranks_named(slow.ranks) if slow else ""
        total = max(time.total for time in times)
        self._lasted = [*(self._lasted if name == self._found else []), total]
        self._found = name
        if len(self._lasted) < READINGS or sum(self._lasted) < SECONDS or name == self.slow:
            return
        if slow:
            hosts = self._job.gather(socket.gethostname())
            self._warn(
                f"the other ranks wait for {name} ({', '.join({hosts[r]: 0 for r in slow.ranks})}) "
                f"for {slow.share:.0%} of each step: {slow.own / steps:.3g} s of own work against "
                f"{slow.others / steps:.3g} s, the difference in "
                f"{'waiting for data' if slow.by_input else 'computing'}"
            )
        else:
            self._warn(f"the other ranks no longer wait for {self.slow}")
        self.slow = name
