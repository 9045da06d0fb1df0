"""Lengths of training, written in epochs, steps or fractions of the run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

_SPAN = re.compile(r"(?P<value>\d+(\.\d*)?|\.\d+)(?P<unit>ep|dur|)")


@dataclass(frozen=True)
class Span:
    """A length of training: ``Span.parse("31ep")``, ``"500"`` (steps) or ``"0.1dur"``.

    Attributes:
        value: >= 0; a whole number of steps, or at most 1 for a fraction of the run.
        unit: ``"ep"`` (epochs), ``""`` (optimizer steps) or ``"dur"`` (fraction of the run).
    """

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str | int | Span) -> Span:
        """Parse a span; an ``int`` is a number of steps and a ``Span`` is returned unchanged.

        Raises:
            ValueError: ``text`` is not a valid length; the message lists the valid forms.
        """
        if isinstance(text, Span):
            return text
        match = _SPAN.fullmatch(str(text).strip())
        unit = match["unit"] if match else None
        value = float(match["value"]) if match else 0.0
        if unit is None or (unit == "" and value % 1) or (unit == "dur" and value > 1):
            raise ValueError(
                f"{text!r} is not a length: write epochs as '5ep', steps as '500', "
                "a fraction of the run as '0.1dur'"
            )
        return cls(value, unit)

    def steps(self, steps_per_epoch: float, total_steps: int) -> int:
        """Return the length in optimizer steps, rounded to the nearest integer.

        Args:
            steps_per_epoch: need not be an integer.
            total_steps: length of the run, which ``"dur"`` refers to.
        """
        per_unit = {"ep": steps_per_epoch, "dur": float(total_steps), "": 1.0}
        return round(self.value * per_unit[self.unit])

    def __str__(self) -> str:
        return f"{Decimal(repr(self.value)).normalize():f}{self.unit}"
