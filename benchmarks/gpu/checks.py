"""The checks of GPU paths: six that the rates of a call rest on, or all of them.

They run in several processes side by side, so that the many kernels of LARS and the compiled steps
are compiled in parallel. A process that dies takes one check with it, and is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch

from benchmarks.gpu import batch_norm, optimizer_checks, trainer_checks
from benchmarks.gpu.child import Child
from benchmarks.gpu.optimizer_checks import lars_agrees
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import FAILED, LATE, Case, Report, outcome
from benchmarks.gpu.trainer_checks import compiles, waits

TITLE = "Checks"

#: Those of the calls that measure rates, one list for each process.
FIRST = {
    "a": (
        [lars_agrees("mlperf", "fp32"), lars_agrees("mlperf", "bf16 with masters")],
        [lars_agrees("mlperf", "fp16 with masters"), waits("bf16")],
        [compiles("bf16")],
        [compiles("fp16-master")],
    ),
    "b": (
        [lars_agrees("mlperf", "fp32"), lars_agrees("mlperf", "fp16 with masters")],
        [waits("fp16-master"), waits("fp16")],
        [compiles("fp16")],
        [compiles("fp16-master")],
    ),
}


def cases(dry: bool = False) -> list[Case]:
    """Return all checks, LARS first; fewer in a dry run."""
    return [*optimizer_checks.cases(dry), *batch_norm.cases(), *trainer_checks.cases(dry)]


def run(report: Report, place: Place) -> None:
    """Run the checks of the call, until they or the time end."""
    names = [case.name for case in cases(place.dry)]
    count = 2 if place.dry else 12
    groups: Sequence[list[str]] = [names[i::count] for i in range(count)]
    if place.call in FIRST:
        groups = [[name for name in group if name in names] for group in FIRST[place.call]]
    if place.dry and place.call in FIRST:  # call c has the compiled step, which takes longest
        groups = [[*groups[0], *groups[1]]]
    run_beside(report, place, [group for group in groups if group])


def run_beside(
    report: Report,
    place: Place,
    groups: Sequence[list[str]],
    cases: Callable[[bool], list[Case]] = cases,
) -> None:
    """Run groups of checks, by name, in a process each, and record the outcomes as they come."""
    running: dict[Any, tuple[Child, list[str]]] = {}

    def start(names: list[str]) -> None:
        child = Child(_serve, cases, names, place)
        running[child.pipe] = child, names

    for names in groups:
        start(list(names))
    while running and report.seconds_left > 0:
        for pipe in wait([*running], timeout=report.seconds_left):
            child, names = running[pipe]
            try:
                name, state, reason = child.reply(0)
                names.remove(name)
                report.record(name, state, reason)
            except ChildProcessError as error:
                del running[pipe]
                child.end()
                if child.died and names:  # in the first check without an outcome
                    report.record(names.pop(0), FAILED, str(error))
                if names:
                    start(names)
    for child, names in running.values():
        child.end()
        for name in names:
            report.record(name, LATE, "not finished in its time")


def _serve(pipe: Any, cases: Callable[[bool], list[Case]], names: list[str], place: Place) -> None:
    if place.dry:
        torch.set_num_threads(1)
    by_name = {case.name: case for case in cases(place.dry)}
    for name in names:
        case = by_name[name]
        state, reason = outcome(case.run, place.device, says_wrong=case.says_wrong)
        pipe.send((name, state, reason))
        if state == FAILED:  # an error may have spoilt the device for this process
            return
