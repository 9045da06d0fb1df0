"""Everything that must be right before speed is worth a look; the run ends here if it is not.

The all-reduce hook on one rank and on several ranks of one GPU; training steps that never wait;
batch norm over ranks; captured steps of the trainer; LARS in all dialects and dtypes, alone and in
CUDA graphs, late, because its many kernels take long to compile; compiled steps of the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from benchmarks.gpu import batch_norm, hook, lars_checks, trainer_steps
from benchmarks.gpu.place import Place, installed
from benchmarks.gpu.report import Case, Report

TITLE = "Correctness"

#: Checks that have processes of their own, as ``run(report, place)``, and those of graphs, as
#: ``cases(dry)``.
RANKS, GRAPHS = "ranks_on_one_gpu", "graph_checks"
FURTHER = (RANKS, GRAPHS)


def cases(dry: bool = False) -> Iterator[Case]:
    """Yield the checks of this process, those that compile most at the end."""
    yield from trainer_steps.cases(dry)
    yield Case(hook.WAITS, hook.waits_for_slow_collectives)
    yield Case("batch norm: two ranks are one process", batch_norm.two_ranks_are_one_process)
    captured = list(_module(GRAPHS).cases(dry)) if _is_there(GRAPHS) else []
    compiled = [case for case in captured if case.name.startswith("compiled")]
    yield from (case for case in captured if case not in compiled)
    yield from lars_checks.cases(dry)
    yield from compiled


def run(report: Report, place: Place) -> None:
    """Run every check; a module with checks that is missing is a failure of its own."""
    for name in FURTHER:
        if not _is_there(name):
            (report.skip if place.dry else report.fail)(f"checks in {name}.py", "no such file")
    if _is_there(RANKS):
        with report.attempt(f"checks in {RANKS}.py"):
            _module(RANKS).run(report, place)
    for case in cases(place.dry):
        if report.has_time(case.name):
            report.check(case.name, case.run, place.device)


def _is_there(name: str) -> bool:
    return installed(f"{__package__}.{name}")


def _module(name: str) -> Any:
    return import_module(f"{__package__}.{name}")
