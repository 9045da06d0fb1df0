"""What a run leaves and shows when it ends: results, where the time went, and what to do next.

The same facts are in ``summary.json`` of a run that finished, and in ``ending.json`` of one that
was stopped or diverged.
"""

from __future__ import annotations

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
from ..folder.checkpoint import CHECKPOINTS, latest
from ..folder.ending import summarise, write_summary
from ..folder.names import CLASSES
from ..folder.outcome import Metrics, best, column, first_at, metrics_of
from ..folder.place import writing
from ..folder.saving import said_newest
from ..folder.weights import WEIGHTS, WEIGHTS_EMA, write_weights
from ..watch.clocks import PARTS, PHASES, RunClock

#: What the parts of the wall time and of training are called.
_NAMES = {
    "training": "training",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "start_up": "start-up",
    "rest": "rest",
    "input_seconds": "waiting for data",
    "copy_seconds": "copying to the device",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "all_reduce_seconds": "all-reduce wait",
    "optimizer_seconds": "optimizer",
}
_LABEL = 17  # width of the labels of what was reached
_TIME_LABEL = 28  # and of those of times


def end_early(
    run: RunContext, clock: RunClock, status: Status, step: int, by_signal: int, why: str
) -> dict[str, Any]:
    """Show the end of a run that was stopped or diverged, and return its facts; else nothing.

    Args:
        run: The run.
        clock: Measures where its time goes.
        status: How it ended.
        step: Steps made.
        by_signal: Number of the signal that stopped it; 0: none.
        why: Why a callback stopped it otherwise.
    """
    if not run.job.is_main or status not in ("stopped", "diverged"):
        return {}
    facts = ending_facts(status, run, clock, {"step": step})
    if by_signal:
        run.warn(f"stopped by a signal at step {step:,}; resume=true continues from there")
    elif status == "stopped":
        run.warn(f"stopped at step {step:,}: {why or 'a callback of another rank asked for it'}")
    say(run, status, facts, {"run folder": run.run_dir})
    return facts


# --- the files ------------------------------------------------------------------------------


def write_recipe(run: RunContext, notices: Iterable[str]) -> None:
    """Write ``recipe.yaml`` with every key, and make the folder.

    Raises:
        RecipeError: The folder cannot be made or written.
    """
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
    """Write weights in FP32, report and summary of a run that has finished, and show its end.

    Args:
        run: The run.
        precision: The precision that it was trained in.
        average: State dict of the moving average of the weights, if there is one.
        skipped_images: Number of images that could not be used.
        clock: Measures where its time goes.

    Returns:
        The summary.

    Raises:
        StorageError: A file cannot be written.
    """
    with _storage_errors(run.run_dir):
        write_weights(run.run_dir / WEIGHTS, full_precision_state_dict(run.model, run.optimizer))
        if average:
            write_weights(run.run_dir / WEIGHTS_EMA, average)
        report = write_picture(run.run_dir, title=f"{run.name}, seed {run.recipe.seed}")
        classes = "".join(f"{name}\n" for name in run.loader.source.classes)
        write_text(run.run_dir / CLASSES, classes)
        loader = run.loader
        about = {
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
            "total_steps": run.timeline.total_steps,
            "skipped_images": skipped_images,
            "train_images": len(loader.source),
            "val_images": len(run.val_loader.source) if run.val_loader else 0,
        }
        summary = summarise(run.run_dir, about)
        summary["input_advice"] = input_advice(summary, loader, run.job)
        summary = ending_facts("finished", run, clock, summary)
        write_summary(run.run_dir, summary)
        say(run, "finished", summary, {"run folder": run.run_dir, "report": report})
        return summary


def input_advice(summary: dict[str, Any], loader: Loader, job: Job) -> list[str]:
    """Return advice on the input of a finished run; empty if it hardly waited for its data.

    The first step's wait, in which the input starts up, does not count: a longer run would not
    repeat it. Times the stages of the input on some images of the run, for a few seconds.

    Args:
        summary: Summary of the run.
        loader: Loader of the training images.
        job: The ranks.

    Returns:
        The times of the stages in one line, and remedies.
    """
    wait_share = summary["steady_wait_share"]
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
    status: Status, run: RunContext, clock: RunClock, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the files of a run hold of its end.

    Args:
        status: How the run ends.
        run: The run.
        clock: Its clock.
        known: The summary, whose values are kept; of a run that has not finished, ``step``.

    Returns:
        ``step``, ``total_steps`` and ``epoch``; ``checkpoint_step`` of a run that was stopped, the
        step of its newest checkpoint, or None; ``evaluated_step``, of the last evaluation, or None;
        ``top1``, ``best_top1`` and ``best_epoch`` if it was evaluated; ``target`` with the step,
        the epoch and the time at which ``target_accuracy`` was reached, or None;
        ``from_step``, at which this process began; ``time_spent`` and ``training_time`` of this
        process, in seconds; and ``next``, the commands to go on with.
    """
    facts: dict[str, Any] = {
        "step": known["step"],
        "total_steps": run.timeline.total_steps,
        "epoch": run.timeline.epoch(known["step"]),
        "evaluated_step": None,
    }
    if status == "stopped":
        newest = latest(run.run_dir / CHECKPOINTS)
        facts["checkpoint_step"] = int(newest.name.removeprefix("step-")) if newest else None
    metrics = metrics_of(run.run_dir)
    if best_line := best(metrics.val):
        facts |= {"top1": metrics.val[-1].get("top1"), "evaluated_step": metrics.val[-1]["step"]}
        facts |= {"best_top1": best_line["top1"], "best_epoch": best_line["epoch"]}
    facts |= {
        **known,
        "target": _target(run.recipe.target_accuracy, metrics),
        "from_step": run.step,
        **clock.facts(),
    }
    return {**facts, "next": next_commands(status, run, facts)}


def _target(accuracy: float | None, metrics: Metrics) -> dict[str, Any] | None:
    """When a top-1 accuracy in percent was first reached, by the time of training and evaluation.

    None without a target, and while it is not reached.
    """
    hit = None if accuracy is None else first_at(metrics.val, accuracy)
    if hit is None:
        return None
    # The reading of the same steps may be written after the evaluation.
    until = [line for line in (*metrics.train, *metrics.val) if line["step"] <= hit["step"]]
    place = {name: hit[name] for name in ("top1", "step", "epoch")}
    return {"accuracy": accuracy, **place, "seconds": round(sum(column(until, "seconds")), 2)}


# --- the lines ------------------------------------------------------------------------------


def say(run: RunContext, status: Status, facts: dict[str, Any], files: Mapping[str, Path]) -> None:
    """Show how a run ended; each line fits 100 columns where paths allow.

    Args:
        run: The run.
        status: How it ended.
        facts: Of :func:`ending_facts`.
        files: What else to name, by label.
    """
    place = f"at step {facts['step']:,} of {facts['total_steps']:,}, epoch {facts['epoch']:.1f}"
    run.say(f"{run.name}, seed {run.recipe.seed}: {status} {place}")
    for name, text in _reached(facts, run.recipe.target_accuracy):
        run.say(f"  {name:{_LABEL}}{text}")
    for line in _where_the_time_went(facts):
        run.say(line)
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
    if saved is None:
        yield "checkpoint", "none yet"
    elif saved != facts["step"]:
        yield "checkpoint", f"of step {saved:,}, from which the run resumes"
    if "top1" in facts:
        step = facts["evaluated_step"]
        at = "" if step == facts["step"] else f" at step {step:,}"
        best = f"best {facts['best_top1']:.2f} % at epoch {facts['best_epoch']:.1f}"
        top5 = f", top-5 {facts['top5']:.2f} %" if "top5" in facts else ""
        yield "top-1", f"{facts['top1']:.2f} %{at} ({best}){top5}"
    if "ema_top1" in facts:
        yield "EMA top-1", f"{facts['ema_top1']:.2f} %"
    if target is not None:
        when = "not reached"
        if hit := facts["target"]:
            when = (
                f"reached at step {hit['step']:,}, epoch {hit['epoch']:.1f}, after "
                f"{duration(hit['seconds'])} of training and evaluation"
            )
        yield "target", f"{target:g} % {when}"
    if "images_per_second" in facts:
        speed, seconds = facts["images_per_second"], duration(facts["train_seconds"])
        yield "throughput", f"{rate(speed)} images/s in {seconds} of training"
    if facts.get("skipped_images"):
        yield "images skipped", f"{facts['skipped_images']:,}"


def _where_the_time_went(facts: dict[str, Any]) -> Iterable[str]:
    """A line for each part of the wall time, and for each part of training that is known."""
    spent, phases = facts["time_spent"], facts["training_time"]
    total = spent["total"]

    def line(label: str, seconds: float, more: str = "") -> str:
        share = 100 * seconds / total if total else 0.0
        return f"{label:{_TIME_LABEL}}{duration(seconds):>10}  {share:5.1f} %{more}"

    since = f" since step {facts['from_step']:,}" if facts["from_step"] else ""
    yield f"{f'where the time went{since}':{_TIME_LABEL}}{duration(total):>10}  100.0 %"
    for part in (part for part in PARTS if spent[part]):
        yield line(f"  {_NAMES[part]}", spent[part])
        if part == "training" and phases:
            for phase in (phase for phase in PHASES if phase in phases):
                first = facts["first_wait_seconds"] if phase == "input_seconds" else 0.0
                more = f", {duration(first)} of it before the first step" if first else ""
                yield line(f"    {_NAMES[phase]}", phases[phase], more)
            yield line("    rest of training", max(0.0, spent[part] - sum(phases.values())))


# --- the commands to go on with -------------------------------------------------------------


def next_commands(status: Status, run: RunContext, facts: Mapping[str, Any]) -> list[str]:
    """Return at most two commands to go on with, the more useful one first.

    They are built from the recipe in the run's folder, which has every key with the overrides of
    the command line, so that none of them has to be typed again.

    Args:
        status: How the run ended; of one that failed otherwise, the error says what to do.
        run: The run.
        facts: Of :func:`ending_facts`; a run that was stopped cannot be resumed without
            ``checkpoint_step``.
    """
    folder, job = str(run.run_dir), run.job
    report = shlex.join(["largebatch", "report", folder, "--out", "report.html"])
    if status == "stopped":
        resumes = facts["checkpoint_step"] is not None
        return [*(resume_commands(run) if resumes else []), report]
    if status == "diverged":  # find a rate at which it trains
        one_machine = 1 < job.world_size == job.local_world_size
        processes = ["--nproc", str(job.world_size)] if one_machine else []
        search = ["largebatch", "tune", "lr", f"{folder}/{RECIPE}", *processes]
        return [report, shlex.join(search)]
    if status == "failed":
        return []
    if not run.recipe.reached(facts.get("top1")) and facts["step"] < facts["total_steps"]:
        return [report, *resume_commands(run, "stop_after=null")]
    form = "timm" if is_of_timm(run.recipe.model.name) else "safetensors"
    is_ema_better = facts.get("ema_top1", -1.0) > facts.get("top1", 101.0)
    names = ("export", *(f"export-{number}" for number in range(2, 1000)))
    free = next((name for name in names if not Path(name).exists()), names[0])
    export = ["largebatch", "export", folder, "--to", form, "--out", free]
    return [report, shlex.join([*export, *(["--ema"] if is_ema_better else [])])]


def resume_commands(run: RunContext, *overrides: str) -> list[str]:
    """Return the command that continues a run from its newest checkpoint, on as many processes.

    None on several machines, whose launcher has a command of its own, which continues the run with
    ``resume=true``.
    """
    job, place = run.job, override("run_dir", str(run.run_dir))
    if job.world_size > job.local_world_size:
        return []
    processes = ["--nproc", str(job.world_size)] if job.world_size > 1 else []
    words = [str(run.run_dir / RECIPE), *overrides, place, *processes, "--resume"]
    return [shlex.join(["largebatch", "train", *words])]
