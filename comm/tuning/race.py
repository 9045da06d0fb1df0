"""Measure candidates against each other on the ranks of the running job, within a time budget.

Candidates take turns, so that disturbances of the machine affect all of them, and the time of a
repeat is that of its slowest rank. Sizes are measured in ascending order; the remaining budget is
spent on repeats. The time of a round is predicted from smaller sizes, and a candidate that is far
behind is dropped at larger sizes. All ranks decide by the same numbers: the slowest rank's times
and the remaining time on rank 0.
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
from ..model.choose import FLAT_RING
from ..plan import Rule
from ..process_groups import device_of_messages
from ..topology import Topology

#: A candidate that takes this many times as long as the fastest is far behind.
FAR_BEHIND = 2.0

_FAR_BEHIND_IF_SHORT_OF_TIME = 1.25  # if one round takes more than a quarter of the time left
_LARGE_BYTES = 2**20  # candidates may be dropped at sizes above this
_MIN_REPEATS = 3  # of a short round, before larger sizes are measured
_MAX_REPEATS = 15
_SHORT_SECONDS = 0.01  # shorter all-reduces are timed several in a row
_MAX_IN_A_ROW = 20
_SHORT_ROUND_SECONDS = 1.0  # longer rounds have no warm-up, and only one repeat at first
_UNKNOWN_SECONDS_PER_BYTE = 8e-8  # assumed for a candidate with one size so far: 100 Mbit/s
_MARGIN = 1.2  # factor on the predicted time of a round


class Race:
    """The candidates and their times so far.

    Args:
        topology: the layout of the running job.
        rules: candidates without ``max_bytes``; the flat ring is never dropped.
        dtype: dtype of the messages.
        budget_seconds: time for all measurements, counted from now.
        far_behind: see :data:`FAR_BEHIND`.
        progress: function called on rank 0 with a line of text.
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
        self._device = device_of_messages()
        self._deadline = time.monotonic() + budget_seconds
        self._times: dict[int, dict[Rule, list[float]]] = {}
        self._buffer = torch.empty(0, dtype=dtype, device=self._device)
        self._rounds = 0

    def run(self, sizes_bytes: Sequence[int]) -> list[int]:
        """Measure ascending sizes; return the sizes for which there was no time."""
        # Zeros do not overflow, however often they are summed.
        elements = sizes_bytes[-1] // self._dtype.itemsize
        self._buffer = torch.zeros(elements, dtype=self._dtype, device=self._device)
        whole = [rule for rule in self._rules if rule.chunk_bytes is None]
        for _ in range(2):  # sets up connections and threads
            self._round(sizes_bytes[0], whole)
        self._times.clear()
        for size in sizes_bytes:
            rules = self._active_rules(size)
            short = self._round_seconds(size, rules) < _SHORT_ROUND_SECONDS
            if short and self._fits(size, rules):
                self._round(size, rules)  # warm-up: touches memory for the first time
                del self._times[size]
            for _ in range(_MIN_REPEATS if short else 1):
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
        """Return all measurements by size and candidate, identical on all ranks."""
        return tuple(
            Measurement(rule, size, tuple(times[rule]))
            for size, times in sorted(self._times.items())
            for rule in self._rules
            if rule in times
        )

    def _round(self, size: int, rules: Sequence[Rule]) -> None:
        """Time each of ``rules`` once, or several times in a row if it is short."""
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

    def _active_rules(self, size: int) -> list[Rule]:
        """Return the candidates to measure at ``size``, which is larger than all sizes so far."""
        rules = [r for r in self._rules if r.chunk_bytes is None or r.chunk_bytes < size]
        if not self._times or size <= _LARGE_BYTES:
            return rules
        before = max(self._times)
        short_of_time = self._round_seconds(size, rules) > self._remaining_seconds() / 4
        limit = min(self._far_behind, _FAR_BEHIND_IF_SHORT_OF_TIME if short_of_time else math.inf)
        kept = []
        for rule in rules:
            same_dtype = [r for r in rules if r.wire_dtype == rule.wire_dtype]
            dropped = self._measured_form(rule) not in self._times[before]
            # It must be far behind both at the previous size and by the prediction for this one.
            behind = all(
                self._predict(at, rule) > limit * min(self._predict(at, r) for r in same_dtype)
                for at in (before, size)
            )
            if rule == FLAT_RING or not (dropped or behind):
                kept.append(rule)
        return kept

    def _measured_form(self, rule: Rule) -> Rule:
        """Return the rule itself if it has been measured, otherwise its form without chunks."""
        if any(rule in times for times in self._times.values()):
            return rule
        return replace(rule, chunk_bytes=None)

    def _contenders(self, size: int) -> list[Rule]:
        """Return the candidates at ``size`` that are worth repeating."""
        times = {rule: statistics.median(t) for rule, t in self._times[size].items()}
        limit = self._far_behind * min(times.values())
        return [rule for rule, seconds in times.items() if rule == FLAT_RING or seconds <= limit]

    def _next_repeat(self) -> int | None:
        """Return the size with the fewest repeats among those for which another one fits."""
        left = self._remaining_seconds()
        open_ = [
            (len(times[FLAT_RING] if FLAT_RING in times else next(iter(times.values()))), size)
            for size, times in self._times.items()
            if self._round_seconds(size, self._contenders(size)) * _MARGIN < left
        ]
        repeats, size = min(open_, default=(_MAX_REPEATS, 0))
        return size if repeats < _MAX_REPEATS else None

    def _fits(self, size: int, rules: Sequence[Rule]) -> bool:
        return self._round_seconds(size, rules) * _MARGIN < self._remaining_seconds()

    def _round_seconds(self, size: int, rules: Sequence[Rule]) -> float:
        return sum(self._predict(size, rule) * self._in_a_row(size, rule) for rule in rules)

    def _in_a_row(self, size: int, rule: Rule) -> int:
        seconds = self._predict(size, rule)
        return min(_MAX_IN_A_ROW, max(1, math.ceil(_SHORT_SECONDS / max(seconds, 1e-9))))

    def _predict(self, size: int, rule: Rule) -> float:
        """Return the median time of a candidate, extrapolated from smaller sizes if necessary."""
        rule = self._measured_form(rule)
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

    def _remaining_seconds(self) -> float:
        """Return the remaining budget by the clock of rank 0, the same on all ranks."""
        left = torch.tensor([self._deadline - time.monotonic()], dtype=torch.float64)
        left = left.to(self._device)
        dist.broadcast(left, 0)
        return float(left)

    def _line(self, size: int) -> str:
        times = {rule: statistics.median(t) for rule, t in self._times[size].items()}
        fastest = min(times, key=lambda rule: times[rule])
        return f"{size:,} bytes: {len(times)} candidates, fastest: {fastest.algorithm}"
