"""The process of one contender: it takes commands between the steps of a training loop.

A loop calls :meth:`Turns.begin` before each of its steps, which starts and ends the measurements
between two steps; so the same commands serve a loop of ours, whose caller is the trainer, and a
plain one. Commands, by ``do``, and their replies:

- ``warm``: steps until kernels are chosen and compiled; ``step_seconds`` and ``peak_GiB``.
- ``block``: ``steps`` timed steps in a row; ``seconds``, and what the sensors said meanwhile.
- ``profile``: a profiler's trace of ``steps`` steps; what ``kernels.summary`` returns.

``ready`` is sent when all packages are imported, before the first CUDA call. A contender that
cannot run replies ``refused`` (by the recipe), ``skipped`` or ``failed``, with the reason.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.contenders import Contender
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Skipped, error_line

Reply = dict[str, Any]
Steps = Generator[None, None, Reply]

WARM_STEPS = 8


class Turns:
    """Executes the commands of a pipe between the steps of a loop; its end stops the loop."""

    def __init__(self, pipe: Any, place: Place) -> None:
        self._pipe, self._place = pipe, place
        self._running: Steps | None = None

    def begin(self) -> None:
        """Take part in the loop before each of its steps; waits for a command between two."""
        while True:
            if self._running is None:
                command = self.next_command()
                self._running = getattr(self, "_" + command.pop("do"))(**command)
            try:
                next(self._running)
                return
            except StopIteration as ended:
                self._running = None
                self._pipe.send(ended.value)

    def next_command(self) -> Reply:
        """Wait for a command."""
        try:
            command: Reply = self._pipe.recv()
        except EOFError:
            raise SystemExit(0) from None
        return command

    def _warm(self) -> Steps:
        dry, peak = self._place.dry, 0.0
        for _ in range(1 if dry else WARM_STEPS):
            yield
        if not dry:  # what only the choice of kernels needed, the other contenders may need
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(2):  # a step of our trainer that logs resets the peak as well
                yield
                peak = max(peak, torch.cuda.max_memory_allocated() / 2**30)
        timed = yield from self._block(1 if dry else 3)
        return {"step_seconds": timed["seconds"] / timed["steps"], "peak_GiB": peak}

    def _block(self, steps: int) -> Steps:
        sensors: dict[str, float] = {}
        clock.synchronize(self._place.device)
        began = time.perf_counter()
        for number in range(steps):
            if number == steps - 1 and not self._place.dry:  # the device still has work
                sensors = read_sensors()
            yield
        clock.synchronize(self._place.device)
        return {"seconds": time.perf_counter() - began, "steps": steps, "sensors": sensors}

    def _profile(self, steps: int) -> Steps:
        from torch.profiler import ProfilerActivity, profile

        from benchmarks.gpu import kernels

        kinds = [ProfilerActivity.CPU] + ([] if self._place.dry else [ProfilerActivity.CUDA])
        clock.synchronize(self._place.device)
        with profile(activities=kinds) as profiler:
            for _ in range(steps):
                yield
            clock.synchronize(self._place.device)
        return kernels.summary(kernels.events_of(profiler), steps)


def read_sensors() -> dict[str, float]:
    """Return clock, power and temperature; empty without the package pynvml or permission."""
    with suppress(Exception):
        watts, celsius = torch.cuda.power_draw() / 1e3, float(torch.cuda.temperature())
        return {"SM_MHz": float(torch.cuda.clock_rate()), "watts": watts, "celsius": celsius}
    return {}


def serve(pipe: Any, contender: Contender, place: Place) -> None:
    """Serve one contender."""
    from benchmarks.gpu import loops

    # All share one folder, so that the same kernel is compiled once.
    cache = Path(tempfile.gettempdir()) / "largebatch-gpu-inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    if place.dry:
        torch.set_num_threads(1)
    turns = Turns(pipe, place)
    try:
        loops.imports(contender)
        pipe.send({"ready": True})
        turns.next_command()  # the first command is to start
        run = loops.run_ours if contender.ours else loops.run_other
        with tempfile.TemporaryDirectory() as folder:
            run(contender, place, f"{folder}/run", turns.begin)
    except Exception as error:
        kind = {"RecipeError": "refused", "OutOfMemoryError": "skipped"}.get(type(error).__name__)
        skips = isinstance(error, Skipped)
        reason = str(error) if skips else error_line(error)
        pipe.send({"skipped" if skips else kind or "failed": reason})
