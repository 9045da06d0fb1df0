"""The readings of a run's meters: what is measured between two of them, and what a reading holds.

Between readings nothing waits for the device. A reading waits for it, and is a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ....comm import Topology
from ....lars import Schedule
from ....pipeline import Loader
from ...ranks import Job
from ..evaluate import Meter
from ..folder.metrics import SkippedImages
from ..step import TrainingStep
from ..timeline import Timeline
from .clocks import Interval
from .gradient_noise import NoiseMeter
from .stragglers import StragglerReport
from .usage import Usage, metrics_of


class Readings:
    """Measures the training steps of a run, and reads what was measured.

    Args:
        loader: Loader of the training images.
        timeline: Steps and images of the whole run.
        schedule: The learning rate of each step.
        step: Takes its steps.
        job: The ranks.
        topology: The node of each rank.
        skipped: The images that could not be used.
        noise: Measures the gradient noise scale, if the recipe asks for it.
        warn: Shows a warning on rank 0.
        sums: What :meth:`state_dict` returned in the run that this one goes on from.

    Attributes:
        meter: Sums of loss and accuracy since the last reading.
        stragglers: Names the ranks that hold the others up.
    """

    def __init__(
        self,
        loader: Loader,
        timeline: Timeline,
        schedule: Schedule,
        step: TrainingStep,
        job: Job,
        topology: Topology,
        skipped: SkippedImages,
        noise: NoiseMeter | None,
        warn: Callable[[str], None],
        sums: list[list[float]] | None = None,
    ) -> None:
        self._loader, self._timeline, self._job, self._warn = loader, timeline, job, warn
        self._schedule, self._precision = schedule, step.precision
        self._skipped, self._noise, self._phases = skipped, noise, step.phases
        self.stragglers = StragglerReport(job, topology, step.waiting, warn)
        self.meter = Meter(job.device)
        self._usage = Usage(job.device)
        self._images_before = 0  # of steps made before a resume, which are not in the interval
        self._interval: Interval
        self.restart()
        if sums is not None:
            self._go_on_from(sums)

    def restart(self) -> None:
        """Start the time of the next interval."""
        self._interval = Interval(self._loader.wait_seconds)

    def state_dict(self) -> list[list[float]]:
        """Return the sums since the last reading of each rank; a collective that waits for devices.

        So a run that is stopped between two readings, and resumed, logs the loss of one that was
        not. Its times are those of the steps since then.
        """
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
        return len(self._interval.waits)

    def step_end(self) -> None:
        """Note that a step has been made."""
        self._interval.step(self._loader.wait_seconds)

    def paused(self) -> AbstractContextManager[None]:
        """Context manager whose body is left out of the time of training."""
        return self._interval.paused()

    def read(self, step: int) -> tuple[dict[str, float], list[float]]:
        """Read the meters after ``step`` steps, which waits for the device; a collective.

        Returns:
            The metrics of the training split by name, of the steps since the last reading; and the
            seconds that each of these steps waited for its data, on the rank that waited longest.
        """
        interval, timeline = self._interval, self._timeline
        usage = self._usage.read()  # while the device works: the meter waits for it
        values, images = self.meter.read(self._job)
        seconds, skips, *others = self._job.all_reduce_max(
            interval.seconds(), self._skipped.news, *interval.waits, *usage
        )
        steps = len(interval.waits)
        waits, used = others[:steps], others[steps:]
        if skips:
            self._skipped.show(self._warn)
        values |= {
            "lr": self._schedule(step - 1),
            "images_per_second": (images - self._images_before) / seconds,
            "wait_seconds": sum(waits),
            "seconds": seconds,
            **self._phases.read(),
            **metrics_of(used),
            **self.stragglers.read(interval),
        }
        self._images_before = 0
        if self._noise:
            values |= self._noise.values()
        if timeline.changes_batch:
            values["batch_size"] = timeline.batch_size(step - 1)
        if self._precision.scales:
            values |= {
                "loss_scale": self._precision.loss_scale,
                "skipped_steps": float(self._precision.skipped_steps),
            }
        return values, [round(wait, 6) for wait in waits]
