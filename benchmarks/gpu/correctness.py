"""Everything that must be right before speed is worth a look; the run ends here if it is not.

Training steps that never wait; the all-reduce hook on one rank; batch norm over ranks; captured
steps of the trainer; the hook on several ranks of one GPU; LARS in all dialects and dtypes, alone
and in CUDA graphs, late, because its many kernels take long to compile; compiled steps of the
trainer; the memory of steps against their plan, last, as nothing that follows rests on it. A check
for which there is no time is no failure, and the part's reason counts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from benchmarks.gpu import batch_norm, hook, lars_checks, plan_memory, trainer_steps
from benchmarks.gpu.place import Place, installed
from benchmarks.gpu.report import Case, Report

TITLE = "Correctness"

#: Checks that have processes of their own, as ``run(report, place)``.
RANKS = "ranks_on_one_gpu"
FURTHER = (RANKS,)


def cases(dry: bool = False) -> Iterator[Case]:
    """Yield the checks of this process."""
    yield from quick(dry)
    yield from slow(dry)


def quick(dry: bool = False) -> Iterator[Case]:
    """Yield the checks that compile little, which run before those of several ranks."""
    yield from trainer_steps.cases(dry)
    yield Case(hook.WAITS, hook.waits_for_slow_collectives)
    two_ranks = batch_norm.two_ranks_are_one_process
    yield Case("batch norm: two ranks are one process", two_ranks, seconds=30)


def slow(dry: bool = False) -> Iterator[Case]:
    """Yield the other checks, those that compile most at the end."""
    yield from lars_checks.cases(dry)
    yield from plan_memory.cases(dry)


def run(report: Report, place: Place) -> None:
    """Run every check; a module with checks that is missing is a failure of its own."""
    for name in FURTHER:
        if not _is_there(name):
            (report.skip if place.dry else report.fail)(f"checks in {name}.py", "no such file")
    _run(quick(place.dry), report, place)
    if _is_there(RANKS):
        with report.attempt(f"checks in {RANKS}.py"):
            _module(RANKS).run(report, place)
    _run(slow(place.dry), report, place)


def _run(found: Iterable[Case], report: Report, place: Place) -> None:
    for case in found:
        if report.has_time(case.name, case.seconds):
            report.check(case.name, case.run, place.device)


def _is_there(name: str) -> bool:
    return installed(f"{__package__}.{name}")


def _module(name: str) -> Any:
    return import_module(f"{__package__}.{name}")
