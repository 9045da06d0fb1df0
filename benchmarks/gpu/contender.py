"""The process of one contender: ``python -m benchmarks.gpu.contender NAME RUN_DIR [--dry]``.

It reads commands and writes replies as lines of JSON. A loop calls :meth:`Turns.begin` before each
of its steps, which starts and ends the measurements between two steps; so the same commands serve a
loop of ours, whose caller is the trainer, and a plain one. Commands, by ``do``:

- ``warm``: steps until kernels are chosen and compiled; replies ``step_seconds`` and ``gigabytes``.
- ``block``: ``steps`` timed steps in a row; replies ``seconds``.
- ``host``: the host's time for a step while the device has other work; replies ``host_seconds``.
- ``profile``: a profiler's trace of ``steps`` steps; replies what ``kernels.summary`` returns.

``ready`` is sent when all packages are imported, before the first CUDA call. A contender that
cannot run replies ``refused`` (by the recipe), ``skipped`` or ``failed``, with the reason.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any, TextIO

Reply = dict[str, Any]
Steps = Generator[None, None, Reply]

WARM_STEPS = 8


class Turns:
    """Executes commands between the steps of a loop.

    Args:
        commands: lines of JSON; its end stops the loop.
        replies: where the replies go.
        dry: whether a step is only tried.
    """

    def __init__(self, commands: TextIO, replies: TextIO, dry: bool = False) -> None:
        self._commands, self._replies, self._dry = commands, replies, dry
        self._running: Steps | None = None

    def reply(self, content: Reply) -> None:
        """Send a reply."""
        self._replies.write(json.dumps(content) + "\n")
        self._replies.flush()

    def begin(self) -> None:
        """Take part in the loop before each of its steps; waits for a command between two.

        Raises:
            SystemExit: there are no more commands.
        """
        while True:
            if self._running is None:
                line = self._commands.readline()
                if not line:
                    raise SystemExit(0)
                command = json.loads(line)
                self._running = getattr(self, "_" + command.pop("do"))(**command)
            try:
                next(self._running)
                return
            except StopIteration as ended:
                self._running = None
                self.reply(ended.value)

    def _warm(self) -> Steps:
        import torch

        gigabytes = 0.0
        for _ in range(1 if self._dry else WARM_STEPS):
            yield
        if not self._dry:  # what only the choice of kernels needed, the other contenders may need
            self._synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(2):  # a step of our trainer that logs resets the peak as well
                yield
                gigabytes = max(gigabytes, torch.cuda.max_memory_allocated() / 2**30)
        timed = yield from self._block(1 if self._dry else 5)
        return {"step_seconds": timed["seconds"] / timed["steps"], "gigabytes": gigabytes}

    def _block(self, steps: int) -> Steps:
        self._synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            yield
        self._synchronize()
        return {"seconds": time.perf_counter() - began, "steps": steps}

    def _host(self, steps: int, sleep_seconds: float) -> Steps:
        from benchmarks.gpu import clock

        taken = []
        for _ in range(steps):
            self._synchronize()
            if not self._dry:
                clock.sleep(sleep_seconds, self._device())
            began = time.perf_counter()
            yield
            taken.append(time.perf_counter() - began)
        return {"host_seconds": statistics.median(taken), "steps": steps}

    def _profile(self, steps: int) -> Steps:
        from torch.profiler import ProfilerActivity, profile

        from benchmarks.gpu import kernels

        kinds = [ProfilerActivity.CPU] + ([] if self._dry else [ProfilerActivity.CUDA])
        self._synchronize()
        with profile(activities=kinds) as profiler:
            for _ in range(steps):
                yield
            self._synchronize()
        return kernels.summary(kernels.events_of(profiler), steps)

    def _device(self) -> Any:
        import torch

        return torch.device("cpu") if self._dry else torch.device("cuda", 0)

    def _synchronize(self) -> None:
        from benchmarks.gpu import clock

        clock.synchronize(self._device())


def main(name: str, run_dir: str, *options: str) -> int:
    """Serve one contender and return the exit code."""
    end_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the loop prints is no reply
    dry = "--dry" in options
    turns = Turns(sys.stdin, replies, dry)
    try:
        _serve(name, run_dir, dry, "--annotate" in options, turns)
    except Exception as error:
        from benchmarks.gpu.report import Skipped, error_line

        text = error_line(error)
        kind = {"RecipeError": "refused", "OutOfMemoryError": "skipped"}.get(type(error).__name__)
        if isinstance(error, Skipped):
            kind, text = "skipped", str(error)
        turns.reply({kind or "failed": text})
        return 1
    return 0


def end_with_parent() -> None:
    """Let the kernel end this process with the one that started it, which may be killed."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of Linux


def _serve(name: str, run_dir: str, dry: bool, annotate: bool, turns: Turns) -> None:
    import torch

    from benchmarks.gpu import loops, trainer_parts
    from benchmarks.gpu.contenders import CONTENDERS, EAGER
    from benchmarks.gpu.place import Place

    contender = {**CONTENDERS, EAGER.name: EAGER}[name]
    if dry:
        torch.set_num_threads(1)
    loops.imports(contender)
    if annotate:
        trainer_parts.annotate()
    turns.reply({"ready": True})
    if not sys.stdin.readline():  # the first command is to start
        return
    place = Place(turns._device(), dry)
    if contender.ours:
        loops.run_ours(contender, place, run_dir, turns.begin)
    else:
        loops.run_other(contender, place, turns.begin)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
