"""The time of a step of LARS is measured at a small size, and its table written."""

from benchmarks.lars import step
from benchmarks.lars.shapes import TINY


def test_a_step(run_script, cells_of):
    cases = {"tiny": step.Case(TINY[:20], step.FP32)}
    changed = {"CASES": cases, "_BY_OTHERS": float("inf"), "_LEAST_SECONDS": 1e-3}
    rows = cells_of(run_script(step, "--repeats", 2, **changed)["lars_step"])
    assert [row[1] for row in rows] == [*step.FP32]
    assert rows[0][5] == "1.00"
    assert all(float(row[5]) >= 0 and float(row[6]) >= 0 for row in rows)
