"""The commands that a person would want after a run, chosen by how it ended.

They are built from the recipe in the run's folder, which has every key with the overrides of the
command line, so that none of them has to be typed again.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....pipeline import Remedy
from ...launcher import option_of_launcher
from ...models.build import is_of_timm
from ...schema.load import RECIPE, override
from ..callbacks import RunContext, Status


def next_commands(
    status: Status, run: RunContext, facts: Mapping[str, Any], remedies: Sequence[Remedy] = ()
) -> list[str]:
    """Return two commands to go on with, the more useful one first; at times there is one or none.

    Args:
        status: How the run ended; of one that failed otherwise, the error says what to do.
        run: The run.
        facts: Of :func:`ending_facts`; a run that was stopped cannot be resumed without
            ``checkpoint_step``.
        remedies: What would make its input faster.
    """
    folder, job = str(run.run_dir), run.job
    recipe = f"{folder}/{RECIPE}"
    report = shlex.join(["largebatch", "report", folder, "--out", "report.html"])
    if status == "stopped":
        resumes = facts["checkpoint_step"] is not None
        return [resume_command(run), report] if resumes else [report]
    if status == "diverged":  # find a rate at which it trains
        one_machine = 1 < job.world_size == job.local_world_size
        processes = ["--nproc", str(job.world_size)] if one_machine else []
        search = ["largebatch", "tune", "lr", recipe, *processes]
        return [report, shlex.join(search)]
    if status == "failed":
        return []
    if faster := _faster_input(run, remedies):
        return [report, faster]
    if not run.recipe.reached(facts.get("top1")) and facts["step"] < facts["total_steps"]:
        return [report, resume_command(run, "stop_after=null")]
    form = "timm" if is_of_timm(run.recipe.model.name) else "safetensors"
    is_ema_better = facts.get("ema_top1", -1.0) > facts.get("top1", 101.0)
    export = ["largebatch", "export", folder, "--to", form, "--out", str(_free(Path("export")))]
    return [report, shlex.join([*export, *(["--ema"] if is_ema_better else [])])]


def resume_command(run: RunContext, *overrides: str) -> str:
    """Return the command that continues a run from its newest checkpoint."""
    place = override("run_dir", str(run.run_dir))
    return _train(run, [str(run.run_dir / RECIPE), *overrides, place], resume=True)


def _train(run: RunContext, arguments: list[str], *, resume: bool = False) -> str:
    """A command that trains on as many processes as this run did."""
    job = run.job
    if job.world_size == job.local_world_size:
        processes = ["--nproc", str(job.world_size)] if job.world_size > 1 else []
        last = ["--resume"] if resume else []
        return shlex.join(["largebatch", "train", *arguments, *processes, *last])
    address = f"{os.environ.get('MASTER_ADDR', 'HOST')}:{os.environ.get('MASTER_PORT', '29500')}"
    torchrun = [
        *("torchrun", "--nnodes", str(job.world_size // job.local_world_size)),
        *("--nproc-per-node", str(job.local_world_size), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", option_of_launcher("--rdzv-endpoint") or address),
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        *("-m", "largebatch.recipes.train"),
    ]
    return shlex.join([*torchrun, *arguments, *(["resume=true"] if resume else [])])


def _faster_input(run: RunContext, remedies: Sequence[Remedy]) -> str | None:
    """Train with other keys, or prepare other files, as the remedies say; None without any."""
    data = run.recipe.data
    overrides = {key: value for remedy in remedies for key, value in remedy.overrides.items()}
    if overrides:
        place = [override("run_dir", str(_free(run.run_dir)))] if run.recipe.run_dir else []
        fresh = ["resume=false"] if run.recipe.resume.from_ else []
        keys = sorted(f"{key}={value}" for key, value in overrides.items())
        return _train(run, [str(run.run_dir / RECIPE), *keys, *fresh, *place])
    prepare = [word for remedy in remedies for word in remedy.prepare]
    if data.source != "folder" or data.path is None or not prepare:
        return None
    form = [] if "--format" in prepare else ["--format", "webdataset"]
    words = ["largebatch", "data", "prepare", "folder", "--source", data.path, *form]
    return shlex.join([*words, *prepare, "--out", str(_free(Path(f"{data.path}-shards")))])


def _free(path: Path) -> Path:
    """The path, with the first number that makes it one that does not exist."""
    if not path.exists():
        return path
    numbered = (path.with_name(f"{path.name}-{number}") for number in range(2, 1000))
    return next((other for other in numbered if not other.exists()), path)
