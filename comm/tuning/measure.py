"""Measure candidates against each other on the ranks of the running job, within a time budget.

Candidates take turns, and the time of a repeat is that of its slowest rank. Sizes are measured in
ascending order; each gets its part of the time left, in proportion to its bytes. A candidate that
is far behind is left out at larger sizes. All ranks decide by the same numbers.
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
from ..launch_order import device_of_messages
from ..model.calibrate import Measurement
from ..model.choose import FLAT_RING
from ..plan import Rule
from ..topology import Topology

#: A candidate that takes this many times as long as the fastest is far behind.
FAR_BEHIND = 2.0

_FAR_BEHIND_IF_SHORT_OF_TIME = 1.25  # if one round takes more than a quarter of the time left
_LARGE_BYTES = 2**20  # candidates may be left out at sizes above this
_MIN_REPEATS = 3  # of a short round
_MAX_REPEATS = 15
_SHORT_SECONDS = 0.01  # shorter all-reduces are timed several in a row
_MAX_IN_A_ROW = 20
_SHORT_ROUND_SECONDS = 1.0  # longer rounds have no warm-up, and may have only one repeat
_UNKNOWN_SECONDS_PER_BYTE = 8e-8  # assumed for a candidate with one size so far: 100 Mbit/s
_MARGIN = 1.2  # factor on the predicted time of a round

#: The seconds of each repeat by size and candidate.
_Times = dict[int, dict[Rule, list[float]]]


def measure(
    topology: Topology,
    rules: Sequence[Rule],
    sizes_bytes: Sequence[int],
    dtype: torch.dtype,
    budget_seconds: float,
    *,
    far_behind: float = FAR_BEHIND,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[tuple[Measurement, ...], list[int]]:
    """Measure rules without ``max_bytes`` at ascending sizes; return also those left out."""
    deadline = time.monotonic() + budget_seconds
    device = device_of_messages()
    # Zeros do not overflow, however often they are summed.
    buffer = torch.zeros(sizes_bytes[-1] // dtype.itemsize, dtype=dtype, device=device)
    times: _Times = {}
    rounds = 0

    def run_round(size: int, candidates: Sequence[Rule]) -> None:
        """Time each candidate once, or several times in a row if it is short."""
        nonlocal rounds
        message = buffer[: size // dtype.itemsize]
        own = torch.zeros(len(candidates), dtype=torch.float64)
        first = rounds % len(candidates)
        for index in [*range(first, len(candidates)), *range(first)]:
            rule = candidates[index]
            in_a_row = _in_a_row(_predict(times, size, rule))
            dist.barrier()
            start = time.perf_counter()
            for _ in range(in_a_row):
                all_reduce(message, topology, rule)
            if message.is_cuda:
                torch.cuda.synchronize(device)
            own[index] = (time.perf_counter() - start) / in_a_row
        slowest = own.to(device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        for rule, seconds in zip(candidates, slowest.tolist(), strict=True):
            times.setdefault(size, {}).setdefault(rule, []).append(seconds)
        rounds += 1

    def left() -> float:
        """Return the time left by the clock of rank 0, the same on all ranks."""
        seconds = torch.tensor([deadline - time.monotonic()], dtype=torch.float64, device=device)
        dist.broadcast(seconds, 0)
        return float(seconds)

    for _ in range(2):  # sets up connections and threads
        run_round(sizes_bytes[0], [rule for rule in rules if rule.chunk_bytes is None])
    times.clear()
    for index, size in enumerate(sizes_bytes):
        at_hand = left()
        candidates = _candidates(times, size, rules, at_hand, far_behind)
        short = _round_seconds(times, size, candidates) < _SHORT_ROUND_SECONDS
        if short and _round_seconds(times, size, candidates) * _MARGIN < at_hand:
            run_round(size, candidates)  # warm-up: touches memory for the first time
            del times[size]
        kept_for_larger = at_hand * (1 - size / sum(sizes_bytes[index:]))
        for repeat in range(_MAX_REPEATS):
            needed = _round_seconds(times, size, candidates) * _MARGIN
            if repeat >= (_MIN_REPEATS if short else 1):
                needed += kept_for_larger
            if needed >= left():
                break
            run_round(size, candidates)
        if size not in times:
            break
        if topology.rank == 0:
            medians = {rule: statistics.median(found) for rule, found in times[size].items()}
            fastest = min(medians, key=lambda rule: medians[rule])
            progress(f"{size:,} bytes: {len(medians)} candidates, fastest: {fastest.algorithm}")
    measurements = tuple(
        Measurement(rule, size, tuple(found[rule]))
        for size, found in times.items()
        for rule in rules
        if rule in found
    )
    return measurements, [size for size in sizes_bytes if size not in times]


def _candidates(
    times: _Times, size: int, rules: Sequence[Rule], left: float, far_behind: float
) -> list[Rule]:
    """Return the candidates to measure at ``size``, which is larger than all sizes so far."""
    found = [rule for rule in rules if rule.chunk_bytes is None or rule.chunk_bytes < size]
    if not times or size <= _LARGE_BYTES:
        return found
    before = max(times)
    if _round_seconds(times, size, found) > left / 4:
        far_behind = min(far_behind, _FAR_BEHIND_IF_SHORT_OF_TIME)

    def is_behind(rule: Rule) -> bool:
        """Whether it is far behind at the previous size, and by the prediction for this one."""
        rivals = [other for other in found if other.wire_dtype == rule.wire_dtype]
        return all(
            _predict(times, at, rule) > far_behind * min(_predict(times, at, r) for r in rivals)
            for at in (before, size)
        )

    return [
        rule
        for rule in found
        if rule == FLAT_RING
        or (_measured_form(times, rule) in times[before] and not is_behind(rule))
    ]


def _measured_form(times: _Times, rule: Rule) -> Rule:
    """Return the rule itself if it has been measured, otherwise its form without chunks."""
    measured = any(rule in found for found in times.values())
    return rule if measured else replace(rule, chunk_bytes=None)


def _round_seconds(times: _Times, size: int, rules: Sequence[Rule]) -> float:
    predicted = [_predict(times, size, rule) for rule in rules]
    return sum(seconds * _in_a_row(seconds) for seconds in predicted)


def _in_a_row(seconds: float) -> int:
    return min(_MAX_IN_A_ROW, max(1, math.ceil(_SHORT_SECONDS / max(seconds, 1e-9))))


def _predict(times: _Times, size: int, rule: Rule) -> float:
    """Return the median time of a candidate, extrapolated from smaller sizes if necessary."""
    rule = _measured_form(times, rule)
    known = [(s, statistics.median(found[rule])) for s, found in times.items() if rule in found]
    known = known[-2:]
    if not known:
        return _SHORT_SECONDS
    last, seconds = known[-1]
    if len(known) == 1:
        slope = _UNKNOWN_SECONDS_PER_BYTE
    else:
        slope = max(0.0, (seconds - known[0][1]) / (last - known[0][0]))
    return seconds + slope * (size - last)
