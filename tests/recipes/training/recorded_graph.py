"""A model of CUDA graphs on the CPU, for the trainer: a capture is a recording that is undone."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from largebatch.amp import skips
from largebatch.lars import capture
from largebatch.recipes.training import recorder
from tests.replay import Recording


class RecordedGraphs:
    """Stands in for ``recorder.DeviceGraphs``.

    Attributes:
        captures: Number of captures so far, over all objects.
    """

    captures = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self, run: Callable[[], Any]) -> Any:
        return run()

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        generator = torch.get_rng_state()
        tape = Recording()
        try:
            # LARS then keeps its trust ratios where the graph writes them.
            with (
                mock.patch.object(capture, "captures", return_value=True),
                mock.patch.object(skips, "is_capturing", return_value=True),
                tape,
            ):
                outputs = run()
        finally:
            tape.rewind()
            torch.set_rng_state(generator)
        RecordedGraphs.captures += 1
        return outputs, tape.replay


@contextmanager
def recorded_graphs():
    """Let trainers on the CPU capture their steps, as they would on a GPU."""
    RecordedGraphs.captures = 0
    with (
        mock.patch.dict(recorder.RECORDERS, {"cpu": RecordedGraphs}),
        # On a GPU the host does not look whether a step was skipped.
        mock.patch.object(skips, "is_free_to_read", return_value=False),
    ):
        yield RecordedGraphs
