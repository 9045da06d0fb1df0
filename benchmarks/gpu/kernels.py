"""Kernels of a profiler's trace, by kind: launches and milliseconds of a step."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

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

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def kind_of(event: Event) -> str:
    """Return the kind of an event of the device."""
    category = str(event.get("cat", "")).lower()
    if category == "gpu_memset":
        return "memset"
    if category == "gpu_memcpy":
        return "copy, cast"
    name = str(event.get("name", "")).lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def events_of(profiler: Any) -> list[Event]:
    """Return the events of a finished ``torch.profiler.profile``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def summary(events: list[Event], steps: int, longest: int = 8) -> dict[str, Any]:
    """Summarise a trace of ``steps`` steps; times are milliseconds of one step.

    ``busy_ms`` is the time in which any stream has work.
    """
    work = [event for event in events if str(event.get("cat", "")).lower() in _WORK]
    busy_ms = 1e-3 * _busy(work) / steps
    by_kind: dict[str, list[float]] = defaultdict(list)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in work:
        by_kind[kind_of(event)].append(event["dur"])
        by_name[f"{kind_of(event)}: {event['name'][:90]}"].append(event["dur"])

    def rows(head: str, found: dict[str, list[float]]) -> list[dict[str, Any]]:
        of_step = {name: 1e-3 * sum(took) / steps for name, took in found.items()}
        return [
            {head: name, "launches": len(found[name]) / steps, "ms": ms}
            | {"percent": 100 * ms / busy_ms}
            for name, ms in sorted(of_step.items(), key=lambda item: -item[1])
        ]

    return {
        "busy_ms": busy_ms,
        "kinds": rows("kind", by_kind),
        "longest": rows("kernel", by_name)[:longest],
    }


def _busy(work: list[Event]) -> float:
    """Return the time in which any stream is busy."""
    busy = reached = 0.0
    for began, ended in sorted((event["ts"], event["ts"] + event["dur"]) for event in work):
        busy += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return busy
