"""Where a step of a run lies: in steps, epochs, images and seconds of training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..files import number
from ..training.folder.outcome import Line, step_waits
from ..training.timeline import Timeline

#: The axes that a curve can be drawn against, with their labels.
AXES = {"step": "steps", "epoch": "epochs", "images": "images", "seconds": "seconds"}

#: The position of some steps by axis; None where the run did not record what it takes.
Places = dict[str, list[float] | None]


class Positions:
    """The epochs, images and seconds of the steps of one run.

    Epochs and images are those of the run's timeline, and without one those that the lines have.
    Seconds are the times of the training steps, summed: evaluations, checkpoints and the start of
    the program are not in them, nor is the time while a run was stopped.

    Args:
        train: Lines of the training split, ascending by step.
        val: Lines of the evaluations.
        timeline: Timeline of the run; None if it is not known.

    Attributes:
        untimed: Number of steps up to the last line whose time was not recorded: those between a
            reading and a checkpoint, from which the run was resumed.
        seconds: Seconds of training up to the last line; None if a line has no time.
    """

    def __init__(
        self, train: Sequence[Line], val: Sequence[Line], timeline: Timeline | None
    ) -> None:
        self._timeline = timeline
        epochs = {line["step"]: line["epoch"] for line in (*train, *val)}
        self._epochs = [(0, 0.0), *((step, epochs[step]) for step in sorted(epochs) if step)]
        self._images: list[tuple[int, float]] | None = [(0, 0.0)]
        self._seconds: list[tuple[int, float]] | None = [(0, 0.0)] if train else None
        self.untimed = before = 0
        for line in train:
            step, timed = line["step"], len(step_waits(line))
            made = step - before
            rate, seconds = number(line.get("images_per_second")), number(line.get("seconds"))
            self.untimed += max(0, made - timed) if timed else 0
            if seconds is None:
                self._seconds = None
            elif self._seconds is not None:
                self._seconds.append((step, self._seconds[-1][1] + seconds))
            if rate is None or seconds is None:
                self._images = None
            elif self._images is not None:  # of the steps that were timed, and as many of the rest
                images = rate * seconds * (made / timed if timed else 1)
                self._images.append((step, self._images[-1][1] + images))
            before = step
        self.seconds = self._seconds[-1][1] if self._seconds else None

    def at(self, steps: Sequence[int]) -> Places:
        """Return the position of each of ``steps``, ascending, by axis."""
        places: Places = {"step": list(steps)}
        if self._timeline:
            places["epoch"] = [round(self._timeline.epoch(step), 4) for step in steps]
            places["images"] = [self._timeline.position(step) for step in steps]
        else:
            places["epoch"] = _between(self._epochs, steps, 4)
            places["images"] = _between(self._images, steps, 0) if self._images else None
        places["seconds"] = _between(self._seconds, steps, 3) if self._seconds else None
        return places


def _between(knots: list[tuple[int, float]], steps: Sequence[int], digits: int) -> list[float]:
    at, values = zip(*knots, strict=True)
    found: list[float] = np.interp(steps, at, values).round(digits).tolist()
    return found
