"""What runs and groups of runs reached: accuracy, loss, time, and the way to a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..training.folder.outcome import best, column, first_at, images_in
from .groups import Group
from .intervals import Estimate, difference, mean
from .lines import Line, number
from .run import Run


@dataclass(frozen=True)
class Quantity:
    """A quantity that a run reaches.

    Attributes:
        key: Its name in JSON.
        title: Heading.
        unit: Unit; empty for a plain number.
        digits: Decimals to show.
    """

    key: str
    title: str
    unit: str
    digits: int


QUANTITIES = (
    Quantity("top1", "last top-1", "%", 2),
    Quantity("best_top1", "best top-1", "%", 2),
    Quantity("top5", "last top-5", "%", 2),
    Quantity("ema_top1", "top-1 of EMA", "%", 2),
    Quantity("val_loss", "validation loss", "", 4),
    Quantity("train_loss", "training loss", "", 4),
    Quantity("epochs", "epochs", "", 2),
    Quantity("steps", "steps", "", 0),
    Quantity("train_seconds", "training time", "s", 1),
    Quantity("evaluate_seconds", "evaluation time", "s", 1),
    Quantity("images_per_second", "throughput", "images/s", 1),
    Quantity("wait_share", "share of time waiting for input, slowest rank", "%", 1),
)
TO_TARGET = (
    Quantity("target_epochs", "epochs to target", "", 2),
    Quantity("target_seconds", "training time to target", "s", 1),
)


@dataclass(frozen=True)
class Reached:
    """What a group of runs reached.

    Attributes:
        group: The group.
        finished: Runs that finished, one per seed, which the estimates are of; by name.
        unfinished: Number of the other runs by status.
        estimates: Estimate of each quantity that all of ``finished`` have, by key.
        top1_difference: Last top-1 minus that of the first group; None for the first group,
            and where one of the two has no finished run.
        target: Top-1 in percent that the times to target are of; None without one.
        hits: Number of ``finished`` that reached it.
    """

    group: Group
    finished: dict[str, Run]
    unfinished: dict[str, int]
    estimates: dict[str, Estimate]
    top1_difference: Estimate | None
    target: float | None
    hits: int


def quantities(run: Run, target: float | None) -> dict[str, float]:
    """Return what one run has reached so far, by key; without what it has not recorded.

    Args:
        run: The run.
        target: Top-1 in percent; the epochs and the training time to it are those of the first
            evaluation that reached it.
    """
    found: dict[str, float | None] = {"epochs": run.epoch, "steps": run.step}
    if run.val:
        last, best_line = run.val[-1], best(run.val)
        found |= {
            "top1": number(last.get("top1")),
            "best_top1": best_line["top1"] if best_line else None,
            "top5": number(last.get("top5")),
            "ema_top1": number(last.get("ema_top1")),
            "val_loss": number(last.get("loss")),
            "evaluate_seconds": sum(column(run.val, "seconds")),
        }
    if run.train:
        seconds = run.positions.seconds
        found |= {"train_loss": number(run.train[-1].get("loss")), "train_seconds": seconds}
        images = images_in(run.train)
        if seconds and images:
            found["images_per_second"] = images / seconds
            found["wait_share"] = 100 * sum(column(run.train, "wait_seconds")) / seconds
    hit = first_hit(run, target)
    if hit is not None:
        found["target_epochs"] = hit["epoch"]
        if times := run.positions.at([hit["step"]])["seconds"]:
            found["target_seconds"] = times[0]
    return {key: value for key, value in found.items() if value is not None}


def first_hit(run: Run, target: float | None) -> Line | None:
    """Return the first evaluation of a run that reached a top-1 accuracy in percent."""
    return None if target is None else first_at(run.val, target)


def target_of(run: Run, target: float | None) -> float | None:
    """The top-1 in percent to measure the way to: ``target``, or the recipe's own if it is None."""
    return number(run.keys.get("target_accuracy")) if target is None else target


def reached(found: Sequence[Group], target: float | None = None) -> list[Reached]:
    """Return what each group reached, over the seeds of its runs that finished.

    Args:
        found: The groups.
        target: Top-1 in percent; None: that of each recipe, ``target_accuracy``.
    """
    rows: list[Reached] = []
    for group in found:
        finished = _one_per_seed(group)
        others = [run.status for run in group.runs.values() if run.status != "finished"]
        first = next(iter(group.runs.values()))
        of = target_of(first, target)
        values = [quantities(run, of) for run in finished.values()]
        keys = [quantity.key for quantity in (*QUANTITIES, *TO_TARGET)]
        estimates = {
            key: mean([each[key] for each in values])
            for key in keys
            if values and all(key in each for each in values)
        }
        against = None
        if rows and "top1" in estimates and "top1" in rows[0].estimates:
            base = [quantities(run, None)["top1"] for run in rows[0].finished.values()]
            against = difference([each["top1"] for each in values], base)
        rows.append(
            Reached(
                group=group,
                finished=finished,
                unfinished={status: others.count(status) for status in dict.fromkeys(others)},
                estimates=estimates,
                top1_difference=against,
                target=of,
                hits=sum(first_hit(run, of) is not None for run in finished.values()),
            )
        )
    return rows


def _one_per_seed(group: Group) -> dict[str, Run]:
    """The finished runs of a group; the first of each seed, as equal seeds are no new sample."""
    found: dict[str, Run] = {}
    for name, run in group.runs.items():
        same = any(run.seed is not None and run.seed == other.seed for other in found.values())
        if run.status == "finished" and not same:
            found[name] = run
    return found
