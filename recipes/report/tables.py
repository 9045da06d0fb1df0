"""The tables of a report, as text for a page and as plain data for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..files import number
from .groups import Group, differences, notes
from .reached import QUANTITIES, Estimate, quantities, reached, target_of
from .run import Run
from .shares import recording, shares

#: More groups than these are rows of the table of differences, fewer are columns.
_MOST_COLUMNS = 6

#: Quantities of the two tables of groups; the rest is in that of their runs.
_ACCURACY = ("best_top1", "ema_top1", "val_loss", "train_loss")
_TIMES = ("epochs", "train_seconds", "images_per_second", "wait_share")
_TO_TARGET = ("target_epochs", "target_seconds")

NOTHING = "—"

_SPACE = "\N{NO-BREAK SPACE}"

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table of text: what it shows, its columns, the first of row headings, and the rows.

    ``words`` are the indices of the columns that hold words, and not numbers.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    words: frozenset[int] = frozenset({0})


def outcome(run: Run) -> str:
    """How a run ended or where it is, in words."""
    of = f"{run.step:,}" + (f" of {run.last_step:,}" if run.last_step is not None else "")
    words = {
        "running": f"still running, at step {of}",
        "finished": f"finished after {run.step:,} steps",
        "stopped": f"stopped before its end, at step {of}",
    }.get(run.status, f"{run.status} at step {of}")
    reason = run.reason if run.status != "running" else ""
    return words + (f": {reason}" if reason else "")


def summary(run: Run, target: float | None) -> Pairs:
    """Return the summary of one run: label and value with its unit."""
    found = quantities(run, target)
    rows = {}
    for key, quantity in QUANTITIES.items():
        of = f", {target:g} %" if key in _TO_TARGET and target is not None else ""
        if key in found:
            rows[quantity.title + of] = f"{_plain(found[key], key)}{_SPACE}{quantity.unit}".rstrip()
        elif of:
            rows[quantity.title + of] = "not reached"
    total = sum(run.time_spent.values())
    if total:
        since = f" since step {run.from_step:,}" if run.from_step else ""
        rows[f"wall time{since}"] = f"{total:,.1f}{_SPACE}s"
    for part, seconds in run.time_spent.items():
        if seconds:
            rows[f"wall time, {part.replace('_', '-')}"] = f"{100 * seconds / total:.1f}{_SPACE}%"
    if skipped := number(run.summary.get("skipped_images")):
        rows["images skipped"] = f"{skipped:,}"
    return [(label[:1].upper() + label[1:], value) for label, value in rows.items()]


def setting(run: Run) -> Pairs:
    """Return how a run was made: the main keys of its recipe, its machine and versions."""
    machine, versions = (
        section if isinstance(section := run.summary.get(name), dict) else {}
        for name in ("machine", "versions")
    )
    of = run.keys | run.summary | machine
    rows = {"Recipe": run.recipe_name, "Folder": run.folder}
    rows |= {label: of.get(key) for label, key in _SETTING.items()} | versions
    return [(label, str(value)) for label, value in rows.items() if value not in (None, "")]


_SETTING = {
    "Model": "model.name",
    "Optimizer": "optimizer.name",
    "Learning rate": "optimizer.lr",
    "Warm-up": "schedule.warmup",
    "Global batch": "batch_size",
    "Micro-batch": "micro_batch_size",
    "Images per batch norm": "batch_norm_images",
    "Ranks": "world_size",
    "Device": "device",
    "Precision": "precision",
    "Decoder": "backend",
    "Seed": "seed",
    "Processor": "processor",
    "Python": "python",
}


def group_tables(found: Sequence[Group], target: float | None) -> list[Table]:
    """What each group reached, with intervals over its seeds: accuracy and loss, and times."""
    rows = reached(found, target)

    def shown(*keys: str) -> dict[str, list[str]]:
        having = [key for key in keys if any(key in row.estimates for row in rows)]
        return {_heading(k): [_estimate(row.estimates.get(k), k) for row in rows] for k in having}

    others = [", ".join(f"{n} {status}" for status, n in row.unfinished.items()) for row in rows]
    seeds = [
        f"{r.finished}" + (f" ({of})" if of else "") for r, of in zip(rows, others, strict=True)
    ]
    against = ["", *(_difference(row.top1_difference) for row in rows[1:])]
    accuracy = {"seeds": seeds, **shown("top1")}
    if any(row.top1_difference for row in rows):
        accuracy["top-1 against the first"] = against
    accuracy |= shown(*_ACCURACY)
    times = shown(*_TIMES)
    targets = {row.target for row in rows} - {None}
    if targets:
        hits = [
            NOTHING if r.target is None else f"{r.hits} of {r.finished} ({r.target:g} %)"
            for r in rows
        ]
        times |= {"reached the target": hits, **shown(*_TO_TARGET)}
    names = [group.name for group in found]
    return [
        Table(title, ["run", *of], [list(row) for row in zip(names, *of.values(), strict=True)])
        for title, of in (("Accuracy and loss", accuracy), ("Time", times))
        if of
    ]


def runs_table(found: Sequence[Group], target: float | None) -> Table:
    """What each run reached so far, and the folder where it lies."""
    runs = {name: run for group in found for name, run in group.runs.items()}
    every = {name: quantities(run, target_of(run, target)) for name, run in runs.items()}
    keys = [key for key in QUANTITIES if any(key in each for each in every.values())]
    rows = [
        [name, _status(run), *(_plain(every[name].get(key), key) for key in keys), str(run.folder)]
        for name, run in runs.items()
    ]
    columns = ["run", "status", *map(_heading, keys), "folder"]
    return Table("Each run", columns, rows, words=frozenset({0, 1, len(columns) - 1}))


def difference_table(found: Sequence[Group]) -> Table | None:
    """What the recipes of the groups differ in; None if there is nothing."""
    rows, names = differences(found), [group.name for group in found]
    table = [["key", *names], *([key, *values] for key, values in rows.items())]
    if len(names) > _MOST_COLUMNS:
        table = [["run", *rows], *map(list, zip(names, *rows.values(), strict=True))]
    return (
        Table("What differs", table[0], table[1:], frozenset(range(len(table[0]))))
        if rows
        else None
    )


def as_data(
    found: Sequence[Group], target: float | None, left_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the tables as plain data: numbers in the units that the names of keys tell.

    Args:
        found: The runs, grouped.
        target: Top-1 in percent to tell the way to; None: the recipes' own.
        left_out: A note about each run that is not shown.
    """
    runs = []
    for group in found:
        for name, run in group.runs.items():
            percent = {key.removesuffix("_seconds"): n for key, n in shares(run.train).items()}
            facts = ("seed", "status", "reason", "step", "last_step", "notes")
            runs.append(
                {"run": name, "folder": str(run.folder), "group": group.name}
                | {"recipe": run.recipe_name, **{fact: getattr(run, fact) for fact in facts}}
                | quantities(run, target_of(run, target))
                | {"training_time_percent": percent or None, "readings": len(run.train)}
                | {"training_time_readings": len(recording(run.train))}
                | {"wall_time_seconds": run.time_spent or None}
            )
    rows = []
    for row in reached(found, target):
        known = ("finished", "unfinished", "target")
        estimates = row.estimates | {"top1_difference": row.top1_difference}
        rows.append(
            {"group": row.group.name, "runs": list(row.group.runs)}
            | {key: getattr(row, key) for key in known}
            | {key: estimate and asdict(estimate) for key, estimate in estimates.items()}
            | {"reached_target": row.hits if row.target is not None else None}
        )
    different = [
        {"key": key, "values": dict(zip([g.name for g in found], values, strict=True))}
        for key, values in differences(found).items()
    ]
    told = [*left_out, *notes(found)]
    return {"runs": runs, "groups": rows, "differences": different, "notes": told}


def _heading(key: str) -> str:
    quantity = QUANTITIES[key]
    return quantity.title + (f",{_SPACE}{quantity.unit}" if quantity.unit else "")


def _plain(value: float | None, key: str) -> str:
    digits = QUANTITIES[key].digits
    if value is None:
        return NOTHING
    # A loss that has grown out of bounds is shown by its magnitude.
    return f"{value:.3g}" if digits and abs(value) >= 1e6 else f"{value:,.{digits}f}"


def _estimate(estimate: Estimate | None, key: str) -> str:
    if estimate is None:
        return NOTHING
    # There is no interval of one seed, or of values that are equal.
    half = f" ± {_plain(estimate.half, key)}" if estimate.half else ""
    return _plain(estimate.mean, key) + half


def _difference(estimate: Estimate | None) -> str:
    if estimate is None:
        return NOTHING
    text = f"{estimate.mean:+.2f}".replace("-", "\N{MINUS SIGN}")
    if estimate.half is None:
        return f"{text}, one seed"
    return f"{text} ± {estimate.half:.2f}" + ", not significant" * (not estimate.is_significant)


def _status(run: Run) -> str:
    of = f" of {run.last_step:,}" if run.last_step is not None else ""
    return run.status if run.status == "finished" else f"{run.status} at {run.step:,}{of}"
