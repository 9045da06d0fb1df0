"""Training throughput of ResNet-50 at 224 pixels: the trainer, a plain PyTorch loop, timm's step.

Goal: at least as fast as the best of the others, at the same model, precision and batch size.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.loops import RIVAL_DTYPE, Load, Loop, bare, ours, timms
from benchmarks.gpu.place import Place, need_cuda
from benchmarks.gpu.report import Report

TITLE = "ResNet-50: training throughput"

OURS = "largebatch trainer"
#: Batch size and whether compiled; the most informative first, as time may not suffice for all.
_LOADS = [(256, False), (256, True), (128, False), (512, False), (64, False)]
_LOADS += [(128, True), (512, True), (64, True)]
_WARMUP_STEPS = 6  # the first ones create the loader's four batches
_REPEATS, _BLOCK_SECONDS = 5, 0.3
#: Initial estimate of the seconds that the first contender takes, by whether it is compiled.
_SECONDS = {False: 8.0, True: 75.0}

#: Published throughputs in mixed precision, per GPU: software, GPU, images per second, source.
PUBLISHED = (
    ("PyTorch 21.03", "V100 16 GB", 1200, "NVIDIA DeepLearningExamples"),
    ("PyTorch 21.03", "A100 80 GB", 2470, "NVIDIA DeepLearningExamples"),
    ("PyTorch Composer and FFCV", "A100 80 GB", 2100, "MLPerf v2.0 log, of 8 GPUs"),
    ("TensorFlow 1 with XLA, batch 256", "A100 40 GB", 2375, "NVIDIA DeepLearningExamples"),
    ("Paddle, DALI", "A100 80 GB", 2897, "NVIDIA DeepLearningExamples"),
    ("MXNet 22.10, DALI, batch 512", "A100 80 GB", 3410, "NVIDIA DeepLearningExamples"),
    ("MXNet, fused kernels, CUDA graphs", "H100 SXM", 7083, "MLPerf v3.1 log, of 8 GPUs"),
)


def run(report: Report, place: Place) -> None:
    """Check that the trainer's step does not wait, then compare all contenders."""
    for precision in RIVAL_DTYPE:
        what = f"no host sync in the trainer's step, {precision}"
        report.check(what, trainer_never_waits, precision, place)
    if not place.dry:
        for loop, gpu, rate, source in PUBLISHED:
            row = {"loop": loop, "GPU": gpu, "images_per_second": rate, "source": source}
            report.row("published, not measured here", **row)
    expected = dict(_SECONDS)
    for batch, compiled in [(4, False)] if place.dry else _LOADS:
        for precision in RIVAL_DTYPE:
            compare(report, place, Load(precision, batch, compiled), expected)
    if place.dry:
        report.skip("torch.compile", "left out of a dry run")
    else:
        goals(report)


def compare(report: Report, place: Place, load: Load, expected: dict[bool, float]) -> None:
    """Measure all contenders on one workload, interleaved.

    Args:
        report: where the results go.
        place: the device and options.
        load: the workload.
        expected: estimate of the seconds until the first contender is warmed up, by whether it is
            compiled; updated in place.
    """
    mode = "compiled" if load.compiled else "eager"
    what = f"{load.precision}, {mode}, batch {load.batch}"
    makers: dict[str, Callable[[Load, Place], Loop]] = {
        OURS: ours,
        "PyTorch loop": bare,
        "timm's step": timms,
    }
    if load.compiled:
        torch.compiler.reset()  # otherwise a second batch size is compiled with dynamic shapes
    loops: dict[str, Loop] = {}
    for name, make in makers.items():
        label = f"{what}: {name}"
        # The others reuse some of what the first one compiled.
        needed = expected[load.compiled] / (2 if loops else 1)
        if not report.has_time(label, 0 if place.dry else needed):
            continue
        start = time.monotonic()
        with report.attempt(label):
            loops[name] = warmed(make(load, place), place)
            if len(loops) == 1:
                expected[load.compiled] = 1.2 * (time.monotonic() - start)
    if OURS in loops and not load.compiled:
        with report.attempt(f"{what}: {OURS}, cudnn.benchmark"):
            tuned = replace(loops[OURS], cudnn_benchmark=True)
            loops[f"{OURS}, cudnn.benchmark"] = warmed(tuned, place)
    if loops:
        with report.attempt(what):
            report_rates(report, place, load, mode, loops)
    loops.clear()
    gc.collect()
    if place.on_gpu:
        torch.cuda.empty_cache()


def warmed(loop: Loop, place: Place) -> Loop:
    """Return the loop after its first steps, in which kernels are chosen and compiled."""
    with loop.as_it_runs():
        for _ in range(1 if place.dry else _WARMUP_STEPS):
            loop.step()
        clock.synchronize(place.device)
    return loop


def report_rates(
    report: Report, place: Place, load: Load, mode: str, loops: dict[str, Loop]
) -> None:
    """Measure interleaved blocks of steps, and report images per second."""
    measures: dict[str, Callable[[], float]] = {}
    for name, loop in loops.items():
        with loop.as_it_runs():
            wanted = 0.0 if place.dry else _BLOCK_SECONDS
            steps = clock.steps_for(loop.step, place.device, wanted)

        def block(loop: Loop = loop, steps: int = steps) -> float:
            with loop.as_it_runs():
                return load.batch / clock.seconds(loop.step, place.device, steps)

        measures[name] = block
    repeats = 1 if place.dry else _REPEATS
    rates = clock.interleaved(measures, repeats, lambda: report.seconds_left > 0)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    rivals = [rate for name, rate in medians.items() if not name.startswith(OURS)]
    for name, values in rates.items():
        report.row(
            "images per second",
            precision=load.precision,
            mode=mode,
            batch=load.batch,
            loop=name,
            median=medians[name],
            least=min(values),
            most=max(values),
            against_the_best_of_the_others=medians[name] / max(rivals) if rivals else "",
            repeats=len(values),
        )


def goals(report: Report) -> None:
    """Compare the worst batch size of each precision and mode with the goal."""
    rows = report.content["tables"].get("images per second", [])
    for mode in ("eager", "compiled"):
        for precision in RIVAL_DTYPE:
            ratios = [
                row["against_the_best_of_the_others"]
                for row in rows
                if (row["mode"], row["precision"], row["loop"]) == (mode, precision, OURS)
                and row["against_the_best_of_the_others"] != ""
            ]
            if ratios:
                what = f"{precision}, {mode}: ours / the best other, least of {len(ratios)} batches"
                report.goal(what, min(ratios), least=1.0)


def trainer_never_waits(precision: str, place: Place) -> None:
    """Check that forward, backward, LARS, loss scaling, schedule and meters never wait."""
    need_cuda(place.device)
    from benchmarks.gpu.lars_checks import host_syncs_fail

    loop = ours(Load(precision, 16), place)
    for _ in range(_WARMUP_STEPS):
        loop.step()
    torch.cuda.synchronize(place.device)
    with host_syncs_fail():
        for _ in range(4):
            loop.step()
    torch.cuda.synchronize(place.device)
    values, images = loop.meter.read(loop.trainer.job)
    assert images == 16 * (_WARMUP_STEPS + 4), f"{images} images were seen"
    assert math.isfinite(values["loss"]), values
