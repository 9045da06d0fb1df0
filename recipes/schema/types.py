"""The types of a recipe's keys, and the base class of its sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from ...lars import Span


def one_of(*names: str) -> Any:
    """The type that takes one of ``names``."""
    return Literal[names]


def span_as_plain(span: Span) -> str | int:
    """A length as YAML and JSON hold it: a number of steps, or text with a unit."""
    return str(span) if span.unit else int(span.value)


def must_be(what: str) -> WrapValidator:
    """Say in one line what a key of several types takes, in place of an error for each type."""

    def check(value: Any, inner: Any) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise ValueError(f"must be {what}") from None

    return WrapValidator(check)


def _not_zero(span: Span) -> Span:
    if span.value == 0:
        raise ValueError(f"must be longer than {span}")
    return span


def _span_schema(least: int) -> WithJsonSchema:
    """The JSON schema of a length of at least ``least`` steps; its format names it in tables."""
    text = {"type": "string", "pattern": r"^\s*(\d+(\.\d*)?|\.\d+)(ep|dur)\s*$"}
    steps = {"type": "string", "pattern": r"^\s*\d+(\.0*)?\s*$"}
    return WithJsonSchema(
        {"format": "length", "anyOf": [{"type": "integer", "minimum": least}, text, steps]}
    )


#: The type of the errors that :func:`wrong` makes.
SECTION_CHECK = "section_check"


def wrong(key: str, what: str) -> PydanticCustomError:
    """The error that a section's own check raises about one of its keys."""
    return PydanticCustomError(SECTION_CHECK, "{what}", {"key": key, "what": what})


#: A switch that depends on the device unless it is given.
Switch = Annotated[Literal["auto"] | StrictBool, must_be("auto, true or false")]
#: A whole number that a 64-bit integer holds. Text and booleans are no numbers.
Int = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
Float = Annotated[float, Field(strict=True)]
PositiveInt = Annotated[Int, Field(gt=0)]
Positive = Annotated[Float, Field(gt=0)]
NotNegative = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
Range = tuple[Positive, Positive]
#: A length of training, which may be zero: ``5ep``, ``500`` (steps) or ``0.1dur``.
Length = Annotated[
    Span, BeforeValidator(Span.parse), PlainSerializer(span_as_plain), _span_schema(0)
]
#: A length of training above zero.
Period = Annotated[Length, AfterValidator(_not_zero), _span_schema(1)]


class Section(BaseModel):
    """A group of keys, each with its meaning below it.

    Unknown keys are refused, and values cannot be changed.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
