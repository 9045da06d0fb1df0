"""What an estimate found: its runs, and the critical batch by each method."""

from __future__ import annotations

from dataclasses import dataclass

from .fit import CriticalBatch
from .journal import Record
from .runs import Base, Run


@dataclass(frozen=True)
class Estimate:
    """What the runs say about the price of a batch.

    Attributes:
        base: The recipe.
        epochs: Length of the target run, the smallest batch, in epochs.
        batches: Batch sizes that were to be measured.
        records: Runs that ended.
        whole: The whole runs among them that count: those that finished near the target.
        left_out: Runs for which the budget did not suffice.
        methods: By method, the critical batch, or why it cannot be said.
        seconds: Time of all runs.
    """

    base: Base
    epochs: float
    batches: tuple[int, ...]
    records: tuple[Record, ...]
    whole: tuple[Record, ...]
    left_out: tuple[Run, ...]
    methods: dict[str, CriticalBatch | str]
    seconds: float

    @property
    def critical(self) -> CriticalBatch | None:
        """The critical batch of the first method that found one."""
        return next((m for m in self.methods.values() if isinstance(m, CriticalBatch)), None)
