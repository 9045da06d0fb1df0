"""Spans: parsing, conversion to steps, and text that parses back to the same span."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largebatch.lars import Span


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("31ep", 606),
        ("500", 500),
        (500, 500),
        ("0.1dur", 174),
        ("2.5ep", 49),
        ("0", 0),
        ("1dur", 1740),
    ],
)
def test_a_span_is_converted_to_steps(text, steps):
    span = Span.parse(text)
    assert span.steps(1281167 / 65536, 1740) == steps
    assert Span.parse(str(span)) == span


@pytest.mark.parametrize("text", ["", "ep", "-1ep", "1.5", "5 ep", "2dur", "1e3", "5epochs", "nan"])
def test_an_invalid_span_is_refused(text):
    with pytest.raises(ValueError, match="is not a length: write epochs as '5ep'"):
        Span.parse(text)


@given(st.floats(min_value=0, allow_infinity=False))
def test_the_text_of_a_span_parses_back_to_the_same_span(value):
    assert Span.parse(str(Span(value, "ep"))) == Span(value, "ep")


@pytest.mark.parametrize("text", ["31ep", "12.3456789ep", "0.1dur", "100", "0", "0.00001ep"])
def test_the_text_of_a_span_is_as_short_as_possible(text):
    assert str(Span.parse(text)) == text
