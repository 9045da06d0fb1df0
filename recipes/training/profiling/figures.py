"""What a trace says about the steps in it: costs, phases, hidden communication, idle time.

A GPU runs behind the host. There, a step begins when the host has begun it and the GPU is through
with the step before, and ends when both are through with it. Computation is the kernels of the
streams that forward, backward and optimizer launch on; communication is NCCL's kernels and what
runs on the streams of the all-reduce; copies to the GPU are neither.

On a CPU, each moment of the main thread belongs to the innermost range that it is in, an operator
or a phase. Communication is then what gloo does on other threads, from the start of each all-reduce
to its end. All times of a trace are in microseconds, those returned in seconds.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from ..phases import (
    ALL_REDUCE_WAIT,
    BACKWARD,
    FORWARD,
    HOST_TO_DEVICE,
    INPUT_WAIT,
    OPTIMIZER,
    PHASES,
)
from .intervals import Interval, difference, intersection, length, union
from .trace import BACK_ENDS, SPAN, STEP, Event, Trace, is_step

#: The phase of what is in none of them.
BETWEEN = "between phases"
#: The cost that is the time in which a GPU runs nothing.
IDLE = "idle"
#: The name of the all-reduce of a bucket, not of its chunks.
_BUCKET = re.compile(r"all-reduce bucket \d+, [^,]+, [^,]+")
#: What the engine of autograd calls the evaluation of a function, before its name.
_ENGINE = "autograd::engine::evaluate_function: "
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
#: The phases whose streams compute.
_COMPUTE = (FORWARD, BACKWARD, OPTIMIZER)
#: What NCCL calls the kernels that reduce gradients; it has others, such as those of broadcasts.
_REDUCES = re.compile("all_?reduce|reduce_?scatter|all_?gather", re.IGNORECASE)


class Cost(NamedTuple):
    """What took time.

    Attributes:
        name: Name of an operator, a kernel or a phase.
        phase: The phase that it belongs to; empty on a GPU.
        seconds: Its own time, without that of what it called.
        calls: How often it ran.
    """

    name: str
    phase: str
    seconds: float
    calls: int


class Bar(NamedTuple):
    """A part of a lane of the picture.

    Attributes:
        lane: ``input``, ``copies``, ``compute`` or ``communication``.
        name: What it is.
        start: Seconds, on the time axis of the trace.
        end: Seconds.
    """

    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Figures:
    """The figures of one rank, in seconds of all its recorded steps together.

    Attributes:
        rank: The rank.
        on_gpu: Whether they are those of a GPU.
        lacks_kernels: Whether the run was on a GPU of which nothing was recorded.
        steps: Numbers of the steps.
        seconds: Time of the steps.
        phases: Time of each phase, with that between phases; they add up to ``seconds`` on a CPU.
            On a GPU, copies run beside the other phases.
        costs: Costs, the largest first.
        communication: Time in which an all-reduce was under way, or on a GPU any communication.
        hidden: Time of that in which this rank computed meanwhile.
        idle: On a GPU, time in which nothing ran. On a CPU, time in which the main thread waited
            for its input or for the all-reduce.
        shown: Number of the step in the picture: the middle one, which is the same on all ranks.
        start: When it began.
        end: When it ended.
        bars: Its picture.
    """

    rank: int
    on_gpu: bool
    lacks_kernels: bool
    steps: tuple[int, ...]
    seconds: float
    phases: dict[str, float]
    costs: list[Cost]
    communication: float
    hidden: float
    idle: float
    shown: int
    start: float
    end: float
    bars: list[Bar]


def figures_of(trace: Trace, rank: int, device: str = "cpu") -> Figures:
    """Compute the figures of a trace, as :func:`~.trace.of_rank` returns it.

    Args:
        trace: The trace.
        rank: The rank.
        device: Type of the device that the rank computed on, as torch names it.

    Raises:
        ValueError: It holds no step.
    """
    complete = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    marks = sorted(filter(is_step, complete), key=lambda event: event["ts"])
    if not marks:
        raise ValueError(f"the trace holds no step: no range whose name begins with {STEP}")
    numbers = tuple(int(e["name"].removeprefix(STEP)) for e in marks)
    thread = [e for e in complete if (e["pid"], e["tid"]) == (marks[0]["pid"], marks[0]["tid"])]
    thread = [e for e in thread if not e["name"].startswith(BACK_ENDS)]
    ended = [e for e in complete if e.get("cat") == SPAN and e["name"] == ALL_REDUCE_WAIT]
    kernels = [e for e in complete if e.get("cat") in _ON_GPU]
    on_gpu = bool(kernels)
    if on_gpu:
        gpu = _Gpu(complete, kernels)
        spans = gpu.spans(marks)
        steps, reduces = union(spans), gpu.communicates
        communication = intersection(union(map(_times, reduces)), steps)
        compute = intersection(union(map(_times, gpu.computes)), steps)
        resting = difference(steps, union(map(_times, kernels)))
        idle = length(resting)
        named = gpu.phases()
        waits = union(_times(e) for e in thread if e["name"] == INPUT_WAIT)
        named[INPUT_WAIT] = intersection(waits, resting)
        costs = _costs_of_kernels(kernels, steps, idle)
        phases = {name: length(intersection(times, steps)) for name, times in named.items()}
        gradients = union(_times(e) for e in reduces if not _is_nccl(e) or _reduces(e))
        phases[ALL_REDUCE_WAIT] = length(difference(intersection(gradients, steps), compute))
    else:
        spans = [_times(e) for e in marks]
        steps, reduces = union(spans), _all_reduces(complete)
        communication = intersection(union(map(_times, reduces)), steps)
        named = _phases(thread, ended)
        waiting = union([*named.get(INPUT_WAIT, []), *named.get(ALL_REDUCE_WAIT, [])])
        compute = difference(steps, waiting)
        idle = length(intersection(waiting, steps))
        costs = _costs_of_thread(_with_waits(thread, named.get(ALL_REDUCE_WAIT, [])), steps)
        phases = {name: length(intersection(times, steps)) for name, times in named.items()}
        phases[BETWEEN] = length(steps) - sum(phases.values())
    shown = len(marks) // 2
    window = [spans[shown]]
    return Figures(
        rank=rank,
        on_gpu=on_gpu,
        lacks_kernels=device == "cuda" and not on_gpu,
        steps=numbers,
        seconds=length(steps) / 1e6,
        phases={n: phases[n] / 1e6 for n in (*PHASES, BETWEEN) if phases.get(n, 0) > 0},
        costs=costs,
        communication=length(communication) / 1e6,
        hidden=length(intersection(communication, compute)) / 1e6,
        idle=idle / 1e6,
        shown=numbers[shown],
        start=spans[shown][0] / 1e6,
        end=spans[shown][1] / 1e6,
        bars=_bars(named, reduces, window),
    )


def _times(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _is_nccl(event: Event) -> bool:
    return "nccl" in event["name"].lower()


def _reduces(event: Event) -> bool:
    return _REDUCES.search(event["name"]) is not None


class _Gpu:
    """The kernels of a GPU, divided by streams.

    torch puts a range (``gpu_user_annotation``) on each stream that a range of the host launched
    on, from the first kernel to the last.

    Args:
        complete: The events of the trace.
        kernels: Those of kernels and copies.

    Attributes:
        computes: Kernels of the streams that compute, without NCCL's.
        communicates: NCCL's kernels, and what runs on the streams of all-reduces.
    """

    def __init__(self, complete: Sequence[Event], kernels: Sequence[Event]) -> None:
        self._complete, self._kernels = complete, kernels
        self._ranges = [e for e in complete if e.get("cat") == "gpu_user_annotation"]
        compute = {_stream(e) for e in self._ranges if e["name"] in _COMPUTE}
        if not compute:  # nothing was named, as in a step that was not divided
            compute = {_stream(e) for e in kernels if e["cat"] == "kernel" and not _is_nccl(e)}
        reduce = {_stream(e) for e in self._ranges if _BUCKET.fullmatch(e["name"])} - compute
        self.computes = [e for e in kernels if _stream(e) in compute and not _is_nccl(e)]
        self.communicates = [e for e in kernels if _is_nccl(e) or _stream(e) in reduce]

    def spans(self, marks: Sequence[Event]) -> list[Interval]:
        """The time of each step, in which host or GPU were at it."""
        launched = self._launched()
        found: list[Interval] = []
        nexts = [*(mark["ts"] for mark in marks[1:]), float("inf")]
        for mark, following in zip(marks, nexts, strict=True):
            begin, end = _times(mark)
            ends = [_times(e)[1] for e in self._ranges if e["name"] == mark["name"]]
            ends += [
                _times(e)[1]
                for e in (*self.computes, *self.communicates)
                if begin <= launched.get(_correlation(e), -1.0) < end
            ]
            if not ends:  # nothing tells what the step launched
                ends = [_times(e)[1] for e in self._kernels if begin <= e["ts"] < following]
            begin = max(begin, found[-1][1]) if found else begin
            found.append((begin, max(begin, end, *ends)))
        return found

    def _launched(self) -> dict[Any, float]:
        """When the host launched each kernel, by the number that torch gives both."""
        calls = [e for e in self._complete if e.get("cat") in ("cuda_runtime", "cuda_driver")]
        return {_correlation(e): e["ts"] for e in calls if _correlation(e) is not None}

    def phases(self) -> dict[str, list[Interval]]:
        """The times of each phase, in which what it launched ran on the stream of its range."""
        streams: dict[Any, list[Event]] = defaultdict(list)
        for event in self._kernels:
            streams[_stream(event)].append(event)
        busy = {stream: union(map(_times, events)) for stream, events in streams.items()}
        found: dict[str, list[Interval]] = {}
        for name in PHASES:
            ranges: dict[Any, list[Interval]] = defaultdict(list)
            for event in self._ranges:
                if event["name"] == name:
                    ranges[_stream(event)].append(_times(event))
            own = [intersection(union(t), busy.get(s, [])) for s, t in ranges.items()]
            if times := union(chain(*own)):
                found[name] = times
        return found


def _stream(event: Event) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _all_reduces(complete: Sequence[Event]) -> list[Event]:
    """The events of the communication on a CPU: our spans, else gloo's."""
    spans = [e for e in complete if e.get("cat") == SPAN and _BUCKET.fullmatch(e["name"])]
    return spans or [e for e in complete if e["name"].startswith("gloo:")]


def _phases(thread: Sequence[Event], waits: Sequence[Event]) -> dict[str, list[Interval]]:
    """The times of each phase on the main thread."""
    found = {
        name: union(_times(e) for e in thread if e["name"] == name)
        for name in PHASES
        if name != ALL_REDUCE_WAIT
    }
    backward = found[BACKWARD]
    found[ALL_REDUCE_WAIT] = intersection(union(map(_times, waits)), backward)
    found[BACKWARD] = difference(backward, found[ALL_REDUCE_WAIT])
    return {name: times for name, times in found.items() if times}


def _with_waits(thread: Sequence[Event], waits: list[Interval]) -> list[Event]:
    """The ranges of the main thread, with the waits for the all-reduce among them.

    A wait begins while the operator that accumulates the last gradient is still open, which is cut
    off there.
    """
    found = []
    for event in thread:
        start, end = _times(event)
        cuts = [a for a, b in waits if start < a < end < b]
        found.append({**event, "dur": cuts[0] - start} if cuts else event)
    names = {"name": ALL_REDUCE_WAIT}
    return [*found, *({**names, "ts": start, "dur": end - start} for start, end in waits)]


def _costs_of_thread(thread: Iterable[Event], steps: list[Interval]) -> list[Cost]:
    """The own time of each range of a thread, by name and phase, the longest first."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    # Those open at present, the innermost last: key, end, and whether it counts.
    stack: list[tuple[tuple[str, str], float]] = []
    last = 0.0

    def close(until: float) -> None:
        """Attribute the time up to ``until`` to the innermost range at each moment."""
        nonlocal last
        while stack and stack[-1][1] <= until:
            key, end = stack.pop()
            seconds[key] += length(intersection([(last, end)], steps)) if end > last else 0.0
            last = max(last, end)
        if stack and until > last:
            seconds[stack[-1][0]] += length(intersection([(last, until)], steps))
        last = max(last, until)

    known = [e for e in thread if e.get("cat") != "python_function"]
    for event in sorted(known, key=lambda e: (e["ts"], -e["dur"])):
        start, end = _times(event)
        close(start)
        if stack:
            end = min(end, stack[-1][1])
        name, inside = event["name"], stack[-1][0][1] if stack else BETWEEN
        if name.startswith(STEP):
            name = BETWEEN
        plain = name.removeprefix(_ENGINE).removeprefix("torch::autograd::")
        key = (plain, plain if plain in PHASES else inside)
        stack.append((key, end))
        calls[key] += not name.startswith(_ENGINE)  # which calls the function of that name
    close(float("inf"))
    found = [
        Cost(name, phase, us / 1e6, calls[name, phase])
        for (name, phase), us in seconds.items()
        if us > 0
    ]
    return sorted(found, key=lambda cost: -cost.seconds)


def _costs_of_kernels(kernels: Sequence[Event], steps: list[Interval], idle: float) -> list[Cost]:
    """The time of each kernel, and of none, the longest first; those of two streams may overlap."""
    seconds: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for event in kernels:
        inside = length(intersection([_times(event)], steps))
        if inside:
            seconds[event["name"]] += inside
            calls[event["name"]] += 1
    found = [Cost(name, "", us / 1e6, calls[name]) for name, us in seconds.items()]
    found += [Cost(IDLE, "", idle / 1e6, 0)] if idle > 0 else []
    return sorted(found, key=lambda cost: -cost.seconds)


def _bars(
    named: dict[str, list[Interval]], reduces: Sequence[Event], window: list[Interval]
) -> list[Bar]:
    """The picture of a step: phases, and each all-reduce, clipped to the step."""
    found = []
    for name, times in named.items():
        lane = {INPUT_WAIT: "input", HOST_TO_DEVICE: "copies"}.get(name, "compute")
        found += [Bar(lane, name, a / 1e6, b / 1e6) for a, b in intersection(times, window)]
    for event in reduces:
        for start, end in intersection([_times(event)], window):
            found.append(Bar("communication", event["name"], start / 1e6, end / 1e6))
    return found
