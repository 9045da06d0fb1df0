"""What a run shows when it ends: what was reached, where the time went, and what to do next.

The same facts are in ``summary.json`` of a run that finished, and in ``ending.json`` of one that
was stopped or diverged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..schema.catalogue import promised_as_it_is
from .callbacks import RunContext, Status
from .folder.outcome import Metrics, best, column, first_at, metrics_of
from .next_commands import next_commands
from .run_clock import PARTS, PHASES, RunClock
from .saving import newest_of
from .wording import duration, rate

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


class Ending:
    """The end of a run, on rank 0.

    Args:
        began_seconds: How long ago the run began to start.

    Attributes:
        clock: Measures where the run's time goes; to be the last of its callbacks.
        facts: What ``ending.json`` holds of the end of a run that has not finished.
    """

    def __init__(self, began_seconds: float) -> None:
        self.clock = RunClock(began_seconds)
        self.facts: dict[str, Any] = {}

    def finished(self, run: RunContext, summary: dict[str, Any]) -> dict[str, Any]:
        """Return the summary of a run that has finished, with what :func:`ending_facts` adds."""
        return ending_facts("finished", run, self.clock, summary["step"], summary)

    def show(self, run: RunContext, summary: dict[str, Any], files: Mapping[str, Path]) -> None:
        """Show the end of a run that has finished.

        Args:
            run: The run.
            summary: Of :meth:`finished`.
            files: What else to name, by label.
        """
        _say(run, "finished", summary, files)

    def early(self, run: RunContext, status: Status, step: int, by_signal: int, why: str) -> None:
        """Show the end of a run that was stopped or diverged, and keep the facts; else nothing.

        Args:
            run: The run.
            status: How it ended.
            step: Steps made.
            by_signal: Number of the signal that stopped it; 0: none.
            why: Why a callback stopped it otherwise.
        """
        if not run.job.is_main or status not in ("stopped", "diverged"):
            return
        self.facts = ending_facts(status, run, self.clock, step)
        if by_signal:
            run.warn(f"stopped by a signal at step {step:,}; resume=true continues from there")
        elif status == "stopped":
            run.warn(
                f"stopped at step {step:,}: {why or 'a callback of another rank asked for it'}"
            )
        _say(run, status, self.facts, {"run folder": run.run_dir})


def ending_facts(
    status: Status,
    run: RunContext,
    clock: RunClock,
    step: int,
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what the files of a run hold of its end.

    Args:
        status: How the run ends.
        run: The run.
        clock: Its clock.
        step: Steps made.
        known: The summary, whose values are kept.

    Returns:
        ``step``, ``total_steps`` and ``epoch``; ``checkpoint_step`` of a run that was stopped, the
        step of its newest checkpoint, or None; ``top1``, ``best_top1`` and ``best_epoch`` if it was
        evaluated; ``target`` with the step, the epoch and the time at which ``target_accuracy`` was
        reached, or None; ``promised``, what the recipe's head comment says it reaches;
        ``from_step``, at which this process began; ``time_spent`` and ``training_time`` of this
        process, in seconds; and ``next``, the commands to go on with.
    """
    facts: dict[str, Any] = {"step": step, "total_steps": run.timeline.total_steps}
    facts["epoch"] = run.timeline.epoch(step)
    if status == "stopped":
        newest = newest_of(run.run_dir)
        facts["checkpoint_step"] = int(newest.name.removeprefix("step-")) if newest else None
    metrics = metrics_of(run.run_dir)
    if best_line := best(metrics.val):
        facts |= {"top1": metrics.val[-1].get("top1"), "evaluated_step": metrics.val[-1]["step"]}
        facts |= {"best_top1": best_line["top1"], "best_epoch": best_line["epoch"]}
    facts |= known or {}
    facts |= {
        "target": _target(run.recipe.target_accuracy, metrics),
        "promised": promised_as_it_is(run.name, run.recipe),
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
    seconds = sum(column(until, "seconds"))
    place = {name: hit[name] for name in ("top1", "step", "epoch")}
    return {"accuracy": accuracy, **place, "seconds": round(seconds, 2)}


def _say(run: RunContext, status: Status, facts: dict[str, Any], files: Mapping[str, Path]) -> None:
    place = f"at step {facts['step']:,} of {facts['total_steps']:,}, epoch {facts['epoch']:.1f}"
    run.say(f"{run.name}, seed {run.recipe.seed}: {status} {place}")
    for line in ending_lines(facts, files, run.recipe.target_accuracy):
        run.say(line)


def ending_lines(
    facts: dict[str, Any], files: Mapping[str, Path], target: float | None
) -> Iterable[str]:
    """Yield what a run shows below how it ended; each line fits 100 columns where paths allow.

    Args:
        facts: The summary of the run, or :func:`ending_facts` of one that has not finished.
        files: What else to name, by label.
        target: ``target_accuracy`` of the recipe.
    """
    yield from (f"  {name:{_LABEL}}{text}" for name, text in _reached(facts, target))
    yield from _where_the_time_went(facts)
    stages, *hints = facts.get("input_advice") or [""]
    if stages:
        yield f"training waited for data: {stages}"
        yield from (f"  suggestion: {hint}" for hint in hints)
    yield from (f"{name + ':':12}{path}" for name, path in files.items())
    if facts["next"]:
        several = any(command.startswith("torchrun") for command in facts["next"])
        yield "next" + (" (torchrun on each machine):" if several else ":")
        yield from (f"  {command}" for command in facts["next"])


def _reached(facts: dict[str, Any], target: float | None) -> Iterable[tuple[str, str]]:
    """Labels and texts of what a run reached."""
    if facts.get("checkpoint_step", facts["step"]) != facts["step"]:
        saved = facts["checkpoint_step"]
        found = "none yet" if saved is None else f"of step {saved:,}, from which the run resumes"
        yield "checkpoint", found
    if "top1" in facts:
        top5 = f", top-5 {facts['top5']:.2f} %" if "top5" in facts else ""
        at = (
            ""
            if facts["evaluated_step"] == facts["step"]
            else f" at step {facts['evaluated_step']:,}"
        )
        best = f"best {facts['best_top1']:.2f} % at epoch {facts['best_epoch']:.1f}"
        yield "top-1", f"{facts['top1']:.2f} %{at} ({best}){top5}"
    if "ema_top1" in facts:
        yield "EMA top-1", f"{facts['ema_top1']:.2f} %"
    if target is not None:
        hit = facts["target"]
        when = "not reached"
        if hit:
            when = (
                f"reached at step {hit['step']:,}, epoch {hit['epoch']:.1f}, after "
                f"{duration(hit['seconds'])} of training and evaluation"
            )
        yield "target", f"{target:g} % {when}"
    if facts.get("promised"):
        yield "the recipe says", facts["promised"]
    if "images_per_second" in facts:
        speed, seconds = facts["images_per_second"], duration(facts["train_seconds"])
        yield "throughput", f"{rate(speed)} images/s in {seconds} of training"
    if facts.get("skipped_images"):
        yield "images skipped", f"{facts['skipped_images']:,}"


def _where_the_time_went(facts: dict[str, Any]) -> Iterable[str]:
    """A line for each part of the wall time, and for each part of training that is known."""
    spent, phases = facts["time_spent"], facts["training_time"]
    total = spent["total"]

    def line(name: str, seconds: float, indent: int, more: str = "") -> str:
        share = 100 * seconds / total if total else 0.0
        label = f"{' ' * indent}{name}"
        return f"{label:{_TIME_LABEL}}{duration(seconds):>10}  {share:5.1f} %{more}"

    since = f" since step {facts['from_step']:,}" if facts["from_step"] else ""
    yield f"{f'where the time went{since}':{_TIME_LABEL}}{duration(total):>10}  100.0 %"
    for part in PARTS:
        if not spent[part]:
            continue
        yield line(_NAMES[part], spent[part], 2)
        if part == "training" and phases:
            for phase in PHASES:
                if phase in phases:
                    first = facts.get("first_wait_seconds", 0.0) * (phase == "input_seconds")
                    more = f", {duration(first)} of it before the first step" if first else ""
                    yield line(_NAMES[phase], phases[phase], 4, more)
            yield line("rest of training", max(0.0, spent[part] - sum(phases.values())), 4)
