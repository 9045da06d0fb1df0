"""What a run leaves and shows when it ends: results, where the time went, and what to do next.

The same facts are in ``summary.json`` of a run that finished, and in ``ending.json`` of one that
was stopped or diverged.
"""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ....amp import Precision, full_precision_state_dict
from ....pipeline import (
    INPUT_BOUND,
    DataError,
    Loader,
    measure_input_times,
    stall_advice,
)
from ...errors import StorageError
from ...files import write_text
from ...models.batch_norm import statistics_images
from ...models.build import is_of_timm
from ...ranks import Job
from ...report.picture import write_picture
from ...schema.load import RECIPE, dump, override
from ...words import duration, rate
from ..callbacks import RunContext, Status
from ..folder.checkpoint import latest, step_of
from ..folder.ending import processor, versions
from ..folder.names import CHECKPOINTS, CLASSES, SUMMARY, WEIGHTS, WEIGHTS_EMA
from ..folder.outcome import Metrics, column, first_at, metrics_of, results_of
from ..folder.place import writing
from ..folder.saving import said_newest
from ..folder.weights import write_weights
from ..watch.clocks import PARTS, PHASES, RunClock


def end_early(
    run: RunContext, clock: RunClock, status: Status, step: int, by_signal: int, why: str
) -> dict[str, Any]:
    """Show the end of a run that was stopped or diverged, and return its facts; else nothing."""
    if not run.job.is_main or status not in ("stopped", "diverged"):
        return {}
    facts = ending_facts(status, run, clock, step)
    if by_signal:
        run.warn(f"stopped by a signal at step {step:,}; resume=true continues from there")
    elif status == "stopped":
        run.warn(f"stopped at step {step:,}: {why or 'a callback of another rank asked for it'}")
    say(run, status, facts, {"run folder": run.run_dir})
    return facts


# --- the files ------------------------------------------------------------------------------


def write_recipe(run: RunContext, notices: Iterable[str]) -> None:
    """Write ``recipe.yaml`` with every key, and make the folder."""
    head = "".join(f"# {line}\n" for line in (f"The recipe {run.name} as it ran.", *notices))
    with writing(run.run_dir):
        write_text(run.run_dir / RECIPE, head + dump(run.recipe))


def write_results(
    run: RunContext,
    precision: Precision,
    average: dict[str, Tensor] | None,
    skipped_images: int,
    clock: RunClock,
) -> dict[str, Any]:
    """Write weights in FP32, report and summary of a run that has finished, and show its end."""
    loader = run.loader
    with _storage_errors(run.run_dir):
        write_weights(run.run_dir / WEIGHTS, full_precision_state_dict(run.model, run.optimizer))
        if average:
            write_weights(run.run_dir / WEIGHTS_EMA, average)
        report = write_picture(run.run_dir, title=f"{run.name}, seed {run.recipe.seed}")
        classes = "".join(f"{name}\n" for name in loader.source.classes)
        write_text(run.run_dir / CLASSES, classes)
        summary = {
            "recipe": run.name,
            "seed": run.recipe.seed,
            "batch_size": loader.phase.batch_size,
            "micro_batch_size": loader.micro_batch_size,
            "batch_norm_images": statistics_images(
                *(run.recipe, run.model, loader.timeline.phases[0].micro_batch_size),
                run.job.world_size,
            ),
            "world_size": run.job.world_size,
            "device": run.job.device.type,
            "precision": precision.name,
            "backend": loader.backend,
            "skipped_images": skipped_images,
            "train_images": len(loader.source),
            "val_images": len(run.val_loader.source) if run.val_loader else 0,
            "machine": {"processor": processor(), "python": platform.python_version()},
            "versions": versions(),
        }
        summary |= ending_facts("finished", run, clock)
        summary["input_advice"] = input_advice(summary, loader, run.job)
        write_text(run.run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
        say(run, "finished", summary, {"run folder": run.run_dir, "report": report})
        return summary


def input_advice(summary: dict[str, Any], loader: Loader, job: Job) -> list[str]:
    """Return advice on the input of a finished run; empty if it hardly waited for its data."""
    wait_share = summary.get("steady_wait_share", 0.0)
    if wait_share < INPUT_BOUND or loader.backend == "synthetic":
        return []
    try:
        times = measure_input_times(loader)
    except DataError as error:  # the run has succeeded all the same
        return [f"the stages of the input could not be timed: {error}"]
    images_per_second = summary["images_per_second"] / max(1 - summary["wait_share"], 0.01)
    return stall_advice(
        times,
        images_per_second=images_per_second * (1 - wait_share) / job.world_size,
        wait_share=wait_share,
        backend=loader.backend,
        threads=loader.threads,
        cores=loader.cores,
        on_gpu=job.device.type == "cuda",
        auto_augment=loader.transform.auto_augment,
    )


@contextmanager
def _storage_errors(run_dir: Path) -> Iterator[None]:
    """Context manager that raises a StorageError for an OSError, and says how to go on."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"run_dir: the results cannot be written: {error.filename or run_dir}: "
            f"{error.strerror}; {said_newest(run_dir)}; make room, and run the same command with "
            "resume=true to write them"
        ) from error


# --- what is known of an end ----------------------------------------------------------------


def ending_facts(
    status: Status, run: RunContext, clock: RunClock, step: int | None = None
) -> dict[str, Any]:
    """Return what the files of a run hold of its end, after ``step`` or as its metrics tell."""
    metrics = metrics_of(run.run_dir)
    made = run.step if step is None else step
    place: dict[str, Any] = {"step": made, "epoch": run.timeline.epoch(made)}
    facts = results_of(metrics)
    facts = {**place, **facts} if step is None else {**facts, **place}
    if status == "stopped":
        newest = latest(run.run_dir / CHECKPOINTS)
        facts["checkpoint_step"] = step_of(newest) if newest else None
    facts |= {
        "total_steps": run.timeline.total_steps,
        "target": _target(run.recipe.target_accuracy, metrics),
        "from_step": run.step,
        **clock.facts(),
    }
    return {**facts, "next": next_commands(status, run, facts)}


def _target(accuracy: float | None, metrics: Metrics) -> dict[str, Any] | None:
    """When a top-1 accuracy was first reached, by the time of training and evaluation."""
    hit = None if accuracy is None else first_at(metrics.val, accuracy)
    if hit is None:
        return None
    # The reading of the same steps may be written after the evaluation.
    until = [line for line in (*metrics.train, *metrics.val) if line["step"] <= hit["step"]]
    place = {name: hit[name] for name in ("top1", "step", "epoch")}
    return {"accuracy": accuracy, **place, "seconds": round(sum(column(until, "seconds")), 2)}


# --- the lines ------------------------------------------------------------------------------


def say(run: RunContext, status: Status, facts: dict[str, Any], files: Mapping[str, Path]) -> None:
    """Show how a run ended, and where some files are; lines fit 100 columns where paths allow."""
    place = f"at step {facts['step']:,} of {facts['total_steps']:,}, epoch {facts['epoch']:.1f}"
    how: str = status
    if status == "finished" and facts["step"] < facts["total_steps"]:
        how = "reached its target" if facts["target"] else "stopped by stop_after"
    run.say(f"{run.name}, seed {run.recipe.seed}: {how} {place}")
    for name, text in _reached(facts, run.recipe.target_accuracy):
        run.say(f"  {name:17}{text}")
    for label, seconds in _where_the_time_went(facts):
        share = 100 * seconds / (facts["time_spent"]["total"] or 1)
        run.say(f"{label:28}{duration(seconds):>10}  {share:5.1f} %")
    stages, *hints = facts.get("input_advice") or [""]
    if stages:
        run.say("\n  suggestion: ".join([f"training waited for data: {stages}", *hints]))
    for name, path in files.items():
        run.say(f"{name + ':':12}{path}")
    if facts["next"]:
        run.say("\n  ".join(["next:", *facts["next"]]))


def _reached(facts: dict[str, Any], target: float | None) -> Iterable[tuple[str, str]]:
    """Labels and texts of what a run reached."""
    saved = facts.get("checkpoint_step", facts["step"])
    if saved != facts["step"]:
        resumes = "none yet" if saved is None else f"of step {saved:,}, from which the run resumes"
        yield "checkpoint", resumes
    if facts.get("top1") is not None:
        step = facts["evaluated_step"]
        at = "" if step == facts["step"] else f" at step {step:,}"
        best = f"best {facts['best_top1']:.2f} % at epoch {facts['best_epoch']:.1f}"
        top5 = "" if facts.get("top5") is None else f", top-5 {facts['top5']:.2f} %"
        yield "top-1", f"{facts['top1']:.2f} %{at} ({best}){top5}"
    if facts.get("ema_top1") is not None:
        yield "EMA top-1", f"{facts['ema_top1']:.2f} %"
    if target is not None:
        when = "not reached"
        if hit := facts["target"]:
            took = f"{duration(hit['seconds'])} of training and evaluation"
            when = f"reached at step {hit['step']:,}, epoch {hit['epoch']:.1f}, after {took}"
        yield "target", f"{target:g} % {when}"
    if "train_seconds" in facts:
        speed, seconds = facts["images_per_second"], duration(facts["train_seconds"])
        yield "throughput", f"{rate(speed)} images/s in {seconds} of training"
    if facts.get("skipped_images"):
        yield "images skipped", f"{facts['skipped_images']:,}"


def _where_the_time_went(facts: dict[str, Any]) -> Iterable[tuple[str, float]]:
    """Label and seconds of each part of the wall time, and of training where known."""
    spent, phases = facts["time_spent"], facts["training_time"]
    since = f" since step {facts['from_step']:,}" if facts["from_step"] else ""
    yield f"where the time went{since}", spent["total"]
    for part in (part for part in PARTS if spent[part]):
        yield f"  {part.replace('_', '-')}", spent[part]
        if part == "training" and phases:
            for phase in (phase for phase in PHASES if phase in phases):
                yield f"    {PHASES[phase]}", phases[phase]
            yield "    rest of training", max(0.0, spent[part] - sum(phases.values()))


# --- the commands to go on with -------------------------------------------------------------


def next_commands(status: Status, run: RunContext, facts: Mapping[str, Any]) -> list[str]:
    """Return at most two commands to go on with, the more useful one first."""
    folder, job = str(run.run_dir), run.job
    report = shlex.join(["largebatch", "report", folder])
    if status == "stopped":
        return [*(resume_commands(run) if facts["checkpoint_step"] is not None else []), report]
    if status == "diverged":  # find a rate at which it trains
        one_machine = 1 < job.world_size == job.local_world_size
        processes = ["--nproc", str(job.world_size)] if one_machine else []
        search = ["largebatch", "tune", "lr", f"{folder}/{RECIPE}", *processes]
        return [report, shlex.join(search)]
    top1, ema_top1 = facts.get("top1"), facts.get("ema_top1")
    if not run.recipe.reached(top1) and facts["step"] < facts["total_steps"]:
        return [report, *resume_commands(run, "stop_after=null")]
    form = "timm" if is_of_timm(run.recipe.model.name) else "safetensors"
    export = ["largebatch", "export", folder, "--to", form, "--out", f"{folder}/export"]
    is_ema_better = top1 is not None and ema_top1 is not None and ema_top1 > top1
    return [report, shlex.join([*export, *(["--ema"] if is_ema_better else [])])]


def resume_commands(run: RunContext, *overrides: str) -> list[str]:
    """Return the command that continues a run from its newest checkpoint, on as many processes."""
    job, place = run.job, override("run_dir", str(run.run_dir))
    if job.world_size > job.local_world_size:
        return []
    processes = ["--nproc", str(job.world_size)] if job.world_size > 1 else []
    words = [str(run.run_dir / RECIPE), *overrides, place, *processes, "--resume"]
    return [shlex.join(["largebatch", "train", *words])]
