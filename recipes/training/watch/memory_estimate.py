"""The memory that a run will need on each rank, counted when it starts, in one line."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout

from torch import nn

from ...ranks import Job
from ...schema.recipe import Recipe
from ...words import decimal_size
from ..build import Components
from .memory import Memory, MemoryCounter, without_numbers
from .usage import Capacity, capacity_of


class MemoryEstimate:
    """Counts the memory of a run's step; what cannot be counted gives no estimate.

    Args:
        recipe: The recipe.
        components: Components of the run. A copy of their model without numbers is made at once, so
            that the model may be changed afterwards.
        job: The ranks.
    """

    def __init__(self, recipe: Recipe, components: Components, job: Job) -> None:
        self._recipe = recipe.model_copy(update={"device": job.device.type})
        self._classes = len(components.loader.source.classes)
        self._timeline, self._ranks = components.timeline, job.world_size
        self.capacity = capacity_of(job.device)
        self._model: nn.Module | None
        try:
            self._model = without_numbers(components.model)
        except Exception:  # of any kind: the model may be the user's
            self._model = None

    def count(self, precision: str) -> Memory | None:
        """Count the step of the stage with the most pixels in a micro-batch; None if it cannot be.

        Takes about a second, or some for a large network.

        Args:
            precision: A key of ``PRECISIONS``.
        """
        if self._model is None:
            return None
        phases = self._timeline.phases
        most = max(phases, key=lambda one: one.micro_batch_size * one.image_size**2)
        unsaid = io.StringIO()  # what the model prints in a pass that is none of the run's
        try:
            with warnings.catch_warnings(), redirect_stdout(unsaid), redirect_stderr(unsaid):
                warnings.simplefilter("ignore")
                return MemoryCounter(self._recipe, self._classes, self._model).count(
                    precision,
                    most.micro_batch_size,
                    most.image_size,
                    ranks=self._ranks,
                    accumulation=most.accumulation(self._ranks),
                )
        except Exception:  # of any kind: it is not worth a run
            return None


def in_words(memory: Memory, capacity: Capacity | None) -> str:
    """Say what a step needs, beside what a GPU has: ``about 11.2 GB of tensors on each rank``."""
    about = "more than" if memory.state is None else "about"
    text = f"{about} {decimal_size(memory.peak)} of tensors on each rank"
    if capacity is None:
        return text
    return f"{text}, of {decimal_size(capacity.bytes)} on the {capacity.name}"


def too_large(memory: Memory | None, capacity: Capacity | None) -> str | None:
    """Warn, in one line, that a step needs more memory than the GPU has; None if it does not."""
    if memory is None or capacity is None or memory.peak <= capacity.bytes:
        return None
    return (
        f"micro_batch_size: {memory.micro_batch_size} images need about "
        f"{decimal_size(memory.peak)}, and {capacity.name} has "
        f"{decimal_size(capacity.bytes)}; valid: fewer images, of which more are "
        "accumulated, in the same global batch"
    )
