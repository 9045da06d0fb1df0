"""Run the parts one after the other, each in a process of its own and in its share of the time.

In a process of its own, since an illegal access on a GPU ends all that a process does there, and
since a part that hangs can be ended.
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
from benchmarks.gpu.report import Content, Report, Skipped, told

#: The parts in their order, with their share of the time: what one leaves goes to those after it.
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

#: Of a part's share, what it is told to take; the rest is for starting it, and for its last item.
_TOLD = 0.85
#: With less than this a part is not started.
_START_SECONDS = 5.0

_CHILD = "LARGEBATCH_GPU_PART"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run(
    out: Path, parts: list[str], seconds: float, *, dry: bool, here: bool, cifar10: Path | None
) -> int:
    """Run ``parts`` and write what they find to ``out``; returns the exit code.

    Args:
        here: in this process. A part that another process started finds the file of results there
            and adds to it.
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
        weights["cifar10"] = 0.3  # it is skipped as soon as it has started
    for number, name in enumerate(parts):
        left = sum(weights[other] for other in parts[number:])
        share = (seconds - (time.monotonic() - started)) * weights[name] / left
        if here:
            run_part(name, file, share, dry=dry, cifar10=cifar10)
        elif share < _START_SECONDS:
            close(name, file, "skipped", "no time is left")
        else:
            command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--parts", name]
            command += ["--out", str(out), "--minutes", str(_TOLD * share / 60)]
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
    """Run a part in this process; whatever it raises is told in its section of ``file``."""
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
        found.finish("failed", told(error))
    else:
        found.finish("ok")


def watch(name: str, command: list[str], file: Path, seconds: float) -> None:
    """Run a part by ``command``; it is killed after ``seconds``, and what it found stays."""
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
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
        process.wait()
    section = report.read(file)["parts"].get(name, {})
    if section.get("state", "running") == "running":
        state = "skipped" if ended.startswith("killed") else "failed"
        close(name, file, state, f"not finished: {ended}")


def close(name: str, file: Path, state: str, reason: str) -> None:
    """End the section of a part that did not do it itself."""
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
