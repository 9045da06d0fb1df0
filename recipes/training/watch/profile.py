"""Record some steps of a run with torch.profiler: a trace and a table of operators for each rank.

The steps are recorded as a whole, on the thread that trains and on all others of the process
(``profile_all_threads``, which torch has since version 2.7). Phases and all-reduces are ranges in
them, which ``clocks.py`` and ``comm/ranges.py`` open while torch.profiler is active. The ranks that
do not record wait for those that do while files are written.
"""

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, _ExperimentalConfig, profile

from ...errors import RecipeError
from ...schema.sections import Profile
from ..callbacks import Callback, RunContext, Status

#: The folder of the files, in that of the run.
FOLDER = "profile"
#: Most rows of a table, the most expensive ones.
_ROWS = 100


def check_profile(wanted: Profile, last_step: int, world_size: int) -> None:
    """Raise RecipeError if a run ends before the last step to record, or lacks a rank."""
    if wanted.first_and_last and wanted.first_and_last[1] > last_step:
        raise RecipeError(
            f"profile.steps: {wanted.steps} goes beyond the end of the run, step {last_step}; "
            f"valid: 1..{last_step} or a part of it"
        )
    if wanted.steps and wanted.ranks != "all" and max(wanted.ranks) >= world_size:
        valid = "0" if world_size == 1 else f"0 to {world_size - 1}, or all"
        raise RecipeError(
            f"profile.ranks: no rank {max(wanted.ranks)} among {world_size}; valid: {valid}"
        )


class StepProfiler(Callback):
    """Records the steps that the recipe's ``profile`` names, on the ranks that it names."""

    all_ranks = True
    _profiler: profile | None = None

    def on_start(self, run: RunContext) -> None:
        self._run, self._wanted = run, run.recipe.profile
        assert self._wanted.first_and_last is not None
        first, self._last = self._wanted.first_and_last
        self._first = max(first, run.step + 1)  # of those that are left to a resumed run
        self._folder = run.run_dir / FOLDER
        # No other rank writes before it has trained with this one.
        if run.job.is_main and self._first <= self._last:
            shutil.rmtree(self._folder, ignore_errors=True)

    def on_step_begin(self, step: int) -> None:
        if self._profiler:
            self._profiler.step()
        elif step + 1 == self._first <= self._last and self._wanted.records(self._run.job.rank):
            with self._run.untimed():
                self._start()

    def on_step_end(self, step: int) -> None:
        if step == self._last >= self._first:
            with self._run.untimed():
                self._report(self._run.job.gather(self._written()))

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        """Write what was recorded where the run ends before the last of the steps."""
        if self._profiler:
            self._report([self._written()])

    def _start(self) -> None:
        """Record from here on; it takes long on a GPU."""
        device = self._run.job.device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(device)  # so that kernels of earlier steps are left out
        self._profiler = profile(
            activities=activities,
            schedule=lambda step: ProfilerAction.RECORD,  # for the ranges ProfilerStep#N
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.step_num = self._first
        self._profiler.start()

    def _written(self) -> tuple[int | None, str]:
        """Stop, and write the files of this rank; return it if there are any, or what is wrong."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None, ""
        job = self._run.job
        path, by = self._folder / f"rank-{job.rank}", "device"
        if job.device.type == "cpu":
            by = "cpu"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if job.world_size == 1:  # on several, torch adds the rank itself
                profiler.add_metadata_json("distributedInfo", '{"rank": 0}')
            profiler.stop()  # waits for the device
            table = profiler.key_averages().table(
                sort_by=f"self_{by}_time_total", row_limit=_ROWS, max_name_column_width=80
            )
            path.with_suffix(".txt").write_text(table, encoding="utf-8")
            profiler.export_chrome_trace(f"{path}.json.gz")
            return job.rank, ""
        except Exception as error:  # of any kind: a profile is not worth a run
            for part in self._folder.glob(f"{path.name}.*"):
                part.unlink(missing_ok=True)
            return None, (
                f"profile: rank {job.rank} has no trace in {self._folder}: {type(error).__name__}: "
                f"{error}; training goes on"
            )

    def _report(self, ranks: list[tuple[int | None, str]]) -> None:
        """Name the files in a line, and what went wrong first in a warning."""
        if not self._run.job.is_main:
            return
        if problems := [problem for _, problem in ranks if problem]:
            self._run.warn(problems[0])
        if written := [str(rank) for rank, _ in ranks if rank is not None]:
            self._run.say(
                f"profile: {self._folder} has the trace (rank-N.json.gz, for "
                "https://ui.perfetto.dev) and the costs (rank-N.txt) of "
                f"rank{'s' if len(written) > 1 else ''} {', '.join(written)}"
            )
