"""Kernels of a profiler's trace, by kind: launches and milliseconds of a step, and idle time.

A kernel belongs to an annotation of the host (such as LARS) if it was launched within it, which
the trace's correlation numbers tell. Replays of a CUDA graph are one launch, so that their kernels
belong to none; their kinds are known by name all the same.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.trainer_parts import PREFIX

Event = dict[str, Any]

#: Kinds in the order in which a kernel's name is tried; the first pattern found decides.
KINDS = (
    ("optimizer", r"^(sums_of_squares|update)$|multi_tensor_apply|_amp_|fused_sgd|lars"),
    ("all-reduce", r"nccl"),
    ("batch norm", r"batch_?norm|bn_(fw|bw|fprop|bprop)|welford"),
    ("pooling", r"pool"),
    ("layout", r"nchwtonhwc|nhwctonchw|transpose"),
    ("convolution", r"^(?!triton_(poi|red|per)).*(conv|fprop|dgrad|wgrad|cudnn|winograd)"),
    ("matrix product", r"gemm|gemv|cutlass|nvjet|cublas|splitk|triton_.*_mm"),
    ("loss, top-k", r"softmax|nll_loss|cross_entropy|topk|sort|gather"),
    ("copy, cast", r"copy|memcpy|_to_copy|cat_?array"),
    ("reduction", r"reduce|triton_(red|per)|norm"),
    ("elementwise", r"elementwise|triton_poi|threshold|relu|fill|random|distribution"),
)

_LAUNCHES = ("cuda_runtime", "cuda_driver")


def kind_of(event: Event) -> str:
    """Return the kind of an event of the device."""
    category = str(event.get("cat", "")).lower()
    if category == "gpu_memset":
        return "memset"
    if category == "gpu_memcpy":
        return "copy, cast"
    name = str(event.get("name", "")).lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def kernels_of(events: list[Event]) -> list[Event]:
    """Return the kernels among the events of a Chrome trace by torch.profiler."""
    return [event for event in events if str(event.get("cat", "")).lower() == "kernel"]


def events_of(profiler: Any) -> list[Event]:
    """Return the events of a finished ``torch.profiler.profile``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def summary(events: list[Event], steps: int, longest: int = 12) -> dict[str, Any]:
    """Summarise a trace of ``steps`` steps; times are milliseconds of one step.

    Returns:
        ``kinds``: rows with kind, launches, ms and share in percent, of which the last is idle
        time, between the first and the last kernel; ``longest``: the ``longest`` kernels by name;
        ``parts``: milliseconds on the device and on the host by annotation; ``step_ms``.
    """
    work = kernels_of(events)
    work += [e for e in events if str(e.get("cat", "")).lower() in ("gpu_memcpy", "gpu_memset")]
    parts = _parts(events, work, steps)
    if not work:
        return {"kinds": [], "longest": [], "parts": parts, "step_ms": 0.0}
    busy, whole = _busy(work)
    per_step = 1e-3 / steps
    step_ms = whole * per_step
    by_kind: dict[str, list[float]] = defaultdict(list)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in work:
        by_kind[kind_of(event)].append(event["dur"])
        by_name[f"{kind_of(event)}: {event['name']}"].append(event["dur"])
    kinds = [_row("kind", kind, took, steps, step_ms) for kind, took in by_kind.items()]
    kinds.sort(key=lambda row: -row["ms"])
    idle = _row("kind", "idle, between kernels", [whole - busy], steps, step_ms)
    names = [_row("kernel", n[:90], took, steps, step_ms) for n, took in by_name.items()]
    names.sort(key=lambda row: -row["ms"])
    return {
        "kinds": [*kinds, idle | {"launches": 0.0}],
        "longest": names[:longest],
        "parts": parts,
        "step_ms": step_ms,
    }


def _row(head: str, name: str, took: list[float], steps: int, step_ms: float) -> dict[str, Any]:
    ms = 1e-3 * sum(took) / steps
    share = 100 * ms / step_ms if step_ms else 0.0
    return {head: name, "launches": len(took) / steps, "ms": ms, "percent": share}


def _busy(work: list[Event]) -> tuple[float, float]:
    """Return the time in which any stream is busy, and that from the first to the last kernel."""
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in work)
    busy, reached = 0.0, spans[0][0]
    for began, ended in spans:
        busy += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return busy, reached - spans[0][0]


def _parts(events: list[Event], work: list[Event], steps: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step on device and host, by annotation."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    parts: dict[str, dict[str, float]] = {}
    spans: list[tuple[str, Event]] = []
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "user_annotation" and name.startswith(PREFIX):
            name = name.removeprefix(PREFIX)
            part = parts.setdefault(name, {"device_ms": 0.0, "host_ms": 0.0, "launches": 0.0})
            part["host_ms"] += 1e-3 * event["dur"] / steps
            spans.append((name, event))
    for kernel in work:
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        if launch is None:
            continue
        for name, span in spans:
            same_thread = span.get("tid") == launch.get("tid")
            if same_thread and span["ts"] <= launch["ts"] <= span["ts"] + span["dur"]:
                parts[name]["device_ms"] += 1e-3 * kernel["dur"] / steps
                parts[name]["launches"] += 1 / steps
                break
    return parts
