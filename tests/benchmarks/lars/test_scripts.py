"""Each script of benchmarks/lars runs at a small size and writes its table."""

from benchmarks.lars import crosschecks, muon_crosschecks, step
from benchmarks.lars.shapes import TINY
from benchmarks.tables import RESULTS


def stored(name):
    return (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_a_step(run_script, cells_of):
    cases = {"tiny": step.Case(TINY[:20], step.FP32)}
    changed = {"CASES": cases, "_BY_OTHERS": float("inf"), "_LEAST_SECONDS": 1e-3}
    rows = cells_of(run_script(step, "--repeats", 2, **changed)["lars_step"])
    assert [row[1] for row in rows] == [*step.FP32]
    assert rows[0][5] == "1.00"
    assert all(float(row[5]) >= 0 and float(row[6]) >= 0 for row in rows)


def test_lars_against_other_libraries(run_script, cells_of):
    few = {"DIALECTS": ("mlperf",), "FORMS": [("", {})], "STEPS": 11}
    quick = {name: row for name, row in crosschecks.CONVENTIONS.items() if name != "optax"}
    rows = cells_of(run_script(crosschecks, **few, CONVENTIONS=quick)["lars_crosschecks"])
    pairs = {(row[0], row[1]) for row in cells_of(stored("lars_crosschecks"))}
    assert len(quick) < len(rows)
    assert {(row[0], row[1]) for row in rows} <= pairs
    assert max(float(row[2]) for row in rows) < 1e-10


def test_muon_against_other_libraries(run_script, cells_of, monkeypatch):
    every = muon_crosschecks.combinations
    first = {"combinations": lambda settings: [*every(settings)][:1]}
    rows = cells_of(run_script(muon_crosschecks, **first)["muon_crosschecks"])
    assert [row[:2] for row in rows] == [r[:2] for r in cells_of(stored("muon_crosschecks"))]
    assert max(float(row[2]) for row in rows if "BF16" not in " ".join(row)) < 1e-8
