"""The four calls: their parts, one after the other, each in a process and within its time.

A part has its own process because an illegal memory access makes the GPU unusable for the whole
process, and so that a part that hangs can be killed. A part that fails cancels nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.child import ended
from benchmarks.gpu.report import Report, Skipped, error_line

#: The parts of each call in order, with their weights in the time and the most seconds of each;
#: what one leaves goes to those that follow.
CALLS: dict[str, dict[str, tuple[float, float]]] = {
    "a": {"checks": (1.5, 60), "contest": (9, 600)},
    "b": {"checks": (1.5, 60), "contest": (9, 600)},
    "c": {
        "checks": (4, 240),
        "optimizer_steps": (2, 100),
        "hook": (2.5, 200),
        "dali": (1.5, 200),
    },
    "d": {"cifar": (1, 600)},
}

#: Calls that say nothing about this project without its trainer.
_NEED_TRAINER = ("a", "b", "d")

#: Seconds before its end at which a part plans to have ended, and least seconds to start one with.
_MARGIN_SECONDS = 4.0
#: As much of the text as is printed, in characters: a short reply holds it.
_PRINTED = 11_000


@dataclass(frozen=True)
class Options:
    """What the command line asks for: a call, a folder for its results, and how to run it."""

    call: str
    folder: Path
    dry: bool = False
    cifar10: Path | None = None

    @classmethod
    def of(cls, options: Namespace) -> Options:
        return cls(options.call, options.copy, options.dry, options.cifar10)

    @property
    def file(self) -> Path:
        """The results file."""
        return self.folder / f"call-{self.call}.json"

    def command(self, part: str, deadline: float) -> list[str]:
        """Return the command line that runs one part in a process of its own."""
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--call", self.call]
        command += ["--copy", str(self.folder), "--deadline", repr(deadline)]
        command += ["--cifar10", str(self.cifar10)] if self.cifar10 else []
        return command + (["--dry"] if self.dry else [])


def obstacle(call: str) -> str:
    """Return why this machine cannot run a call, or ""."""
    import torch

    from benchmarks.gpu.place import TRAINER, installed

    if not torch.cuda.is_available():
        return "this machine has no CUDA GPU; --dry runs on the CPU"
    missing = [m for m in TRAINER if call in _NEED_TRAINER and not installed(m)]
    if missing:
        return (
            f"our trainer needs {', '.join(missing)}; on a machine with a network, "
            "python -m benchmarks.gpu.wheels gathers wheels and prints how to install them"
        )
    return ""


def run(options: Options, deadline: float) -> int:
    """Run the parts of a call until ``deadline``, write and print the results, and return the exit
    code. The deadline is on the clock of ``time.monotonic``."""
    from benchmarks.gpu.place import about

    options.folder.mkdir(parents=True, exist_ok=True)
    content = {"call": options.call, "dry": options.dry, **about(options.dry), "parts": {}}
    report.write(options.file, content)
    weights = CALLS[options.call]
    left = sum(weight for weight, _ in weights.values())
    try:
        for name, (weight, most) in weights.items():
            now = time.monotonic()
            seconds = min(most, (deadline - now) * weight / left)
            if options.dry:  # on a machine that may be slow
                seconds = deadline - now
            left -= weight
            if seconds > 2 * _MARGIN_SECONDS:
                ends = now + seconds
                watch(name, options.command(name, ends - _MARGIN_SECONDS), options.file, ends)
            else:
                close(name, options.file, "skipped", "no time is left")
            _write_text(options.file)
    finally:  # also where a signal ends the call
        print(f"\n{_write_text(options.file)[-_PRINTED:]}", flush=True)
    return report.exit_code(report.read(options.file))


def _write_text(file: Path) -> str:
    text = report.markdown(report.read(file))
    file.with_suffix(".md").write_text(text)
    return text


def run_part(name: str, deadline: float, options: Options) -> None:
    """Run a part in this process; whatever it raises is recorded in its section of the file."""
    import torch

    from benchmarks.gpu.place import Place

    device = torch.device("cpu") if options.dry else torch.device("cuda", 0)
    if options.dry:
        torch.set_num_threads(1)
    found = Report(options.file, name, deadline)
    try:
        part = import_module(f"benchmarks.gpu.{name}")
        found.content["title"] = part.TITLE
        part.run(found, Place(device, options.dry, options.cifar10, options.call))
    except Skipped as reason:
        found.finish("skipped", str(reason))
    except Exception as error:
        found.finish("failed", error_line(error))
    else:
        found.finish("ok")


def watch(name: str, command: list[str], file: Path, deadline: float) -> None:
    """Run a part by ``command`` and kill it at ``deadline``; its results so far are kept."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    state = "failed"
    try:
        how = "ended " + ended(process.wait(max(1.0, deadline - time.monotonic())))
    except subprocess.TimeoutExpired:
        state, how = "late", "killed, as its time was over"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its child processes
        process.wait()
    section = report.read(file)["parts"].get(name, {})
    if section.get("state", "running") == "running":
        close(name, file, state, f"not finished: {how}")


def close(name: str, file: Path, state: str, reason: str) -> None:
    """Close the section of a part that could not close it itself, or did not run."""
    content = report.read(file)
    section = content["parts"].setdefault(name, report.new_section(name))
    section |= {"state": state, "reason": reason}
    report.write(file, content)
    print(f"{name}: {state}: {reason}", flush=True)
