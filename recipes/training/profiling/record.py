"""Record steps with torch.profiler, and write a trace for each rank and a page for the run.

A range of steps is recorded as a whole, on the thread that trains and on all others of the process
(``profile_all_threads``, which torch has since version 2.7). The ranks that do not record wait for
those that do while traces are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import (
    ProfilerActivity,
    _ExperimentalConfig,
    profile,
    record_function,
)

from ....comm import start_spans, stop_spans
from ...errors import RecipeError
from ...ranks import Job
from ...schema.profile import Profile
from ...schema.recipe import Recipe
from ..callbacks import Callback, RunContext, Status
from .figures import Figures, figures_of
from .picture import PICTURE, draw
from .summary import SUMMARY, in_lines, page
from .trace import STEP, of_rank, read_trace, write_trace

#: The folder of the files, in that of the run.
FOLDER = "profile"


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
        self._trace: _Recording | None = None
        self._begun = self._made = 0  # the last step that has begun, and that has ended

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
        self._begun = self._made = run.step
        if run.step >= last:
            run.say(
                f"profile.steps: {wanted.steps} is past: this run resumes after step {run.step}, "
                "and records nothing"
            )
            return
        if run.step >= first:
            run.say(
                f"profile.steps: of {wanted.steps}, steps {run.step + 1}..{last} are recorded: "
                f"this run resumes after step {run.step}"
            )
        self._first, self._last = max(first, run.step + 1), last
        self._folder = run.run_dir / FOLDER
        self._say_evaluations()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if run.job.is_main:  # no other rank writes before it has trained with this one
                for old in [*self._folder.glob("rank-*"), *self._folder.glob("summary.*")]:
                    old.unlink()
        except OSError as error:
            raise RecipeError(
                f"profile.steps: {self._folder} cannot be written: {error.strerror}; "
                "valid: a run_dir whose folder profile can be, or profile.steps=null"
            ) from error

    def on_step_begin(self, step: int) -> None:
        number = self._begun = step + 1
        if self._first > self._last or not self._wanted.records(self._run.job.rank):
            return
        if self._trace is None and self._first - 1 <= number <= self._last:
            self._trace = _Recording(self._wanted, self._run.job.device)
        if self._trace is not None and number >= self._first:
            self._trace.step_begin(number)

    def on_step_end(self, step: int) -> None:
        self._made = step
        if self._trace is not None:
            self._trace.step_end(is_last=step == self._last)
        if step == self._last and self._first <= self._last:
            self._first, self._last = 1, 0
            with self._run.untimed():
                figures, problem = self._written()
                everyone = self._run.job.gather((figures, problem))
                if self._run.job.is_main:
                    problems = [text for _, text in everyone if text]
                    self._sum_up([found for found, _ in everyone if found], problems)

    def on_end(self, status: Status, summary: dict[str, Any]) -> None:
        """Write what was recorded where the run ends before the last of the steps."""
        if self._first > self._last:
            return
        if self._trace is not None and not self._trace.steps:
            self._trace.abandon()
            self._trace = None
        if self._trace is not None:
            figures, problem = self._written()
            if self._run.job.is_main:
                self._sum_up([figures] if figures else [], [problem] if problem else [])
        elif self._run.job.is_main:
            kept = (
                f"nothing is recorded of {self._wanted.steps}"
                if self._begun < self._first
                else f"of {self._wanted.steps}, other ranks have written the steps until then to "
                f"{self._folder}, without {SUMMARY}"
            )
            self._run.warn(f"profile.steps: the run ended at step {self._made}; {kept}")
        self._first, self._last = 1, 0

    def _say_evaluations(self) -> None:
        """Say if an evaluation falls between the steps; torch cannot pause without a warning."""
        run, every = self._run, self._run.recipe.evaluate_every
        between = range(self._first, self._last)
        if run.val_loader and every and any(run.timeline.due(every, step) for step in between):
            run.say(
                f"profile.steps: an evaluation falls into {self._wanted.steps} and is recorded "
                "too, which makes the files large; steps between two evaluations avoid that"
            )

    def _written(self) -> tuple[Figures | None, str]:
        """Stop, write the trace of this rank, and return its figures or what went wrong."""
        recording, self._trace = self._trace, None
        if recording is None:
            return None, ""
        rank = self._run.job.rank
        path = self._folder / f"rank-{rank}.json.gz"
        try:
            trace, spans = recording.stop(self._folder / f"rank-{rank}.partial.json")
            trace = of_rank(trace, rank, spans)
            write_trace(path, trace)
            return figures_of(trace, rank, self._run.job.device.type), ""
        except OSError as error:
            return None, f"profile: {path} cannot be written: {error.strerror}; training goes on"
        except Exception as error:  # a profile is not worth a run
            why = f"{type(error).__name__}: {error}"
            return None, f"profile: rank {rank} has no profile: {why}; training goes on"

    def _sum_up(self, found: Sequence[Figures], problems: Sequence[str]) -> None:
        """Write the page and its picture, and show the page in a few lines."""
        for problem in problems:
            self._run.warn(problem)
        if not found:
            return
        try:
            draw(found, self._folder / PICTURE)
            text = page(self._run.name, found, self._run.job.world_size)
            (self._folder / SUMMARY).write_text(text, encoding="utf-8")
            for line in in_lines(found[0], self._folder):
                self._run.say(line)
        except OSError as error:
            self._run.warn(
                f"profile: {self._folder} cannot be written: {error.strerror}; training goes on"
            )
        except Exception as error:  # a profile is not worth a run
            why = f"{type(error).__name__}: {error}"
            self._run.warn(f"profile: {SUMMARY} cannot be made: {why}; training goes on")


class _Recording:
    """A recording of torch.profiler, from its preparation to its trace.

    On a GPU the first use of the profiler takes long, so it is prepared a step before. The GPU runs
    behind the host: it is waited for before the first and after the last step, so that the kernels
    in the trace are those of the recorded steps, and all of them.

    Args:
        wanted: What to record of each operator.
        device: The device.

    Attributes:
        steps: Number of steps that have begun.
    """

    def __init__(self, wanted: Profile, device: torch.device) -> None:
        self._device = device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities,
            record_shapes=wanted.shapes,
            profile_memory=wanted.memory,
            with_stack=wanted.stacks,
            # With all threads torch records no memory (pytorch/pytorch, issue 166121).
            experimental_config=_ExperimentalConfig(profile_all_threads=not wanted.memory),
        )
        self._profiler.prepare_trace()
        self.steps = 0
        self._step: Any = None

    def step_begin(self, number: int) -> None:
        """Begin to record a step."""
        if not self.steps:
            self._wait_for_device()
            self._profiler.start_trace()
            with record_function("start of the recording"):  # the first range takes long
                torch.zeros(1)
            start_spans()
        self.steps += 1
        self._step = record_function(f"{STEP}{number}")
        self._step.__enter__()

    def step_end(self, *, is_last: bool) -> None:
        """Note the end of a step, if one has begun; wait for the device after the last one."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
            if is_last:
                self._wait_for_device()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def abandon(self) -> None:
        """End what was prepared but never started."""
        self._profiler.start_trace()  # torch stops only what has started
        self._profiler.stop_trace()

    def stop(self, partial: Path) -> tuple[dict[str, Any], list[Any]]:
        """Stop, and return the trace of torch and the spans; ``partial`` holds it meanwhile.

        Raises:
            OSError: That file cannot be written.
        """
        if self._step is None:
            self._wait_for_device()  # the run ends before the last of the steps
        self.step_end(is_last=False)  # of a step that failed, whose device may not answer
        spans = stop_spans()
        self._profiler.stop_trace()
        try:
            partial.touch()  # torch only logs where it cannot write
            self._profiler.export_chrome_trace(str(partial))
            return read_trace(partial), spans
        finally:
            with suppress(OSError):
                partial.unlink()
