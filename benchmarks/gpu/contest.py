"""The fastest step: our trainer against the fastest loops of PyTorch and timm, and what it is of.

Every contender has a process of its own, because cuDNN keeps one cache of plans per process whose
key lacks the benchmark flag: in one process, the plans that the first loop chose would serve the
others. The processes of a group stay alive and take turns in short blocks, so that a drift of
clocks or temperature meets all alike and start-up (kernels chosen by cuDNN, compilation) is paid
once; only one has work at a time. A group ends before the next one starts, which needs the memory.
The imports of all processes run side by side before the first turn.

A contender of ours whose step a check has called wrong is left out; rows whose checks failed or
came late say so.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu import clock
from benchmarks.gpu.child import Child
from benchmarks.gpu.contender import Reply, serve
from benchmarks.gpu.contenders import BARE, CONTENDERS, CONTESTS, EAGER, OURS, TYPED, Contender
from benchmarks.gpu.loops import counted_memory, images_and_passes
from benchmarks.gpu.optimizer_checks import lars_agrees
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import FAILED, WRONG, Report, read
from benchmarks.gpu.trainer_checks import compiles, waits

TITLE = "The fastest step: ResNet-50 at 224 pixels"

RATES, SUSTAINED = "images per second", "sustained, images per second"

#: A round gives each contender one block of about this many seconds.
BLOCK_SECONDS, ROUNDS = 0.7, 5
#: At the end of the first group of call b: our best and the best rival, 30 s in all.
LONG_SECONDS, LONG_ROUNDS = 5.0, 3
#: A contender that needs this many times its estimated seconds, and a minute, hangs.
_PATIENCE = 2.5
#: A block that takes so much longer than it should hangs.
REPLY_SECONDS = 30.0
#: Steps of a trace, and about the seconds that it takes.
_TRACED, _TRACE_SECONDS = 5, 15.0

#: Goals: our best over the best rival, the recipe as typed over our best, micro-batches of 32 over
#: 256 images, percent of a step for LARS and the loss scale, and images per second in BF16 at
#: 256 by the beginning of the device's name: compiled, with fused norms, the far goal.
LEAST_AGAINST_RIVAL, LEAST_TYPED, LEAST_SMALL, MOST_PERCENT = 0.98, 0.97, 0.75, 1.0
LEAST_RATES = {"NVIDIA H200": (6500, 8500, 10000), "NVIDIA H100": (5200, 7100)}

Row = dict[str, Any]


class Failed(Exception):  # noqa: N818 - the contender's, not an error of the harness
    """A contender gives no measurement: its ``kind`` is refused, skipped, failed or late."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind


class Process(Child):
    """A contender's process, which imports at once and touches the GPU when it is asked to."""

    def __init__(self, contender: Contender, place: Place) -> None:
        super().__init__(serve, contender, place)
        self.contender, self.start_seconds, self.warm = contender, 0.0, Reply()

    def start(self, seconds: float) -> Reply:
        """Wait for its imports; let it build its model and take its first steps."""
        self.answer(120)
        began = time.monotonic()
        self.tell({"do": "start"})
        self.warm = self.ask(seconds, do="warm")
        self.start_seconds = time.monotonic() - began
        return self.warm

    def ask(self, seconds: float, **command: Any) -> Reply:
        """Send a command and return the reply; raises as :meth:`answer` does."""
        self.tell(command)
        return self.answer(seconds)

    def answer(self, seconds: float) -> Reply:
        """Return the next reply."""
        try:
            reply: Reply = self.reply(seconds)
        except (TimeoutError, ChildProcessError) as error:
            raise Failed(
                "late" if isinstance(error, TimeoutError) else "failed", str(error)
            ) from None
        for kind in ("refused", "skipped", "failed"):
            if kind in reply:
                raise Failed(kind, reply[kind])
        return reply


def run(report: Report, place: Place) -> None:
    """Measure the groups of the call one after the other, and compute the goals."""
    groups = [_wanted(report, place, group) for group in CONTESTS[place.call]]
    processes = {c.name: Process(c, place) for group in groups for c in group}
    try:
        for number, group in enumerate(groups):
            seconds = report.seconds_left / (len(groups) - number)
            members = _Group(report, place, time.monotonic() + seconds)
            members.run([processes[c.name] for c in group], first=number == 0)
    finally:
        for process in processes.values():
            process.end()
    if not place.dry:
        device = read(report.file)["machine"]["device"]
        for what, reached, least in goals(report.content["tables"].get(RATES, []), device):
            report.goal(what, reached, least=least)


def _wanted(report: Report, place: Place, group: Sequence[Contender]) -> list[Contender]:
    """Return the contenders whose steps are not known to be wrong; two in a dry run."""
    wanted = []
    for contender in group[:2] if place.dry else group:
        wrong = report.doubts(rests_on(contender), WRONG)
        if wrong:
            report.skip(contender.name, f"a check says that its step is wrong: {'; '.join(wrong)}")
        else:
            wanted.append(contender)
    return wanted


def rests_on(contender: Contender) -> tuple[str, ...]:
    """Return the names of the checks that the row of a contender rests on."""
    if not contender.ours:
        return ()
    form = "fp16 with masters" if contender.precision == "fp16-master" else "fp32"
    compiled = (compiles(contender.precision),) if contender.how != EAGER else ()
    return (lars_agrees("mlperf", form), waits(contender.precision), *compiled)


class _Group:
    """Contenders that take turns, and must have ended at ``ends`` of ``time.monotonic``."""

    def __init__(self, report: Report, place: Place, ends: float) -> None:
        self._report, self._place, self._ends = report, place, ends
        self._alive: dict[str, Process] = {}
        self._blocks: dict[str, list[float]] = {}  # images per second, by contender

    def run(self, processes: list[Process], *, first: bool) -> None:
        """Start the contenders that the time allows, measure them, and end them."""
        turns = ROUNDS * BLOCK_SECONDS * len(processes)
        for process in processes:
            name, seconds = process.contender.name, process.contender.seconds
            if self._has_time(name, seconds + turns):
                limit = 60 + _PATIENCE * seconds
                if not self._place.dry:
                    limit = min(limit, self._seconds_left - turns)
                if self._tried(process, partial(process.start, limit)) is not None:
                    self._alive[name] = process
        self._blocks = self._take_turns(RATES, BLOCK_SECONDS, ROUNDS, [*self._alive])
        if first:
            self._look_closer()
        for process in processes:
            process.end()

    def _look_closer(self) -> None:
        """Take long turns in call b, and trace our best step and the recipe as typed."""
        mine, rival = self._best(ours=True), self._best(ours=False)
        both = [name for name in (mine, rival) if name]
        takes = LONG_SECONDS * LONG_ROUNDS * len(both)
        if self._place.call == "b" and self._has_time(SUSTAINED, takes):
            self._take_turns(SUSTAINED, LONG_SECONDS, LONG_ROUNDS, both)
        typed = [name for name in self._alive if CONTENDERS[name].typed]
        for name in dict.fromkeys([name for name in (mine, *typed[:1]) if name in self._alive]):
            if self._has_time(f"trace of {name}", _TRACE_SECONDS):
                self._trace(self._alive[name])

    @property
    def _seconds_left(self) -> float:
        return self._ends - time.monotonic()

    def _has_time(self, what: str, seconds: float) -> bool:
        spared = self._report.seconds_left - self._seconds_left  # for later groups
        return self._place.dry or self._report.has_time(what, seconds, spared)

    def _best(self, *, ours: bool) -> str:
        rates = {name: statistics.median(blocks) for name, blocks in self._blocks.items()}
        found = [n for n in rates if n in self._alive and CONTENDERS[n].ours == ours]
        return max(found, key=lambda name: rates[name], default="")

    def _tried(self, process: Process, action: Callable[[], Reply]) -> Reply | None:
        """Do something with a process; if that fails, report it and go on with the others."""
        try:
            return action()
        except Failed as failed:
            process.end()
            name, reason = process.contender.name, str(failed)
            self._alive.pop(name, None)
            in_time = failed.kind != "late" or self._seconds_left > 0
            # One of ours without a result is a failed check; one of the others is only missing.
            if process.contender.ours and failed.kind != "skipped" and in_time:
                self._report.record(name, FAILED, reason)
            else:
                self._report.skip(name, reason)
            return None

    def _take_turns(
        self, table: str, seconds: float, rounds: int, names: list[str]
    ) -> dict[str, list[float]]:
        """Give each contender a block in each round, and report a row for each."""
        blocks: dict[str, list[float]] = defaultdict(list)
        sensors: dict[str, Reply] = {}
        processes = {name: self._alive[name] for name in names}
        for number in range(1 if self._place.dry else rounds):
            if number and self._seconds_left <= 0:
                break
            for name in [name for name in names if name in self._alive]:
                process = processes[name]
                steps = max(1, round(seconds / max(process.warm["step_seconds"], 1e-4)))
                steps = 1 if self._place.dry else steps
                block = partial(process.ask, REPLY_SECONDS + 5 * seconds, do="block", steps=steps)
                answer = self._tried(process, block)
                if answer is not None:
                    blocks[name].append(self._images(name) * steps / answer["seconds"])
                    sensors[name] = answer["sensors"]
        others = [name for name in blocks if not CONTENDERS[name].ours]
        rival = max(others, key=lambda name: statistics.median(blocks[name]), default="")
        for name, rates in blocks.items():
            self._report.row(
                table,
                rests_on=rests_on(CONTENDERS[name]),
                contender=name,
                **clock.spread(rates),
                **against(rates, blocks.get(rival, [])),
                **sensors[name],
                peak_GiB=processes[name].warm["peak_GiB"],
                **counted_memory(CONTENDERS[name], self._place),
                start_seconds=processes[name].start_seconds,
            )
        return blocks

    def _images(self, name: str) -> int:
        images, passes = images_and_passes(CONTENDERS[name], self._place)
        return images * passes

    def _trace(self, process: Process) -> None:
        """Report kernels by kind, the longest ones, and the share of LARS."""
        name = process.contender.name
        steps = 1 if self._place.dry else _TRACED
        found = self._tried(process, partial(process.ask, 120, do="profile", steps=steps))
        if found is None:
            return
        wall_ms = 1e3 * self._images(name) / statistics.median(self._blocks[name])
        busy_ms = found["busy_ms"]
        launches = sum(row["launches"] for row in found["kinds"])
        columns = {"wall_ms": wall_ms, "busy_ms": busy_ms, "launches": launches}
        columns |= {"idle_percent": 100 * (1 - busy_ms / wall_ms)} if busy_ms else {}
        self._report.row("a step", contender=name, **columns)
        for table in ("kinds", "longest"):
            for row in found[table]:
                self._report.row(f"{name}: {table} of kernels in a step", **row)
        of_optimizer = [row["ms"] for row in found["kinds"] if row["kind"] == "optimizer"]
        if of_optimizer and CONTENDERS[name].ours and not self._place.dry:
            what = f"LARS and loss scale, percent of a step ({name})"
            self._report.goal(what, 100 * sum(of_optimizer) / wall_ms, most=MOST_PERCENT)


def against(rates: list[float], rival: list[float]) -> Row:
    """Return the ratio to the rival, round by round."""
    ratios = [mine / theirs for mine, theirs in zip(rates, rival, strict=False)]
    return clock.spread(ratios, "_ratio") if ratios else {}


def goals(rows: list[Row], device: str) -> list[tuple[str, float, float]]:
    """Return what is asked, what was reached and the least that is asked; unmeasured: left out.

    The rows are those of the table ``RATES``, all of one run on the device of this name.
    """
    found: list[tuple[str, float, float]] = []
    medians = {row["contender"]: row["median"] for row in rows}

    def best(like: Contender, *, ours: bool, precision: str | None = None) -> Row | None:
        def fits(other: Contender) -> bool:
            same = (other.batch, other.passes) == (like.batch, like.passes)
            return same and other.ours == ours and precision in (None, other.precision)

        chosen = [row for row in rows if fits(CONTENDERS[row["contender"]])]
        return max(chosen, key=lambda row: row["median"], default=None)

    for like in (Contender(BARE, EAGER), Contender(BARE, EAGER, batch=32, passes=32)):
        mine, rival = best(like, ours=True), best(like, ours=False)
        if mine and rival and "median_ratio" in mine:
            between = f"{mine['least_ratio']:.3f} to {mine['most_ratio']:.3f}"
            what = f"{mine['contender']} / {rival['contender']} ({between})"
            found.append((what, mine["median_ratio"], LEAST_AGAINST_RIVAL))
    for name, median in medians.items():
        contender = CONTENDERS[name]
        if not contender.typed:
            continue
        mine = best(contender, ours=True, precision=contender.precision)
        assert mine is not None  # as it is one of them
        found.append((f"{name} / our best setting", median / mine["median"], LEAST_TYPED))
        large = medians.get(Contender(OURS, TYPED, contender.precision).name)
        if contender.passes > 1 and large:
            found.append((f"{name} / 256 images", median / large, LEAST_SMALL))
    mine = best(Contender(BARE, EAGER), ours=True, precision="bf16")
    rates = next((r for name, r in LEAST_RATES.items() if device.startswith(name)), ())
    if mine:
        found += [(f"{mine['contender']}, images/s", mine["median"], rate) for rate in rates]
    return found
