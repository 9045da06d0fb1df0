"""Run the parts one after the other, each in its own process and within its share of the time.

A part has its own process because an illegal memory access makes the GPU unusable for the whole
process, and so that a part that hangs can be killed. After a failure of ``correctness`` nothing
else runs: the speed of wrong results is of no use.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.report import Content, Report, Skipped, error_line

FIRST = "correctness"

#: The parts in order, with their weights in the time; unused time goes to the parts that follow.
PARTS = {FIRST: 4.0, "fast": 9.0, "why": 7.0, "lars_step": 1.5, "hook": 1.0}
PARTS |= {"muon": 1.5, "noise": 1.0, "cifar": 9.0, "dali": 1.0}

#: Those that nine minutes hold together.
DEFAULT = (FIRST, "fast")

#: Parts that say nothing about this project without its trainer.
NEED_TRAINER = {FIRST, "fast", "why", "cifar"}

#: Fraction of its share that a part may plan with; the rest is for its start and its last item. The
#: first part has more, because killing it ends the run.
PLANNED, PLANNED_OF_FIRST = 0.92, 0.85
#: A part with less time than this is not started.
_START_SECONDS = 5.0

#: Variable that tells a process that it runs a part for another one.
CHILD = "LARGEBATCH_GPU_PART"


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        out: folder of the results; created if it does not exist. Parts that a results file of the
            same device has already stay in it, unless they run again.
        parts: names in ``PARTS``.
        seconds: time limit of all parts.
        dry: whether to run small shapes on the CPU.
        here: whether the parts run in this process.
        cifar10: the CIFAR-10 images, if they are there.
        only: groups of contenders that ``fast`` measures; None: all.
    """

    out: Path
    parts: list[str]
    seconds: float
    dry: bool = False
    here: bool = False
    cifar10: Path | None = None
    only: tuple[str, ...] | None = None

    def command(self, part: str, seconds: float) -> list[str]:
        """Return the command line that runs one part in a process of its own."""
        command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--parts", part]
        command += ["--out", str(self.out), "--minutes", str(seconds / 60)]
        command += ["--cifar10", str(self.cifar10)] if self.cifar10 else []
        command += ["--only", *self.only] if self.only else []
        return command + (["--dry"] if self.dry else [])


def has_gpu() -> bool:
    """Whether this machine has a CUDA GPU."""
    import torch

    return torch.cuda.is_available()


def missing_packages(parts: list[str]) -> list[str]:
    """Return the modules that ``parts`` need of our trainer and that are not installed."""
    from benchmarks.gpu.place import TRAINER, installed

    needed = TRAINER if NEED_TRAINER & {*parts} else ()
    return [module for module in needed if not installed(module)]


def run(options: Options) -> int:
    """Run the parts, write the results and return the exit code."""
    from benchmarks.gpu.place import about

    started = time.monotonic()
    content: Content = {"dry": options.dry, **about(options.dry), "parts": {}}
    device = "dry-cpu" if options.dry else _slug(content["machine"]["device"])
    file = options.out / f"gpu-{device}.json"
    child = os.environ.get(CHILD) == "1"
    if not child:
        options.out.mkdir(parents=True, exist_ok=True)
        with suppress(OSError, ValueError, KeyError):
            content["parts"] = report.read(file)["parts"]
        report.write(file, content)
    stop = ""
    for number, name in enumerate(options.parts):
        left = sum(PARTS[other] for other in options.parts[number:])
        share = (options.seconds - (time.monotonic() - started)) * PARTS[name] / left
        if stop:
            close(name, file, "skipped", stop, new=True)
        elif options.here:
            run_part(name, file, share, options)
        elif share < _START_SECONDS:
            close(name, file, "skipped", "no time is left", new=True)
        else:
            planned = (PLANNED_OF_FIRST if name == FIRST else PLANNED) * share
            watch(name, options.command(name, planned), file, share)
        if name == FIRST and report.read(file)["parts"][name]["state"] == "failed":
            stop = f"not run, because {FIRST} failed"
        if not child:
            _sort(file)
            file.with_suffix(".md").write_text(report.markdown(report.read(file)))
    content = report.read(file)
    ran = {"parts": {name: content["parts"][name] for name in options.parts}}
    if not child:
        print(f"\n{report.summary(ran)}\n\n{file} and .md", flush=True)
    return report.exit_code(ran)


def _sort(file: Path) -> None:
    """Put the parts of a results file into their order, which earlier runs may have left."""
    content = report.read(file)
    content["parts"] = {n: content["parts"][n] for n in PARTS if n in content["parts"]}
    report.write(file, content)


def run_part(name: str, file: Path, seconds: float, options: Options) -> None:
    """Run a part in this process; whatever it raises is recorded in its section of ``file``."""
    import torch

    from benchmarks.gpu.place import Place

    device = torch.device("cpu") if options.dry else torch.device("cuda", 0)
    place = Place(device, options.dry, options.cifar10, options.only)
    found = Report(file, name, name, seconds)
    try:
        if seconds <= 0:
            raise Skipped("no time is left")
        part = import_module(f"benchmarks.gpu.{name}")
        found.content["title"] = part.TITLE
        part.run(found, place)
    except Skipped as reason:
        found.finish("skipped", str(reason))
    except Exception as error:
        found.finish("failed", error_line(error))
    else:
        found.finish("ok")


def watch(name: str, command: list[str], file: Path, seconds: float) -> None:
    """Run a part by ``command`` and kill it after ``seconds``; its results so far are kept.

    A part that is killed has found no fault, except that in ``correctness`` a hang is one.
    """
    environment = {**os.environ, CHILD: "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    killed = False
    try:
        code = process.wait(max(1.0, seconds))
        ended = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        killed, ended = True, f"killed after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its child processes
        process.wait()
    section = report.read(file)["parts"].get(name, {})
    if section.get("state", "running") == "running":
        state = "skipped" if killed and name != FIRST else "failed"
        close(name, file, state, f"not finished: {ended}")


def close(name: str, file: Path, state: str, reason: str, *, new: bool = False) -> None:
    """Close the section of a part that could not close it itself, or, if ``new``, did not run."""
    content = report.read(file)
    nothing: Content = {key: [] for key in ("checks", "goals", "skipped", "notes")}
    nothing |= {"title": name, "seconds": 0.0, "tables": {}}
    if new:
        content["parts"].pop(name, None)
    section = content["parts"].setdefault(name, nothing)
    if any(check["state"] == "failed" for check in section["checks"]):
        state = "failed"
    section |= {"state": state, "reason": reason}
    report.write(file, content)
    print(f"{name}: {state}: {reason}", flush=True)


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
