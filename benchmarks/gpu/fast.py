"""The fastest step: our trainer in its settings against the fastest loops of PyTorch and timm.

Every contender has a process of its own, because cuDNN keeps one cache of plans per process whose
key lacks the benchmark flag: in one process, the plans that the first loop chose would serve the
others. The processes stay alive and take turns in short blocks, so that a drift of clocks or
temperature meets all alike and start-up (kernels chosen by cuDNN, compilation) is paid once; only
one of them has work at a time, and an idle process costs memory alone. A group holds as many as
the memory takes. From one group to the next stay the best rival, our best setting and the recipe
as typed, which ties the groups together; at the end these three take turns for up to 30 s each, in
at most a fifth of the time, on a card that is never idle. The imports of all processes run side by
side before the first turn.

The table of contenders has the seconds and the weight of each (contenders.py): those of the least
weight are left out where the time is short, and the choice is repeated before each start with
the time that is really left, less what the long turns need.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby

from benchmarks.gpu.contenders import (
    BARE,
    BLOCK_SECONDS,
    CONTENDERS,
    IMPORT_SECONDS,
    LONG_BLOCK_SECONDS,
    LONG_ROUNDS,
    ROUNDS,
    SUSTAINED_SECONDS,
    SUSTAINED_SHARE,
    TYPED,
    Contender,
    choose,
)
from benchmarks.gpu.goals import RATES, SUSTAINED, Row, best, goals, run_of
from benchmarks.gpu.loops import images_per_step
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Report
from benchmarks.gpu.sensors import Sensors
from benchmarks.gpu.turns import Failed, Process, Reply, start_all

TITLE = "The fastest step: ResNet-50 at 224 pixels"

#: A contender that needs this many times its estimated seconds, and a minute, hangs.
_PATIENCE = 2.5
#: A block that takes so much longer than it should hangs.
REPLY_SECONDS = 30.0
#: As many processes hold a batch of 256 at a time; two do in the last group, beside small ones.
_MOST_ALIVE, _MOST_ALIVE_LAST = 5, 6
#: Contenders that a dry run tries.
_DRY = (TYPED, f"{BARE}: cudnn.benchmark")


def run(report: Report, place: Place) -> None:
    """Measure the contenders that the time allows, group by group, and compute the goals.

    A run of some groups only keeps the rows of the other groups that an earlier run has left, with
    the sustained turns, of which it has none; its own rows have the next number in ``run``.
    """
    number = 1
    if place.only and report.earlier:
        for table, rows in report.earlier.items():
            kept = [row for row in rows if row["group"] not in place.only]
            report.content["tables"].setdefault(table, []).extend(kept)
        report.note(f"measured later than the other groups: {', '.join(place.only)}")
        number += max((run_of(row) for rows in report.earlier.values() for row in rows), default=0)
    Arena(report, place, number).run(_wanted(report, place))
    if not place.dry:
        for what, reached, least in goals(report.content["tables"]):
            report.goal(what, reached, least=least)


def _wanted(report: Report, place: Place) -> list[Contender]:
    """Return the contenders that fit into the time; the report names the others."""
    wanted = [c for c in CONTENDERS.values() if place.only is None or c.group in place.only]
    if any(c.main for c in wanted) and TYPED not in (c.name for c in wanted):
        wanted.insert(0, CONTENDERS[TYPED])  # ties the group to those of other runs
    if place.dry:
        report.skip("the other contenders", "left out of a dry run")
        return [contender for contender in wanted if contender.name in _DRY]
    seconds = report.seconds_left - IMPORT_SECONDS - _sustained_seconds(report, place)
    kept, left_out = choose(wanted, seconds)
    for contender in left_out:
        reason = f"about {contender.seconds:.0f} s to start, weight {contender.weight}"
        report.no_time(contender.name, reason)
    return kept


def _sustained_seconds(report: Report, place: Place) -> float:
    """Return the time for the long turns, at the start of the part."""
    return 0.0 if place.only else min(SUSTAINED_SECONDS, SUSTAINED_SHARE * report.seconds_left)


class Arena:
    """The processes that take turns.

    Args:
        report: where the results go.
        place: the device and options.
        number: of this run, in its rows.
    """

    def __init__(self, report: Report, place: Place, number: int = 1) -> None:
        self._report, self._place, self._number = report, place, number
        self._reserve = _sustained_seconds(report, place)
        self._waiting: dict[str, Process] = {}  # they have imported what they need
        self._alive: dict[str, Process] = {}  # they have taken their first steps

    def run(self, wanted: list[Contender]) -> None:
        """Measure ``wanted`` in their groups; those of the main load, then the three that stayed,
        and then the others, which have all of the memory."""
        if not wanted:
            self._report.no_time("all contenders", "none fits")
            return
        self._waiting = start_all(wanted, dry=self._place.dry)
        try:
            with Sensors() as sensors:
                ready_by = time.monotonic() + max(120.0, 4 * IMPORT_SECONDS)
                for process in [*self._waiting.values()]:
                    seconds = max(1.0, ready_by - time.monotonic())
                    if self._tried(process, partial(process.wait_ready, seconds)) is None:
                        del self._waiting[process.contender.name]
                main = [contender for contender in wanted if contender.main]
                self._rounds(main, self._reserve, _MOST_ALIVE, sensors)
                self._sustain(sensors)
                self._end_all_but(set())
                others = [contender for contender in wanted if not contender.main]
                self._rounds(others, 0.0, _MOST_ALIVE_LAST, sensors)
        finally:
            for process in [*self._waiting.values(), *self._alive.values()]:
                process.end(at_once=True)

    def _rounds(self, wanted: list[Contender], reserve: float, most: int, sensors: Sensors) -> None:
        """Measure group by group; a group larger than the memory in parts."""
        for group, found in groupby(wanted, key=lambda contender: contender.group):
            members = [*found]
            while members:
                room = max(1, most - len(self._alive))
                self._start(members[:room], reserve)
                members = members[room:]
                self._take_turns(group, RATES, BLOCK_SECONDS, ROUNDS, sensors)
                self._end_all_but(self._winners())

    def _start(self, members: Iterable[Contender], reserve: float) -> None:
        """Start the members of a group that the time left allows, but for ``reserve`` seconds."""
        for contender in members:
            later = [process.contender for process in self._waiting.values()]
            affordable, _ = choose(later, self._report.seconds_left - reserve)
            process = self._waiting.pop(contender.name, None)
            if process is None:
                continue  # the report has the reason
            if contender in affordable or self._place.dry:
                self._warm(process, self._report.seconds_left - reserve)
            else:
                process.end(at_once=True)
                self._report.no_time(contender.name, "those before it took longer")

    def _warm(self, process: Process, left: float) -> None:
        """Let a contender take its first steps; one that has not done so in time may yet work."""
        patience = _PATIENCE * process.contender.seconds + 60

        def warm() -> Reply:
            try:
                return process.warm(min(left, patience))
            except Failed as failed:
                if failed.kind == "late" and left < patience:
                    raise Failed("no time", f"not ready after {left:.0f} s") from None
                raise

        if self._tried(process, warm) is not None:
            self._alive[process.contender.name] = process

    def _tried(self, process: Process, action: Callable[[], Reply]) -> Reply | None:
        """Do something with a process; if that fails, report it and go on with the others."""
        try:
            return action()
        except Failed as failed:
            process.end(at_once=True)
            contender, reason = process.contender, str(failed)
            self._alive.pop(contender.name, None)
            if failed.kind == "refused":
                reason = f"the recipe refuses {' '.join(contender.overrides)}: {reason}"
            # One of ours without a result is a failed check; one of the others is only missing.
            if failed.kind == "no time":
                self._report.no_time(contender.name, reason)
            elif contender.ours and failed.kind != "skipped":
                self._report.fail(contender.name, reason)
            else:
                self._report.skip(contender.name, reason)
            return None

    def _take_turns(
        self, group: str, table: str, seconds: float, rounds: int, sensors: Sensors
    ) -> None:
        """Give each living contender a block in each round, and report a row for each."""
        blocks: dict[str, list[float]] = defaultdict(list)
        spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        alive = [*self._alive.items()]
        for _ in range(1 if self._place.dry else rounds):
            for name, process in alive:
                if name not in self._alive:
                    continue  # it failed in an earlier round
                steps = max(1, round(seconds / max(process.step_seconds, 1e-4)))
                steps = 1 if self._place.dry else steps
                began = time.monotonic()
                block = partial(process.ask, REPLY_SECONDS + 5 * seconds, do="block", steps=steps)
                answer = self._tried(process, block)
                if answer is not None:
                    images = images_per_step(process.contender, self._place)
                    blocks[name].append(images * steps / answer["seconds"])
                    spans[name].append((began, time.monotonic()))
        processes = dict(alive)
        medians: list[Row] = [
            {"contender": name, "median": statistics.median(rates)}
            for name, rates in blocks.items()
        ]
        for name, rates in blocks.items():
            rival = best(medians, ours=False, like=name)
            median = statistics.median(rates)
            self._report.row(
                table,
                group=group,
                contender=name,
                median=median,
                least=min(rates),
                most=max(rates),
                against_best_other=median / rival["median"] if rival else "",
                images_per_step=images_per_step(CONTENDERS[name], self._place),
                rounds=len(rates),
                run=self._number,
                **sensors.between(spans[name]),
                peak_GiB=processes[name].gigabytes,
                start_seconds=processes[name].start_seconds,
            )

    def _sustain(self, sensors: Sensors) -> None:
        """Let those that stayed take long turns."""
        if not self._alive or self._place.only:
            return
        left = min(self._reserve, self._report.seconds_left)
        a_round = len(self._alive) * LONG_BLOCK_SECONDS
        rounds = min(LONG_ROUNDS, int(left / a_round))
        if rounds or self._place.dry:
            self._take_turns("sustained", SUSTAINED, LONG_BLOCK_SECONDS, rounds, sensors)
        else:
            self._report.no_time("sustained turns", f"{left:.0f} s, a round takes {a_round:.0f} s")

    def _winners(self) -> set[str]:
        """Return the best rival, our best setting and the recipe as typed, of the main load."""
        rows = self._report.content["tables"].get(RATES, [])
        rows = [r for r in rows if run_of(r) == self._number and r["contender"] in self._alive]
        winners = (best(rows, ours=True), best(rows, ours=False))
        return {row["contender"] for row in winners if row} | {TYPED}

    def _end_all_but(self, stay: set[str]) -> None:
        for name in {*self._alive} - stay:
            self._alive.pop(name).end()
