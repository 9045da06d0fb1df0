"""The goals of the fastest step, computed from the rows that ``fast`` reports.

A ratio is taken between medians of one table, in which both took turns in one run; the sustained
turns at the end decide where there are any. Rows that a later run of some groups has added have a
higher number in their column ``run``, and goals of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.gpu.contenders import CONTENDERS, LARGE, SMALL, TYPED

Row = dict[str, Any]

RATES, SUSTAINED = "images per second", "sustained, images per second"

#: Images per second that are asked of an H200, and the least ratios.
LEAST_RATE = 8500
LEAST_AGAINST_RIVAL, WANTED_AGAINST_RIVAL = 1.0, 1.15
LEAST_TYPED, LEAST_SMALL = 0.97, 0.70


def best(rows: Iterable[Row], *, ours: bool, like: str = TYPED) -> Row | None:
    """Return the fastest row of ours, or of the others, at the load of ``like``.

    That is its precision, its images per forward pass, and its passes per update.
    """
    load = CONTENDERS[like]
    found = [
        row
        for row in rows
        if (contender := CONTENDERS[row["contender"]]).ours == ours
        and (contender.precision, contender.batch, contender.steps)
        == (load.precision, load.batch, load.steps)
    ]
    return max(found, key=lambda row: row["median"], default=None)


def decisive(tables: dict[str, list[Row]]) -> list[Row]:
    """Return the rows that decide: sustained ones if both sides have one, else all."""
    rows = tables.get(SUSTAINED, [])
    if best(rows, ours=True) and best(rows, ours=False):
        return rows
    return tables.get(RATES, [])


def goals(tables: dict[str, list[Row]]) -> list[tuple[str, float, float]]:
    """Return what is asked, what was reached and the least that is asked; unmeasured: left out.

    Each run has its own, from the earliest to the latest.
    """
    found = []
    for number in sorted({run_of(row) for rows in tables.values() for row in rows}):
        of_run = {
            title: [row for row in rows if run_of(row) == number] for title, rows in tables.items()
        }
        suffix = f" (run {number})" if number > 1 else ""
        found += [(what + suffix, got, least) for what, got, least in _goals_of_run(of_run)]
    return found


def run_of(row: Row) -> int:
    """Return the number of the run that a row is from."""
    number: int = row.get("run", 1)
    return number


def _goals_of_run(tables: dict[str, list[Row]]) -> list[tuple[str, float, float]]:
    found = []
    rows = decisive(tables)
    mine, rival = best(rows, ours=True), best(rows, ours=False)
    if mine and rival:
        ratio = mine["median"] / rival["median"]
        what = f"our best ({_short(mine)}) / the best other ({rival['contender']})"
        found.append((what, ratio, LEAST_AGAINST_RIVAL))
        found.append((f"{what}, wanted", ratio, WANTED_AGAINST_RIVAL))
    if mine:
        found.append((f"our best ({_short(mine)}), images/s", mine["median"], LEAST_RATE))
        typed = _median(rows, TYPED)
        if typed:
            ratio = typed / mine["median"]
            found.append(("the recipe as typed / our best setting", ratio, LEAST_TYPED))
    every = tables.get(RATES, [])
    small, large = _median(every, SMALL), _median(every, LARGE)
    if small and large:
        what = "micro-batches of 32 / of 256, resnet50-jia-b65536"
        found.append((what, small / large, LEAST_SMALL))
    return found


def _median(rows: list[Row], name: str) -> float:
    return max((row["median"] for row in rows if row["contender"] == name), default=0.0)


def _short(row: Row) -> str:
    text: str = row["contender"]
    return text.partition(": ")[2]
