"""Why a step takes its time: kernels by kind, host against device, the trainer's parts, memory.

The best of ours and of the others, as ``fast`` found them in the same results file, are traced by
torch's profiler, each in a process of its own, and then our recipe in eager steps, in whose trace
LARS, the schedule and the meters can be told apart. Beside them stands a roofline: the least time
in which the arithmetic and the memory traffic of ResNet-50 could be done at the rates that this
device reached in the same run.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import clock, report, trainer_parts
from benchmarks.gpu.contenders import BARE, CONTENDERS, EAGER, TYPED, Contender
from benchmarks.gpu.goals import best, decisive
from benchmarks.gpu.lars_step import copy_bandwidth
from benchmarks.gpu.loops import images_per_step
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Report
from benchmarks.gpu.turns import Failed, Process

TITLE = "Why: what a step is made of"

#: Steps of a trace: a multiple of the recipe's ``log_every``, so that the logged ones, in which the
#: meters do more, have their share.
_STEPS = 5
#: While the device sleeps so long, the host enqueues a step; the queue holds about 1,000 kernels.
_SLEEP_SECONDS = 0.2
_SHARE_PERCENT = 1.0

#: Gigaflops and megabytes of activations in 16 bits of one image of 224 pixels, forward and
#: backward. Convolutions and the classifier have 4.089 billion multiply-adds forward; each of the
#: 53 convolutions' outputs is read and written by batch norm, ReLU and addition, more or less often
#: as they are fused.
GIGAFLOPS = 24.3
MEGABYTES = {"eager kernels": 475, "fused by Inductor": 368, "batch norm within convolutions": 228}


def run(report_: Report, place: Place) -> None:
    """Trace the best loops and our eager one, and compare with the roofline."""
    for contender in [CONTENDERS[TYPED]] if place.dry else [*_best(report_), EAGER]:
        if report_.has_time(contender.name, 0 if place.dry else contender.seconds + 20):
            trace(report_, place, contender, annotate=place.dry or contender is EAGER)
    with report_.attempt("roofline"):
        roofline(report_, place)


def _best(report_: Report) -> list[Contender]:
    """Return the best of ours and of the others, and the recipe as typed; or the likeliest."""
    fast = report.read(report_.file)["parts"].get("fast", {"tables": {}})
    rows = decisive(fast["tables"])
    found = [best(rows, ours=True), best(rows, ours=False)]
    names = [row["contender"] for row in found if row]
    if not names:
        report_.note("no results of fast: the recipe as typed and the plain loop are traced")
        names = [TYPED, f"{BARE}: cudnn.benchmark"]
    return [CONTENDERS[name] for name in dict.fromkeys([*names, TYPED])]


def trace(report_: Report, place: Place, contender: Contender, *, annotate: bool) -> None:
    """Report a contender's kernels by kind, its longest kernels, its host time and its memory.

    Args:
        report_: where the results go.
        place: the device and options.
        contender: what to trace.
        annotate: whether to report the shares of the trainer's parts too.
    """
    process = Process(contender, dry=place.dry, annotate=annotate)
    try:
        process.wait_ready(120)
        process.warm(60 + 2.5 * contender.seconds)
        steps = 3 if place.dry else 9
        host = process.ask(60, do="host", steps=steps, sleep_seconds=_SLEEP_SECONDS)
        found = process.ask(120, do="profile", steps=1 if place.dry else _STEPS)
    except Failed as failed:
        record = report_.fail if contender.ours and failed.kind != "skipped" else report_.skip
        record(f"trace of {contender.name}", str(failed))
        return
    finally:
        process.end()
    kinds = found["kinds"]
    report_.row(
        "a step",
        contender=contender.name,
        wall_ms=1e3 * process.step_seconds,
        traced_ms=found["step_ms"],
        idle_percent=kinds[-1]["percent"] if kinds else "",
        launches=sum(row["launches"] for row in kinds),
        host_ms=1e3 * host["host_seconds"],
        images_per_second=images_per_step(contender, place) / process.step_seconds,
        peak_GiB=process.gigabytes,
    )
    if not place.dry and host["host_seconds"] > 0.9 * _SLEEP_SECONDS:
        report_.note(f"{contender.name}: the host waited for room in the queue; its time is less")
    if not kinds:
        report_.note(f"{contender.name}: the profiler sees no kernels here")
    for row in kinds:
        report_.row(f"a step of {contender.name}, by kind of kernel", **row)
    for row in found["longest"]:
        report_.row(f"a step of {contender.name}, its longest kernels", **row)
    if annotate:
        parts(report_, found)


def parts(report_: Report, found: dict[str, Any]) -> None:
    """Report the share of LARS, schedule and meters in an eager step, on device and host."""
    for row in part_rows(found):
        report_.row("parts of an eager step of our trainer", **row)
    if found["step_ms"]:
        share = sum(part["device_ms"] for part in found["parts"].values()) / found["step_ms"]
        what = "LARS, schedule and meters, percent of an eager step's device time"
        report_.goal(what, 100 * share, most=_SHARE_PERCENT)


def part_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each of the trainer's parts in the summary of a trace."""
    rows = []
    for name in (trainer_parts.LARS, trainer_parts.SCHEDULE, trainer_parts.METERS):
        part = found["parts"].get(name, {"device_ms": 0.0, "host_ms": 0.0, "launches": 0.0})
        whole = found["step_ms"]
        share = {"percent_of_the_step": 100 * part["device_ms"] / whole if whole else 0.0}
        rows.append({"part": name, **part, **share})
    return rows


def roofline(report_: Report, place: Place) -> None:
    """Report images per second at the measured rates of copies and of matrix products.

    The first number takes the longer of the two times, the second their sum, as without overlap.
    """
    bandwidth = copy_bandwidth(place, 2 if place.dry else 9)
    rate = matrix_rate(place)
    report_.row(
        "rates of this device, measured here",
        copy_GB_per_second=bandwidth / 1e9,
        bf16_product_TFLOP_per_second=rate / 1e12,
    )
    arithmetic = 1e9 * GIGAFLOPS / rate
    for name, megabytes in MEGABYTES.items():
        traffic = 1e6 * megabytes / bandwidth
        report_.row(
            "roofline of ResNet-50, images per second",
            activations=name,
            MB_per_image=megabytes,
            with_full_overlap=1 / max(traffic, arithmetic),
            without_overlap=1 / (traffic + arithmetic),
        )


def matrix_rate(place: Place) -> float:
    """Return the rate of a large BF16 matrix product on random data, in operations per second."""
    size = 64 if place.dry else 8192
    a, b = (torch.randn(size, size, device=place.device).bfloat16() for _ in range(2))
    step = partial(torch.mm, a, b)
    clock.seconds(step, place.device, 3)
    times = [clock.seconds(step, place.device, 5) for _ in range(2 if place.dry else 9)]
    return 2 * size**3 / statistics.median(times)
