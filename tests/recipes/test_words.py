"""Times as text, for what a run shows."""

import pytest

from largebatch.recipes.words import duration, rate, short_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4, "4.0 s"), (75, "75 s"), (396, "6.6 min"), (3000, "50 min"), (50700, "14 h 05 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0123, "0.012"), (0.4, "0.4"), (7.04, "7.0"), (99.94, "99.9"), (845.2, "845"),
     (18432, "18,432")],
)  # fmt: skip
def test_rates(number, text):
    assert rate(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599.4, "59m59s"), (3599.6, "1h00m"),
     (86369, "23h59m"), (86371, "1d00h"), (99 * 86400 + 23.4 * 3600, "99d23h")],
)  # fmt: skip
def test_short_durations(seconds, text):
    assert short_duration(seconds) == text
    assert len(text) <= 6
