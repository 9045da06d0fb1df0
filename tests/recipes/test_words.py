"""Times as text, for what a run shows."""

import pytest

from largebatch.recipes.words import duration, rate, short_duration

DAY = 86400


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (duration, {4: "4.0 s", 75: "75 s", 396: "6.6 min", 3000: "50 min", 50700: "14 h 05 min"}),
        (rate, {0.0123: "0.012", 0.4: "0.4", 7.04: "7.0", 99.94: "99.9", 845.2: "845"}),
        (rate, {18432: "18,432"}),
        (short_duration, {0.4: "0s", 59.4: "59s", 59.6: "1m00s", 3599.4: "59m59s"}),
        (short_duration, {3599.6: "1h00m", DAY - 31: "23h59m", DAY - 29: "1d00h"}),
        (short_duration, {99 * DAY + 23.4 * 3600: "99d23h"}),  # of six characters, the most
    ],
)
def test_times_and_rates(words, texts):
    assert {number: words(number) for number in texts} == texts
