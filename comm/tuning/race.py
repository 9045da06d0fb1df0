"""Measure candidates against each other on the ranks of the running job, within a budget of time.

Candidates take turns, so that what disturbs the machine disturbs all of them, and a repeat counts
as long as its slowest rank took. Sizes go up, each measured once; what is left of the budget goes
into repeats. What a round will take is foretold from smaller sizes, and a candidate that is far
behind is not measured at larger ones. All ranks decide by the same numbers: the slowest rank's
times, and the time that rank 0 says is left.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ..execute import all_reduce
from ..model.calibrate import Measurement
from ..model.choose import FLAT
from ..plan import Rule
from ..topology import Topology

#: So many times slower than the fastest is far behind.
FAR_BEHIND = 2.0

_FAR_BEHIND_IN_HASTE = 1.25  # where one round takes a quarter of the time left, or more
_LARGE_BYTES = 2**20  # from where a candidate may be given up
_AT_LEAST = 3  # repeats of a short round before larger sizes
_MOST_REPEATS = 15
_SHORT_SECONDS = 0.01  # shorter all-reduces are timed several in a row
_MOST_IN_A_ROW = 20
_SHORT_ROUND_SECONDS = 1.0  # longer ones are neither warmed up for nor repeated at first
_UNKNOWN_SECONDS_PER_BYTE = 8e-8  # of a candidate with one size so far: 100 Mbit/s
_MARGIN = 1.2  # on what a round is foretold to take


class Race:
    """The candidates, and what they took so far.

    Args:
        rules: without ``max_bytes``; flat among them is never given up.
        dtype: of the messages.
        budget_seconds: from now on.
        far_behind: see :data:`FAR_BEHIND`.
        progress: called on rank 0 with a line of text.
    """

    def __init__(
        self,
        topology: Topology,
        rules: Sequence[Rule],
        dtype: torch.dtype,
        budget_seconds: float,
        *,
        far_behind: float = FAR_BEHIND,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._topology, self._rules, self._dtype = topology, tuple(rules), dtype
        self._far_behind, self._progress = far_behind, progress
        self._device = torch.device("cpu")
        if dist.get_backend() == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._deadline = time.monotonic() + budget_seconds
        self._times: dict[int, dict[Rule, list[float]]] = {}
        self._buffer = torch.empty(0, dtype=dtype, device=self._device)
        self._rounds = 0

    def run(self, sizes_bytes: Sequence[int]) -> list[int]:
        """Measure ascending sizes. Returns those that were left out for want of time."""
        # Zeros stay zeros however often they are summed.
        elements = sizes_bytes[-1] // self._dtype.itemsize
        self._buffer = torch.zeros(elements, dtype=self._dtype, device=self._device)
        whole = [rule for rule in self._rules if rule.chunk_bytes is None]
        for _ in range(2):  # connections are made, and threads started
            self._round(sizes_bytes[0], whole)
        self._times.clear()
        for size in sizes_bytes:
            rules = self._still_in(size)
            short = self._round_seconds(size, rules) < _SHORT_ROUND_SECONDS
            if short and self._fits(size, rules):
                self._round(size, rules)  # memory is touched for the first time
                del self._times[size]
            for _ in range(_AT_LEAST if short else 1):
                if self._fits(size, rules):
                    self._round(size, rules)
            if size not in self._times:
                break
            if self._topology.rank == 0:
                self._progress(self._line(size))
        while (again := self._next_repeat()) is not None:
            self._round(again, self._contenders(again))
        return [size for size in sizes_bytes if size not in self._times]

    def measurements(self) -> tuple[Measurement, ...]:
        """What was measured, by size and candidate; the same on all ranks."""
        return tuple(
            Measurement(rule, size, tuple(times[rule]))
            for size, times in sorted(self._times.items())
            for rule in self._rules
            if rule in times
        )

    def _round(self, size: int, rules: Sequence[Rule]) -> None:
        """Each of ``rules`` once, or several times in a row if it is short."""
        tensor = self._buffer[: size // self._dtype.itemsize]
        own = torch.zeros(len(rules), dtype=torch.float64)
        first = self._rounds % len(rules)
        for index in [*range(first, len(rules)), *range(first)]:
            rule = rules[index]
            in_a_row = self._in_a_row(size, rule)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(in_a_row):
                all_reduce(tensor, self._topology, rule)
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
            own[index] = (time.perf_counter() - start) / in_a_row
        slowest = own.to(self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        for rule, seconds in zip(rules, slowest.tolist(), strict=True):
            self._times.setdefault(size, {}).setdefault(rule, []).append(seconds)
        self._rounds += 1

    def _still_in(self, size: int) -> list[Rule]:
        """The candidates to measure at a size, larger than those before."""
        rules = [r for r in self._rules if r.chunk_bytes is None or r.chunk_bytes < size]
        if not self._times or size <= _LARGE_BYTES:
            return rules
        before = max(self._times)
        haste = self._round_seconds(size, rules) > self._left_seconds() / 4
        limit = min(self._far_behind, _FAR_BEHIND_IN_HASTE if haste else math.inf)
        kept = []
        for rule in rules:
            alike = [r for r in rules if r.wire_dtype == rule.wire_dtype]
            given_up = self._base(rule) not in self._times[before]
            # Already at the size before, and by what is foretold of this one.
            behind = all(
                self._foretold(at, rule) > limit * min(self._foretold(at, r) for r in alike)
                for at in (before, size)
            )
            if rule == FLAT or not (given_up or behind):
                kept.append(rule)
        return kept

    def _base(self, rule: Rule) -> Rule:
        """What tells of a rule at the size before: itself, or whole if it was not cut there."""
        if any(rule in times for times in self._times.values()):
            return rule
        return replace(rule, chunk_bytes=None)

    def _contenders(self, size: int) -> list[Rule]:
        times = {rule: statistics.median(t) for rule, t in self._times[size].items()}
        limit = self._far_behind * min(times.values())
        return [rule for rule, seconds in times.items() if rule == FLAT or seconds <= limit]

    def _next_repeat(self) -> int | None:
        """The size with the fewest repeats of those that another one fits for."""
        left = self._left_seconds()
        open_ = [
            (len(times[FLAT] if FLAT in times else next(iter(times.values()))), size)
            for size, times in self._times.items()
            if self._round_seconds(size, self._contenders(size)) * _MARGIN < left
        ]
        repeats, size = min(open_, default=(_MOST_REPEATS, 0))
        return size if repeats < _MOST_REPEATS else None

    def _fits(self, size: int, rules: Sequence[Rule]) -> bool:
        return self._round_seconds(size, rules) * _MARGIN < self._left_seconds()

    def _round_seconds(self, size: int, rules: Sequence[Rule]) -> float:
        return sum(self._foretold(size, rule) * self._in_a_row(size, rule) for rule in rules)

    def _in_a_row(self, size: int, rule: Rule) -> int:
        foretold = self._foretold(size, rule)
        return min(_MOST_IN_A_ROW, max(1, math.ceil(_SHORT_SECONDS / max(foretold, 1e-9))))

    def _foretold(self, size: int, rule: Rule) -> float:
        """What a candidate will take: what it took, or the line through its last two sizes."""
        rule = self._base(rule)
        known = [(s, statistics.median(t[rule])) for s, t in self._times.items() if rule in t]
        known = sorted(point for point in known if point[0] <= size)[-2:]
        if not known:
            return _SHORT_SECONDS
        last, seconds = known[-1]
        if len(known) == 1:
            slope = _UNKNOWN_SECONDS_PER_BYTE if size > last else 0.0
        else:
            slope = max(0.0, (seconds - known[0][1]) / (last - known[0][0]))
        return seconds + slope * (size - last)

    def _left_seconds(self) -> float:
        """Of the budget, as rank 0 has it."""
        left = torch.tensor([self._deadline - time.monotonic()], dtype=torch.float64)
        left = left.to(self._device)
        dist.broadcast(left, 0)
        return float(left)

    def _line(self, size: int) -> str:
        times = {rule: statistics.median(t) for rule, t in self._times[size].items()}
        fastest = min(times, key=lambda rule: times[rule])
        return f"{size:,} bytes: {len(times)} candidates, {fastest.algorithm} is the fastest"
