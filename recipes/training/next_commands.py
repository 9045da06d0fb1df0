"""The two commands that a person would want after a run, chosen by how it ended.

They are built from the recipe in the run's folder, which has every key with the overrides of the
command line, so that none of them has to be typed again.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

from ..models.build import is_of_timm
from ..schema.load import RECIPE, override
from .callbacks import RunContext, Status

#: An override in advice about the input, such as ``data.threads=2``.
_OVERRIDE = re.compile(r"\bdata\.\w+=[\w-]+")
_RESIZE = re.compile(r"--resize \d+")


def next_commands(status: Status, run: RunContext, summary: dict[str, Any]) -> list[str]:
    """Return two commands to go on with, the more useful one first; at times there is one or none.

    Args:
        status: How the run ended; of one that failed otherwise, the error says what to do.
        run: The run.
        summary: Its summary, or of a run that has not finished what is known of it; of one that was
            stopped, ``checkpoint_step``, without which it cannot be resumed.
    """
    if status == "stopped":
        resumes = summary.get("checkpoint_step") is not None
        return [*([resume_command(run)] if resumes else []), _report(run)]
    if status == "diverged":
        return [_report(run), _range_test(run)]
    if status == "failed":
        return []
    advice = summary.get("input_advice") or []
    return [
        _report(run),
        _faster_input(run, advice) or _go_on(run, summary) or _export(run, summary),
    ]


def resume_command(run: RunContext, *overrides: str) -> str:
    """Return the command that continues a run from its newest checkpoint."""
    own = [*overrides, override("run_dir", str(run.run_dir))]
    return _train(run, [str(run.run_dir / RECIPE), *own], resume=True)


def _train(run: RunContext, arguments: list[str], *, resume: bool = False) -> str:
    """A command that trains on as many processes as this run did."""
    job = run.job
    if job.world_size == job.local_world_size:
        processes = ["--nproc", str(job.world_size)] if job.world_size > 1 else []
        last = ["--resume"] if resume else []
        return shlex.join(["largebatch", "train", *arguments, *processes, *last])
    host = os.environ.get("MASTER_ADDR", "localhost")
    torchrun = [
        *("torchrun", "--nnodes", str(job.world_size // job.local_world_size)),
        *("--nproc-per-node", str(job.local_world_size)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:29500"),
        *("-m", "largebatch.recipes.train"),
    ]
    return shlex.join([*torchrun, *arguments, *(["resume=true"] if resume else [])])


def _report(run: RunContext) -> str:
    return shlex.join(["largebatch", "report", str(run.run_dir), "--out", "report.html"])


def _export(run: RunContext, summary: dict[str, Any]) -> str:
    """Export the better of the weights and their moving average."""
    form = "timm" if is_of_timm(run.recipe.model.name) else "safetensors"
    ema = summary.get("ema_top1", -1.0) > summary.get("top1", 101.0)
    out = _free(Path("export"))
    words = ["largebatch", "export", str(run.run_dir), "--to", form, "--out", str(out)]
    return shlex.join([*words, *(["--ema"] if ema else [])])


def _range_test(run: RunContext) -> str:
    """Find the learning rate at which training diverges."""
    job = run.job
    words = ["largebatch", "tune", "lr", str(run.run_dir / RECIPE), "--range"]
    if 1 < job.world_size == job.local_world_size:
        words += ["--nproc", str(job.world_size)]
    return shlex.join(words)


def _go_on(run: RunContext, summary: dict[str, Any]) -> str | None:
    """Continue a run that ``stop_after`` ended; None for one that is complete."""
    if run.recipe.reached(summary.get("top1")) or summary["step"] >= summary["total_steps"]:
        return None
    return resume_command(run, "stop_after=null")


def _faster_input(run: RunContext, advice: list[str]) -> str | None:
    """Train or prepare the data as the advice about the input says; None without such advice."""
    hints = " ".join(advice[1:])
    overrides = sorted(set(_OVERRIDE.findall(hints)))
    if overrides:
        place = [override("run_dir", str(_free(run.run_dir)))] if run.recipe.run_dir else []
        fresh = ["resume=false"] if run.recipe.resume.from_ else []
        return _train(run, [str(run.run_dir / RECIPE), *overrides, *fresh, *place])
    resize = _RESIZE.search(hints)
    data = run.recipe.data
    if data.source != "folder" or data.path is None or not (resize or "--format" in hints):
        return None
    words = ["largebatch", "data", "prepare", "folder", "--source", data.path]
    words += ["--format", "webdataset", "--out", str(_free(Path(f"{data.path}-shards")))]
    return shlex.join([*words, *(resize[0].split() if resize else [])])


def _free(path: Path) -> Path:
    """The path, with the first number that makes it one that does not exist."""
    if not path.exists():
        return path
    numbered = (path.with_name(f"{path.name}-{number}") for number in range(2, 1000))
    return next((other for other in numbered if not other.exists()), path)
