"""The section ``profile`` of a recipe: which steps torch.profiler records, on which ranks."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .types import Int, Section


def _steps(value: Any) -> Any:
    """Check a range of steps; return ``FIRST..LAST``, or the only one."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*([1-9]\d*)\s*(?:\.\.\s*(\d+)\s*)?", str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a range of steps from 1 on; valid: 10..15, or 10")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"{value} runs backwards; valid: such as {last}..{first}")
    return str(first) if first == last else f"{first}..{last}"


class Profile(Section):
    """A trace of some steps by torch.profiler, and a table of what costs most."""

    steps: Annotated[
        str | None, BeforeValidator(_steps, json_schema_input_type=str | int | None)
    ] = None
    """Steps to record, from the first to the last: 10..15, or 10 for one; null: none. Steps count
    from 1. The files are in the run's folder profile."""
    ranks: (
        Literal["all"] | Annotated[tuple[Annotated[Int, Field(ge=0)], ...], Field(min_length=1)]
    ) = (0,)
    """Ranks that record; all: every rank."""

    @property
    def first_and_last(self) -> tuple[int, int] | None:
        """First and last step to record; None: none."""
        if self.steps is None:
            return None
        first, _, last = self.steps.partition("..")
        return int(first), int(last or first)

    def records(self, rank: int) -> bool:
        """Whether a rank records."""
        return self.ranks == "all" or rank in self.ranks
