"""The cost of the meters: the interval of the ratio, and what the table says of it."""

import math

import pytest
import torch

from benchmarks.recipes.step_meters import CASES, Unmeasured, ratio, summarised, table, verdict
from largebatch.recipes.training.phases import Phases


def test_the_ratio_is_that_of_rounds_and_its_interval_students():
    turns = [[1.0, 1.0, 1.0, 1.02], [2.0, 2.0, 2.0, 2.0], [1.0, 1.02, 1.0, 1.0]]
    middle, low, high = ratio(turns)
    # The logarithms are a, 0 and -a with a = log(2.02 / 2); t of 2 degrees of freedom is 4.3027.
    half = 4.3027 * math.log(1.01) / math.sqrt(3)
    assert (middle, low, high) == pytest.approx((1, math.exp(-half), math.exp(half)), abs=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.99, 1.01, "met"), (1.02, 1.03, "missed"), (0.99, 1.02, "unresolved")],
)
def test_the_interval_decides(low, high, expected):
    assert verdict((1.0, low, high)) == f"1.0000 ({low:.4f} to {high:.4f}): {expected}"


def test_the_table_has_the_share_of_the_calls_alone():
    found = {
        "turns": [[(0.5, 0.4)] * 4, [*[(0.5, 0.4)] * 3, (0.502, 0.408)]],
        "alone": {"step": 1e-4, "reading": 5e-4},
    }
    row = summarised(CASES[0], found)
    assert row["step_seconds"] == pytest.approx(0.1)
    assert row["alone_share"] == pytest.approx(0.002)
    assert row["ratio"][0] == pytest.approx(1.002**0.5, abs=1e-5)
    assert row["processor_ratio"][0] == pytest.approx(1.01**0.5, abs=1e-5)
    assert "| 100 us | 500 us | 0.20% |" in table([row])


def test_what_stands_in_for_the_phases_has_all_that_a_step_uses():
    used = {"input", "forward", "backward", "optimizer", "clearing", "meters", "step"}
    for phases in (Unmeasured(), Phases(torch.device("cpu"))):
        assert all(hasattr(phases, name) for name in used)
