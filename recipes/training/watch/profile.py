"""Record some steps of a run with torch.profiler: a trace and a table of operators for each rank.

The steps are recorded as a whole, on the thread that trains and on all others of the process
(``profile_all_threads``, which torch has since version 2.7). Phases and all-reduces are ranges in
them, which ``phases.py`` and ``comm/ranges.py`` open while torch.profiler is active. The ranks that
do not record wait for those that do while files are written.
"""

from __future__ import annotations

import gzip
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, _ExperimentalConfig, profile

from ...errors import RecipeError
from ...ranks import Job
from ...schema.profile import Profile
from ...schema.recipe import Recipe
from ..callbacks import Callback, RunContext, Status

#: The folder of the files, in that of the run.
FOLDER = "profile"
#: Most rows of a table, the most expensive ones.
_ROWS = 100


def check_steps(wanted: Profile, last_step: int) -> None:
    """Check that a run makes the steps to record.

    Raises:
        RecipeError: It ends before the last of them.
    """
    if wanted.first_and_last and wanted.first_and_last[1] > last_step:
        raise RecipeError(
            f"profile.steps: {wanted.steps} goes beyond the end of the run, step {last_step}; "
            f"valid: 1..{last_step} or a part of it"
        )


class StepProfiler(Callback):
    """Records the steps that the recipe's ``profile`` names, on the ranks that it names."""

    all_ranks = True

    def __init__(self) -> None:
        self._first, self._last = 1, 0  # the steps to record; none
        self._profiler: profile | None = None
        self._made = 0  # the last step that has ended

    def check(self, recipe: Recipe, run_dir: Path, job: Job) -> None:
        """Raise RecipeError if a rank that is to record does not exist."""
        ranks = recipe.profile.ranks
        if ranks != "all" and ranks[-1] >= job.world_size:
            valid = "0" if job.world_size == 1 else f"0 to {job.world_size - 1}, or all"
            raise RecipeError(
                f"profile.ranks: there is no rank {ranks[-1]} among {job.world_size}; "
                f"valid: {valid}"
            )

    def on_start(self, run: RunContext) -> None:
        wanted = run.recipe.profile
        assert wanted.first_and_last is not None
        first, last = wanted.first_and_last
        self._run, self._wanted = run, wanted
        self._made = run.step
        if run.step >= first:
            left = f"steps {run.step + 1}..{last} are" if run.step < last else "nothing is"
            run.say(
                f"profile.steps: of {wanted.steps}, {left} recorded: this run resumes after step "
                f"{run.step}"
            )
        if run.step >= last:
            return
        self._first, self._last = max(first, run.step + 1), last
        self._folder = run.run_dir / FOLDER
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if run.job.is_main:  # no other rank writes before it has trained with this one
                for old in self._folder.glob("rank-*"):
                    old.unlink()
        except OSError as error:
            raise RecipeError(
                f"profile.steps: {self._folder} cannot be written: {error.strerror}; "
                "valid: a run_dir whose folder profile can be, or profile.steps=null"
            ) from error

    def on_step_begin(self, step: int) -> None:
        number, job = step + 1, self._run.job
        if not self._first - 1 <= number <= self._last or not self._wanted.records(job.rank):
            return
        if self._profiler is None:
            self._profiler = self._prepared()
        if number == self._first and job.device.type == "cuda":
            torch.cuda.synchronize(job.device)  # so that kernels of earlier steps are left out
        if number >= self._first:
            self._profiler.step()

    def on_step_end(self, step: int) -> None:
        self._made = step
        if step != self._last or self._first > self._last:
            return
        self._first, self._last = 1, 0
        with self._run.untimed():
            self._report(self._run.job.gather(self._written()))

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        """Write what was recorded where the run ends before the last of the steps."""
        if self._first > self._last:
            return
        if self._profiler is not None and self._profiler.step_num >= self._first:
            self._report([self._written()])
        else:
            if self._profiler is not None:
                self._profiler.stop()  # it was prepared only
            if self._run.job.is_main:
                self._run.warn(
                    f"profile.steps: the run ended at step {self._made}; nothing of "
                    f"{self._wanted.steps} is recorded on rank 0"
                )
        self._first, self._last = 1, 0

    def _prepared(self) -> profile:
        """A profiler that warms up, and records from its next step on; takes long on a GPU."""
        first, last, wanted = self._first, self._last, self._wanted

        def schedule(step: int) -> ProfilerAction:
            if step < first:
                return ProfilerAction.WARMUP
            return ProfilerAction.RECORD if step < last else ProfilerAction.RECORD_AND_SAVE

        activities = [ProfilerActivity.CPU]
        if self._run.job.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities,
            schedule=schedule,
            record_shapes=wanted.shapes,
            profile_memory=wanted.memory,
            with_stack=wanted.stacks,
            # With all threads torch records no memory (pytorch/pytorch, issue 166121).
            experimental_config=_ExperimentalConfig(profile_all_threads=not wanted.memory),
        )
        profiler.step_num = first - 1  # so that its ranges ProfilerStep#N have the run's numbers
        profiler.start()
        return profiler

    def _written(self) -> tuple[int | None, str]:
        """Stop, and write the files of this rank; return it if there are any, or what is wrong."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None, ""
        rank = self._run.job.rank
        by = "device" if self._run.job.device.type == "cuda" else "cpu"
        try:
            if self._run.job.world_size == 1:  # on several, torch adds the rank itself
                profiler.add_metadata_json("distributedInfo", '{"rank": 0}')
            profiler.stop()  # waits for the device
            write_trace(profiler, self._folder / f"rank-{rank}.json.gz")
            table = profiler.key_averages().table(
                sort_by=f"self_{by}_time_total", row_limit=_ROWS, max_name_column_width=80
            )
            (self._folder / f"rank-{rank}.txt").write_text(table, encoding="utf-8")
            return rank, ""
        except OSError as error:
            why = f"{self._folder} cannot be written: {error.strerror}"
        except Exception as error:  # a profile is not worth a run
            why = f"rank {rank} has no profile: {type(error).__name__}: {error}"
        return None, f"profile: {why}; training goes on"

    def _report(self, ranks: list[tuple[int | None, str]]) -> None:
        """Name the files in a line, and what went wrong first in a warning."""
        if not self._run.job.is_main:
            return
        if problems := [problem for _, problem in ranks if problem]:
            self._run.warn(problems[0])
        if written := [str(rank) for rank, _ in ranks if rank is not None]:
            named = written[0] if len(written) == 1 else f"{{{','.join(written)}}}"
            self._run.say(
                f"profile: {self._folder}/rank-{named}.json.gz open in https://ui.perfetto.dev, "
                f"and rank-{named}.txt has the costs; for overlap and idle time of several ranks: "
                "pip install HolisticTraceAnalysis"
            )


def write_trace(profiler: profile, path: Path) -> None:
    """Write the trace of a stopped profiler, compressed by gzip, as a whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    plain, partial = (path.with_name(f"{path.name}.{kind}") for kind in ("plain", "partial"))
    try:
        plain.touch()  # torch only logs where it cannot write
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(partial, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)
            source.seek(-9, os.SEEK_END)
            if not source.read().rstrip().endswith(b"}"):
                raise OSError(None, "torch has written a part of the trace alone")
        partial.replace(path)
    finally:
        for left in (plain, partial):
            with suppress(OSError):
                left.unlink()
