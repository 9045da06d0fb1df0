"""Run the parts one after the other, each in its own process and within its share of the time.

A part has its own process because an illegal memory access makes the GPU unusable for the whole
process, and so that a part that hangs can be killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.report import Content, Report, Skipped, error_line

#: The parts in order, with their weights in the time; unused time goes to the parts that follow.
PARTS = {
    "lars_checks": 2.5,
    "lars_step": 1.5,
    "hook": 1.0,
    "batch_norm": 0.5,
    "training": 8.0,
    "step_shares": 1.5,
    "dali": 1.0,
    "cifar10": 4.0,
}

#: Fraction of its share that a part may plan with; the rest is for its start and its last item.
_PLANNED = 0.85
#: A part with less time than this is not started.
_START_SECONDS = 5.0

_CHILD = "LARGEBATCH_GPU_PART"


def has_gpu() -> bool:
    """Whether this machine has a CUDA GPU."""
    import torch

    return torch.cuda.is_available()


def run(
    out: Path, parts: list[str], seconds: float, *, dry: bool, here: bool, cifar10: Path | None
) -> int:
    """Run ``parts``, write the results to the folder ``out``, and return the exit code.

    Args:
        out: created if it does not exist.
        parts: names in ``PARTS``.
        seconds: time limit of all parts.
        dry: run small shapes on the CPU.
        here: run the parts in this process. A part started by another process finds the results
            file there and adds to it.
        cifar10: folder of the CIFAR-10 images, if there is one.
    """
    from benchmarks.gpu.place import about

    started = time.monotonic()
    content = {"dry": dry, "minutes": round(seconds / 60, 2), **about(dry), "parts": {}}
    device = "dry-cpu" if dry else _slug(content["machine"]["device"])
    file = out / f"gpu-{device}.json"
    child = os.environ.get(_CHILD) == "1"
    if not child:
        out.mkdir(parents=True, exist_ok=True)
        report.write(file, content)
    weights = {name: PARTS[name] for name in parts}
    if cifar10 is None and "cifar10" in weights and not dry:
        weights["cifar10"] = 0.3  # it is skipped right after its start
    for number, name in enumerate(parts):
        left = sum(weights[other] for other in parts[number:])
        share = (seconds - (time.monotonic() - started)) * weights[name] / left
        if here:
            run_part(name, file, share, dry=dry, cifar10=cifar10)
        elif share < _START_SECONDS:
            close(name, file, "skipped", "no time is left")
        else:
            command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--parts", name]
            command += ["--out", str(out), "--minutes", str(_PLANNED * share / 60)]
            command += ["--cifar10", str(cifar10)] if cifar10 else []
            command += ["--dry"] if dry else []
            watch(name, command, file, share)
        if not child:
            file.with_suffix(".md").write_text(report.markdown(report.read(file)))
    content = report.read(file)
    if not child:
        print(f"\n{report.summary(content)}\n\n{file} and .md", flush=True)
    return report.exit_code({"parts": {name: content["parts"][name] for name in parts}})


def run_part(name: str, file: Path, seconds: float, *, dry: bool, cifar10: Path | None) -> None:
    """Run a part in this process; whatever it raises is recorded in its section of ``file``."""
    import torch

    from benchmarks.gpu.place import Place

    place = Place(torch.device("cpu") if dry else torch.device("cuda", 0), dry, cifar10)
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
    """Run a part by ``command`` and kill it after ``seconds``; its results so far are kept."""
    environment = {**os.environ, _CHILD: "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    ended = ""
    try:
        code = process.wait(max(1.0, seconds))
        ended = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        ended = f"killed after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its child processes
        process.wait()
    section = report.read(file)["parts"].get(name, {})
    if section.get("state", "running") == "running":
        state = "skipped" if ended.startswith("killed") else "failed"
        close(name, file, state, f"not finished: {ended}")


def close(name: str, file: Path, state: str, reason: str) -> None:
    """Close the section of a part that could not close it itself."""
    content = report.read(file)
    nothing: Content = {key: [] for key in ("checks", "goals", "skipped", "notes")}
    nothing |= {"title": name, "seconds": 0.0, "tables": {}}
    section = content["parts"].setdefault(name, nothing)
    if any(check["state"] == "failed" for check in section["checks"]):
        state = "failed"
    section |= {"state": state, "reason": reason}
    report.write(file, content)
    print(f"{name}: {state}: {reason}", flush=True)


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
