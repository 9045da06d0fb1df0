"""Processes of contenders, seen from the part that measures them: start, ask, take turns, end.

Whatever a contender does (raise, die, hang), :class:`Failed` says so and the others go on.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.contenders import Contender

Reply = dict[str, Any]

#: Seconds to wait for the end of a process whose commands have ended.
_END_SECONDS = 5.0


class Failed(Exception):  # noqa: N818 - the contender's, not an error of the harness
    """Raised when a contender gives no measurement.

    Attributes:
        kind: ``refused``, ``skipped`` or ``failed``; ``late`` if there was no reply in time.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def command_of(contender: Contender, run_dir: Path, *, dry: bool, annotate: bool) -> list[str]:
    """Return the command line of a contender's process."""
    command = [sys.executable, "-m", "benchmarks.gpu.contender", contender.name, str(run_dir)]
    return command + ["--dry"] * dry + ["--annotate"] * annotate


class Process:
    """A contender's process. It starts to import at once, and touches the GPU once it is asked to.

    All share one folder of compiled kernels, so that the same kernel is compiled once.

    Args:
        contender: what to run.
        dry: whether to run small shapes on the CPU.
        annotate: whether a trace names the trainer's parts.

    Attributes:
        contender: as given.
        start_seconds: time from its first CUDA call to its first steady step.
        step_seconds: time of a step after that.
        gigabytes: largest amount of memory that its tensors took, in GiB.
    """

    def __init__(self, contender: Contender, *, dry: bool, annotate: bool = False) -> None:
        self.contender = contender
        self.start_seconds = self.step_seconds = self.gigabytes = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="largebatch-gpu-")
        self._log = Path(self._folder.name) / "log"
        command = command_of(contender, Path(self._folder.name) / "run", dry=dry, annotate=annotate)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(),
                start_new_session=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_ready(self, seconds: float) -> Reply:
        """Wait until its packages are imported.

        Raises:
            Failed: it cannot run here, has died, or took longer than ``seconds``.
        """
        return self._answer(seconds)

    def warm(self, seconds: float) -> Reply:
        """Make it build its model and take its first steps.

        Raises:
            Failed: as above.
        """
        began = time.monotonic()
        self._send({"do": "start"})
        answer = self.ask(seconds, do="warm")
        self.start_seconds = time.monotonic() - began
        self.step_seconds, self.gigabytes = answer["step_seconds"], answer["gigabytes"]
        return answer

    def ask(self, seconds: float, **command: Any) -> Reply:
        """Send a command and return the reply.

        Raises:
            Failed: as above.
        """
        self._send(command)
        return self._answer(seconds)

    def _send(self, command: Reply) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has died, as reading its reply tells
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def _answer(self, seconds: float) -> Reply:
        try:
            line = self._lines.get(timeout=max(0.1, seconds))
        except queue.Empty:
            self.end(at_once=True)
            raise Failed("late", f"no reply within {seconds:.0f} s; killed") from None
        if not line:
            code = self._process.wait()
            ended = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise Failed("failed", f"{ended}{self._last_line()}")
        reply: Reply = json.loads(line)
        for kind in ("refused", "skipped", "failed"):
            if kind in reply:
                raise Failed(kind, reply[kind])
        return reply

    def _last_line(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        return next((f": {line[:200]}" for line in reversed(lines) if line), "")

    def end(self, *, at_once: bool = False) -> None:
        """End the process with all that it started, and free its memory on the GPU."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        if not at_once:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(OSError):
            self._folder.cleanup()


def _environment() -> dict[str, str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    cache = Path(tempfile.gettempdir()) / "largebatch-gpu-inductor"
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    return environment


def start_all(contenders: Sequence[Contender], *, dry: bool) -> dict[str, Process]:
    """Start the processes of all contenders side by side; none has touched the GPU yet."""
    return {contender.name: Process(contender, dry=dry) for contender in contenders}
