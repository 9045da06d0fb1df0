"""The tables of a report, as text for a page and as plain data for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..training.folder.outcome import short_reason
from .curves import not_recorded
from .groups import Group, differences, mixed
from .intervals import Estimate
from .lines import number
from .reached import (
    QUANTITIES,
    TO_TARGET,
    Quantity,
    Reached,
    quantities,
    reached,
    target_of,
)
from .run import Run
from .shares import whole

#: More groups than these are rows of the table of differences, fewer are columns.
_MOST_COLUMNS = 6

#: Quantities of the two tables of groups; the rest is in that of their runs.
_ACCURACY = ("top1", "best_top1", "ema_top1", "val_loss", "train_loss")
_TIMES = ("epochs", "train_seconds", "images_per_second", "wait_share")

NOTHING = "—"

_SPACE = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        title: What it shows.
        columns: Heading of each column, with its unit; the first is that of the row headings.
        rows: The cells of each row.
        words: Indices of the columns that hold words, and not numbers.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    words: frozenset[int] = frozenset({0})


def outcome(run: Run) -> str:
    """How a run ended or where it is, in words."""
    steps = f"{run.step:,}" + (f" of {run.last_step:,}" if run.last_step is not None else "")
    if run.status == "running":
        return f"still running, at step {steps}"
    words = {
        "finished": f"finished after {run.step:,} steps",
        "diverged": f"diverged at step {steps}",
        "stopped": f"stopped before its end, at step {steps}",
        "failed": f"failed at step {steps}",
    }
    reason = short_reason(run.reason)
    return words[run.status] + (f": {reason}" if reason else "")


def lead(run: Run) -> str:
    """What a run is and how it ended, in a line."""
    keys = run.keys
    what = [
        keys.get("model.name"),
        keys.get("optimizer.name"),
        f"global batch {keys['batch_size']:,}" if isinstance(keys.get("batch_size"), int) else None,
        outcome(run),
    ]
    return ", ".join(str(part) for part in what if part)


def summary(run: Run, target: float | None) -> list[tuple[str, str]]:
    """Return the summary of one run: label and value with its unit."""
    found, of = quantities(run, target), run.summary
    rows = [(q.title, _with_unit(found[q.key], q)) for q in QUANTITIES if q.key in found]
    rows += _time_spent(run)
    if target is not None:
        rows += [
            (f"{q.title}, {target:g} %", _with_unit(found[q.key], q))
            if q.key in found
            else (f"{q.title}, {target:g} %", "not reached")
            for q in TO_TARGET
        ]
    if skipped := number(of.get("skipped_images")):
        rows.append(("images skipped", f"{skipped:,}"))
    return [(_capital(label), value) for label, value in rows]


def setting(run: Run) -> list[tuple[str, str]]:
    """Return how a run was made: the main keys of its recipe, its machine and versions."""
    keys, of = run.keys, run.summary
    machine, versions = (_section(of, name) for name in ("machine", "versions"))
    optimizer = f"{keys.get('optimizer.name')}, learning rate {keys.get('optimizer.lr')}"
    rows = [
        ("Recipe", run.recipe_name),
        ("Folder", str(run.folder)),
        ("Model", keys.get("model.name")),
        ("Optimizer", optimizer if "optimizer.name" in keys else None),
        ("Warm-up", keys.get("schedule.warmup")),
        ("Global batch", _images(keys.get("batch_size"))),
        ("Micro-batch", _images(of.get("micro_batch_size", keys.get("micro_batch_size")))),
        ("Images per batch norm", of.get("batch_norm_images")),
        ("Ranks", of.get("world_size")),
        ("Device", of.get("device")),
        ("Precision", of.get("precision", keys.get("precision"))),
        ("Decoder", of.get("backend")),
        ("Seed", run.seed),
        ("Processor", machine.get("processor")),
        ("Python", machine.get("python")),
        *versions.items(),
    ]
    return [(label, str(value)) for label, value in rows if value not in (None, "")]


def _section(of: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of a summary; empty where it is missing or none."""
    section = of.get(name)
    return section if isinstance(section, dict) else {}


def accuracy_table(found: Sequence[Reached]) -> Table:
    """Accuracy and loss that each group reached, with intervals over its seeds."""
    shown = _recorded(_ACCURACY, found)
    rows = [[row.group.name, _seeds(row), *_estimates(row, shown)] for row in found]
    columns = ["run", "seeds", *(_heading(q) for q in shown)]
    if any(row.top1_difference for row in found):
        at = 2 + any(q.key == "top1" for q in shown)
        columns.insert(at, "top-1 against the first")
        for row, cells in zip(found, rows, strict=True):
            cells.insert(at, _difference(row.top1_difference) if row is not found[0] else "")
    return Table("Accuracy and loss", columns, rows)


def time_table(found: Sequence[Reached]) -> Table:
    """Epochs and times of each group, and those to the target, with intervals over its seeds."""
    shown = _recorded(_TIMES, found)
    columns = ["run", *(_heading(q) for q in shown)]
    rows = [[row.group.name, *_estimates(row, shown)] for row in found]
    targets = {row.target for row in found} - {None}
    if targets:
        one = f", {targets.pop():g} %" if len(targets) == 1 else ""
        columns += [f"reached the target{one}", *(_heading(q) for q in TO_TARGET)]
        for row, cells in zip(found, rows, strict=True):
            cells += [_hits(row, say=not one), *_estimates(row, TO_TARGET)]
    return Table("Time", columns, rows)


def runs_table(found: Sequence[Group], target: float | None) -> Table:
    """What each run reached so far."""
    every = [
        (name, run, quantities(run, target_of(run, target)))
        for group in found
        for name, run in group.runs.items()
    ]
    shown = [q for q in (*QUANTITIES, *TO_TARGET) if any(q.key in each for _, _, each in every)]
    rows = [
        [name, str(run.seed if run.seed is not None else NOTHING), _status(run)]
        + [_plain(each.get(q.key), q) for q in shown]
        for name, run, each in every
    ]
    columns = ["run", "seed", "status", *(_heading(q) for q in shown)]
    return Table("Each run", columns, rows, words=frozenset({0, 2}))


def difference_table(found: Sequence[Group]) -> Table | None:
    """What the recipes of the groups differ in; None if there is nothing."""
    rows, names = differences(found), [group.name for group in found]
    if not rows:
        return None
    cells = [[row.key, *row.values] for row in rows]
    if len(names) <= _MOST_COLUMNS:
        return _of_words(["key", *names], cells)
    turned = [[name, *(row.values[i] for row in rows)] for i, name in enumerate(names)]
    return _of_words(["run", *(row.key for row in rows)], turned)


def notes(found: Sequence[Group]) -> list[str]:
    """Return what a reader has to know about the runs, a sentence each."""
    runs = {name: run for group in found for name, run in group.runs.items()}
    told = [
        note if len(runs) == 1 else f"{name}: {note}"
        for name, run in runs.items()
        for note in run.notes
    ]
    return told + [line for group in found for line in mixed(group)]


def as_data(
    found: Sequence[Group], target: float | None, left_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the tables as plain data: numbers in the units that the names of keys tell.

    Args:
        found: The runs, grouped.
        target: Top-1 in percent to tell the way to; None: the recipes' own.
        left_out: A note about each run that is not shown.
    """
    rows = reached(found, target)
    return {
        "runs": [
            {
                "run": name,
                "folder": str(run.folder),
                "group": group.name,
                "recipe": run.recipe_name,
                "seed": run.seed,
                "status": run.status,
                "reason": run.reason,
                "step": run.step,
                "last_step": run.last_step,
                **quantities(run, target_of(run, target)),
                "training_time_percent": _time_percent(run),
                "training_time_readings": shares.readings if (shares := whole(run)) else 0,
                "readings": len(run.train),
                "wall_time_seconds": run.time_spent or None,
                "notes": list(run.notes),
            }
            for group in found
            for name, run in group.runs.items()
        ],
        "groups": [
            {
                "group": row.group.name,
                "runs": list(row.group.runs),
                "finished": list(row.finished),
                "unfinished": row.unfinished,
                **{key: asdict(estimate) for key, estimate in row.estimates.items()},
                "top1_difference": row.top1_difference and asdict(row.top1_difference),
                "target": row.target,
                "reached_target": row.hits if row.target is not None else None,
            }
            for row in rows
        ],
        "differences": [
            {"key": row.key, "values": dict(zip([g.name for g in found], row.values, strict=True))}
            for row in differences(found)
        ],
        "notes": [*left_out, *notes(found)],
        "not_recorded": not_recorded([run for group in found for run in group.runs.values()]),
    }


def _time_percent(run: Run) -> dict[str, float] | None:
    """The shares of the training time by part, such as ``forward``."""
    found = whole(run)
    if found is None:
        return None
    return {key.removesuffix("_seconds"): n for key, n in found.percent.items()}


def _time_spent(run: Run) -> list[tuple[str, str]]:
    """Where the wall time of a run went, if that is known."""
    total = sum(run.time_spent.values())
    if not total:
        return []
    since = f" since step {run.from_step:,}" if run.from_step else ""
    parts = [
        (
            f"wall time, {part.replace('_', '-')}",
            f"{seconds:,.1f}{_SPACE}s, {100 * seconds / total:.1f}{_SPACE}%",
        )
        for part, seconds in run.time_spent.items()
        if seconds
    ]
    return [(f"wall time{since}", f"{total:,.1f}{_SPACE}s"), *parts]


def _of_words(columns: list[str], rows: list[list[str]]) -> Table:
    return Table("What differs", columns, rows, words=frozenset(range(len(columns))))


def _recorded(keys: Sequence[str], found: Sequence[Reached]) -> list[Quantity]:
    """The quantities of some keys that a group has."""
    return [q for q in QUANTITIES if q.key in keys and any(q.key in r.estimates for r in found)]


def _estimates(row: Reached, shown: Sequence[Quantity]) -> list[str]:
    return [_estimate(row.estimates.get(q.key), q) for q in shown]


def _heading(quantity: Quantity) -> str:
    return quantity.title + (f",{_SPACE}{quantity.unit}" if quantity.unit else "")


def _plain(value: float | None, quantity: Quantity) -> str:
    if value is None:
        return NOTHING
    # A loss that has grown out of bounds is told by its magnitude.
    return (
        f"{value:.3g}" if quantity.digits and abs(value) >= 1e6 else f"{value:,.{quantity.digits}f}"
    )


def _with_unit(value: float, quantity: Quantity) -> str:
    return _plain(value, quantity) + (_SPACE + quantity.unit if quantity.unit else "")


def _estimate(estimate: Estimate | None, quantity: Quantity) -> str:
    if estimate is None:
        return NOTHING
    text = _plain(estimate.mean, quantity)
    if not estimate.half:  # one seed, or values that are equal
        return text
    return f"{text} ± {estimate.half:,.{quantity.digits}f}"


def _difference(estimate: Estimate | None) -> str:
    if estimate is None:
        return NOTHING
    text = f"{estimate.mean:+.2f}".replace("-", "\N{MINUS SIGN}")
    if estimate.half is None:
        return f"{text}, one seed"
    return f"{text} ± {estimate.half:.2f}" + ("" if estimate.is_resolved else ", unresolved")


def _seeds(row: Reached) -> str:
    """Number of runs that the estimates are of, and of those that they are not of."""
    others = ", ".join(f"{count} {status}" for status, count in row.unfinished.items())
    return f"{len(row.finished)} ({others})" if others else str(len(row.finished))


def _hits(row: Reached, say: bool) -> str:
    if row.target is None:
        return NOTHING
    return f"{row.hits} of {len(row.finished)}" + (f" ({row.target:g} %)" if say else "")


def _status(run: Run) -> str:
    if run.status == "finished":
        return run.status
    of = f" of {run.last_step:,}" if run.last_step is not None else ""
    return f"{run.status} at {run.step:,}{of}"


def _images(count: Any) -> str | None:
    return None if count is None else f"{count:,} images" if isinstance(count, int) else str(count)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
