"""The section ``profile`` of a recipe: which steps torch.profiler records, on which ranks."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .types import Int, Section

_FORM = re.compile(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?")


def _steps(value: Any) -> Any:
    """Check a range of steps; return ``FIRST..LAST``, or the only one."""
    if value is None:
        return None
    match = _FORM.fullmatch(str(value)) if isinstance(value, int | str) else None
    if match is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a range of steps; valid: such as 10..15, or 10")
    first, last = int(match[1]), int(match[2] or match[1])
    if first < 1:
        raise ValueError(f"{value} begins before the first step; valid: steps count from 1")
    if last < first:
        raise ValueError(f"{value} runs backwards; valid: such as {last}..{first}")
    return str(first) if first == last else f"{first}..{last}"


def _ranks(value: Any) -> Any:
    """One rank as a list of one; without repetition, and in order."""
    if value == "all":
        return value
    listed = value if isinstance(value, list | tuple) else [value]
    if not listed or not all(_is_rank(one) for one in listed):
        raise ValueError(f"{value!r} does not name ranks; valid: such as [0, 1], or all")
    return sorted({*listed})


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


#: What these keys take in a file, for the JSON schema.
_StepsForm = Annotated[str, Field(pattern=r"^\s*\d+\s*(\.\.\s*\d+\s*)?$")] | Int | None
_RanksForm = Literal["all"] | Int | tuple[Int, ...]


class Profile(Section):
    """A trace of some steps by torch.profiler, and a table of what costs most."""

    steps: Annotated[str | None, BeforeValidator(_steps, json_schema_input_type=_StepsForm)] = (
        Field(
            None,
            description="Steps to record, from the first to the last: 10..15, or 10 for one; null: "
            "none. Steps count from 1. The files are in the run's folder profile.",
            examples=["10..15"],
        )
    )
    ranks: Annotated[
        Literal["all"] | tuple[int, ...],
        BeforeValidator(_ranks, json_schema_input_type=_RanksForm),
    ] = Field((0,), description="Ranks that record; all: every rank.")
    shapes: bool = Field(False, description="Record the shapes of the inputs of operators.")
    memory: bool = Field(
        False,
        description="Record what operators allocate and free; of the thread that trains "
        "alone, as torch records no memory of all threads.",
    )
    stacks: bool = Field(
        False,
        description="Record the Python stack of operators, by file and line; slows steps down.",
    )

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
