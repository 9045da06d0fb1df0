"""Traces in the Chrome JSON format, which Perfetto opens: as torch writes them, and as kept here.

torch.profiler numbers processes by the operating system and GPUs from 0, so the traces of several
ranks would lie on top of each other. Here each rank has numbers and names of its own, and what ran
beside the main thread without a thread that holds it gets a row: the spans of all-reduces on gloo.
Perfetto draws no rows in which events overlap (https://perfetto.dev/docs/faq), so spans that do are
spread over several.

All times stay relative to torch's ``baseTimeNanoseconds``, which is the same for all ranks of a day
(pytorch/kineto, pull request 919): several files that are opened together lie on one time axis, as
far as the clocks of their machines agree.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ....comm import Span
from .intervals import in_rows

Trace = dict[str, Any]
Event = dict[str, Any]

#: The name of the range around a step, with its number behind it; that of torch and of its tools.
STEP = "ProfilerStep#"
#: The category of the events that are made of spans.
SPAN = "largebatch"
#: How the names of the back ends' own ranges begin, which run on after the call that began them.
BACK_ENDS = ("gloo:", "nccl:")

_PIDS_OF_A_RANK = 100
_LANES = 10_000  # what the numbers of rows begin with, above those of a rank's processes


def read_trace(path: Path) -> Trace:
    """Read a trace, compressed by gzip or not.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        content: Trace = json.load(file)
    return content


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace, compressed by gzip; a file that is there is replaced as a whole.

    Raises:
        OSError: It cannot be written.
    """
    partial = path.with_suffix(".partial")
    try:
        with gzip.open(partial, "wt", encoding="utf-8", compresslevel=5) as file:
            file.write(json.dumps(trace))  # json.dump encodes in Python, three times as slowly
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def of_rank(trace: Trace, rank: int, spans: Iterable[Span] = ()) -> Trace:
    """Return a trace of torch with the names and numbers of a rank, and with further rows.

    Args:
        trace: As torch.profiler exports it, with a range :data:`STEP` on the main thread.
        rank: The rank.
        spans: What to add in rows, by their lanes.

    Raises:
        ValueError: It holds no step.
    """
    events: list[Event] = [e for e in trace["traceEvents"] if isinstance(e.get("pid"), int)]
    main = next(filter(is_step, events), None)  # on a GPU, its rows have ranges of that name too
    if main is None:
        raise ValueError(f"the trace holds no step: no range whose name begins with {STEP}")
    own, thread = main["pid"], main["tid"]
    used = {e["pid"] for e in events if e.get("ph") != "M"}
    first = (rank + 1) * _PIDS_OF_A_RANK  # 0 is the idle process to Perfetto
    pids = {own: first} | {
        pid: first + 1 + number for number, pid in enumerate(sorted(used - {own}))
    }
    kept: list[Event] = []
    for event in events:
        if event["pid"] not in pids or event.get("name") in ("process_name", "process_sort_index"):
            continue
        event = {**event, "pid": pids[event["pid"]]}
        if "id" in event and isinstance(event["id"], int):  # an arrow between two events
            event["id"] += rank << 32
        kept.append(event)
    for old, new in pids.items():
        name = f"rank {rank}" if old == own else f"rank {rank}, GPU {old}"
        kept += [_named("process_name", new, 0, name=name)]
        kept += [_named("process_sort_index", new, 0, sort_index=new)]
    kept.append(_named("thread_name", first, thread, name="main thread"))
    kept.append(_named("thread_sort_index", first, thread, sort_index=-1))
    asynchronous = [e for e in kept if _is_asynchronous(e)]
    kept = [e for e in kept if not _is_asynchronous(e)]
    base = trace.get("baseTimeNanoseconds", 0)
    kept += _rows(first, asynchronous, [_event(span, base) for span in spans])
    return {**trace, "traceEvents": kept}


def is_step(event: Event) -> bool:
    """Whether an event is the range around a step, on the main thread."""
    named = str(event.get("name")).startswith(STEP)
    return named and event.get("cat") == "user_annotation" and "dur" in event


def _is_asynchronous(event: Event) -> bool:
    """Whether an event is a back end's range of an operation that does not block its thread."""
    on_host = event.get("cat") in ("user_annotation", "cpu_op")
    return on_host and str(event.get("name")).startswith(BACK_ENDS) and "dur" in event


def _event(span: Span, base: int) -> Event:
    return {
        "ph": "X",
        "cat": SPAN,
        "name": span.name,
        "lane": span.lane,
        "ts": (span.start_ns - base) / 1000,
        "dur": max(0, span.end_ns - span.start_ns) / 1000,
    }


def _rows(pid: int, asynchronous: list[Event], spans: list[Event]) -> list[Event]:
    """Put events that may overlap into rows below the threads of a process."""
    lanes: dict[str, list[Event]] = {}
    for event in spans:
        lanes.setdefault(event.pop("lane"), []).append(event)
    if asynchronous:
        lanes["operations of the back end"] = asynchronous
    found: list[Event] = []
    for number, lane in enumerate(sorted(lanes)):
        events = lanes[lane]
        rows = in_rows([(e["ts"], e["ts"] + e["dur"]) for e in events])
        tids = [(_LANES + pid) * 1000 + 20 * number + min(row, 19) for row in rows]
        found += [{**e, "pid": pid, "tid": tid} for e, tid in zip(events, tids, strict=True)]
        for tid in sorted(set(tids)):
            found.append(_named("thread_name", pid, tid, name=lane))
            found.append(_named("thread_sort_index", pid, tid, sort_index=tid))
    return found


def _named(what: str, pid: int, tid: int, **value: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": value}
