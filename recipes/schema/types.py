"""The types that keys of a recipe have, and how a section is checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic_core import PydanticCustomError

from ...lars import Span


def one_of(*names: str) -> Any:
    """The type of one of these names."""
    return Literal[names]


def _plain(span: Span) -> str | int:
    return str(span) if span.unit else int(span.value)


def _not_boolean(value: Any) -> Any:
    """Refuse what pydantic would take as 0 or 1."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


def _not_zero(span: Span) -> Span:
    if span.value == 0:
        raise ValueError(f"must be longer than {span}")
    return span


#: The type of the errors that a section's own check raises.
SECTION_CHECK = "section_check"


def wrong(key: str, what: str) -> PydanticCustomError:
    """The error that a section's own check raises about one of its keys."""
    return PydanticCustomError(SECTION_CHECK, "{what}", {"key": key, "what": what})


Int = Annotated[int, BeforeValidator(_not_boolean)]
Float = Annotated[float, BeforeValidator(_not_boolean)]
PositiveInt = Annotated[Int, Field(gt=0)]
Positive = Annotated[Float, Field(gt=0)]
NotNegative = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
Range = tuple[Positive, Positive]
Length = Annotated[Span, BeforeValidator(Span.parse), PlainSerializer(_plain)]
Period = Annotated[Length, AfterValidator(_not_zero)]


class Section(BaseModel):
    """A group of keys: unknown ones are refused, and values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )
