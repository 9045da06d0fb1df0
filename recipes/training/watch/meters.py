"""The readings of a run's meters: what is measured between two of them, and what a reading holds.

Between readings nothing waits for the device. A reading waits for it, and is a collective.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence

import torch

from ....lars import Schedule
from ....pipeline import Loader
from ...ranks import Job
from ..evaluate import Meter
from ..folder.metrics import SkippedImages
from ..step import TrainingStep
from ..timeline import Timeline
from .clocks import RunClock
from .noise import NoiseMeter
from .stragglers import StragglerReport

#: The metrics of :class:`Usage`, in their order.
NAMES = ("memory_bytes", "gpu_utilisation", "gpu_power_watts")
_UNKNOWN = -1.0


class Readings:
    """Measures the training steps of a run, and reads what was measured.

    Args:
        loader: Loader of the training images.
        timeline: Steps and images of the whole run.
        schedule: The learning rate of each step.
        step: Takes its steps.
        job: The ranks.
        clock: Measures how long training took.
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
        clock: RunClock,
        skipped: SkippedImages,
        noise: NoiseMeter | None,
        warn: Callable[[str], None],
        sums: list[list[float]] | None = None,
    ) -> None:
        self._loader, self._timeline, self._job, self._warn = loader, timeline, job, warn
        self._schedule, self._precision, self._clock = schedule, step.precision, clock
        self._skipped, self._noise, self._phases = skipped, noise, step.phases
        self.stragglers = StragglerReport(job, warn)
        self.meter = Meter(job.device)
        self._usage = Usage(job.device)
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
        return len(self._waits)

    def step_end(self) -> None:
        """Note that a step has been made."""
        before, self._waited = self._waited, self._loader.wait_seconds
        self._waits.append(self._waited - before)

    def read(self, step: int) -> tuple[dict[str, float], list[float]]:
        """Read the meters after ``step`` steps, which waits for the device; a collective.

        Returns:
            The metrics of the training split by name, of the steps since the last reading; and the
            seconds that each of these steps waited for its data, on the rank that waited longest.
        """
        usage = self._usage.read()  # while the device works: the meter waits for it
        values, images = self.meter.read(self._job)
        own = self._clock.spent()["training"] - self._trained
        seconds, skips, *others = self._job.all_reduce_max(
            own, self._skipped.news, *self._waits, *usage
        )
        waits, used = others[: self.steps], others[self.steps :]
        if skips:
            self._skipped.show(self._warn)
        values |= {
            "lr": self._schedule(step - 1),
            "images_per_second": (images - self._images_before) / seconds,
            "wait_seconds": sum(waits),
            "seconds": seconds,
            **self._phases.read(),
            **metrics_of(used),
        }
        self._images_before = 0
        if "all_reduce_seconds" in values:
            all_reduce = values["all_reduce_seconds"]
            values |= self.stragglers.read(own, sum(self._waits), all_reduce, self.steps)
        if self._noise:
            values |= self._noise.values()
        if self._timeline.changes_batch:
            values["batch_size"] = self._timeline.batch_size(step - 1)
        if self._precision.scales:
            values |= {
                "loss_scale": self._precision.loss_scale,
                "skipped_steps": float(self._precision.skipped_steps),
            }
        self._clock.read(values, waits)
        return values, [round(wait, 6) for wait in waits]


class Usage:
    """Reads what this process uses of its device, without waiting for it.

    Utilisation and power are read by torch's own functions, which find the GPU by
    CUDA_VISIBLE_DEVICES and ask NVIDIA's management library. They need the package
    ``nvidia-ml-py``; without it, or where the driver does not tell, they are left out.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sensors: dict[str, Callable[[], float]] = {}
        if device.type == "cuda" and torch.version.cuda:
            self._sensors = {
                "gpu_utilisation": lambda: torch.cuda.utilization(device),
                "gpu_power_watts": lambda: torch.cuda.power_draw(device) / 1000,
            }

    def read(self) -> list[float]:
        """Return a number for each of :data:`NAMES`, of which a larger one is more; -1: unknown.

        Memory on a GPU is the most that torch had allocated since the last call, in bytes, and on a
        CPU the largest resident size of the process so far, which Linux does not forget.
        Utilisation is the percentage of the last second or less in which a kernel ran.
        """
        if self._device.type == "cuda":
            memory = float(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            memory = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return [memory, *(self._sensor(name) for name in NAMES[1:])]

    def _sensor(self, name: str) -> float:
        try:
            return float(self._sensors[name]())
        except Exception:  # of pynvml or for want of it; a run does not end for it
            self._sensors.pop(name, None)
            return _UNKNOWN


def metrics_of(largest: Sequence[float]) -> dict[str, float]:
    """Return the metrics of a reading.

    Args:
        largest: Of each number of :meth:`Usage.read`, the largest on any rank.
    """
    return {name: n for name, n in zip(NAMES, largest, strict=True) if n != _UNKNOWN}
