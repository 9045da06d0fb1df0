"""Which runs the critical batch is fitted to.

It grows while the loss falls, so that the runs near the target say what is asked. A larger batch is
first run as long as the target run, which leaves it above the target and tells how much longer it
needs. Once runs of that length have ended, they take the place of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

from .branches import group
from .fit import Observation
from .journal import Journal, Record
from .runs import length_of


def near_the_target(journal: Journal) -> list[Record]:
    """The whole runs that count."""
    lengths = _lengths(journal)
    whole = [r for r in _finished(journal.records) if not r.run.after]
    near = {r.run.batch_size for r in whole if lengths.get(r.run.batch_size) == r.run.epochs}
    return [
        record
        for record in whole
        if record.run.batch_size not in near or record.run.epochs == lengths[record.run.batch_size]
    ]


def whole_runs(journal: Journal) -> list[Observation]:
    """The observations of whole runs."""
    return [_observation(record) for record in near_the_target(journal)]


def branches(journal: Journal) -> list[Observation]:
    """The observations of branches."""
    return [_observation(record) for record in _finished(journal.records) if record.run.after]


def _lengths(journal: Journal) -> dict[int, float]:
    """The epochs in which each larger batch should reach the target, as far as they are known."""
    chosen = journal.choices
    return {
        int(batch): length_of(chosen["epochs"] * price)
        for batch, price in chosen.get("prices", {}).items()
        if int(batch) > min(chosen["batches"])
    }


def _finished(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r.kind == "run" and r.status == "finished"]


def _observation(record: Record) -> Observation:
    return Observation(record.run.batch_size, record.trained, record.loss, group(record.run))
