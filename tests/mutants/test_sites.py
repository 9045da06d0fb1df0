"""Each mutation changes one line to valid Python, and is found again where its line has moved."""

import json
from pathlib import Path

from tests.mutants.__main__ import BASELINE, LIST
from tests.mutants.sites import Mutant, mutate, place

ROOT = Path(__file__).parents[2]
CHOSEN = [Mutant(**record) for record in json.loads(LIST.read_text())]
TEXT = """
class Counter:
    def count(self, items):
        total += 1
        total += 1
        return total >= LIMIT
"""


def test_each_mutation_of_the_list_changes_its_line_alone():
    assert len({str(mutant) for mutant in CHOSEN}) == len(json.loads(BASELINE.read_text())) == 200
    found = [(mutant, place(ROOT, mutant)) for mutant in CHOSEN]
    assert sum(bool(where) for _, where in found) > 100
    for mutant, (file, line) in (pair for pair in found if pair[1]):
        before, after = file.read_text().split("\n"), mutate(file, line, mutant).split("\n")
        changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b]
        assert changed == [line]


def test_lines_that_are_equal_are_kept_apart_and_found_where_they_moved(tmp_path):
    first, second = (
        Mutant("lars/one.py", "Counter.count", "total += 1", n, 6, "+", "-") for n in range(2)
    )
    for path, text in (
        ("lars/one.py", TEXT),
        ("recipes/wing/two.py", "import os\n\n" + TEXT.replace("Counter", "Meter")),
    ):
        moved = tmp_path / path
        moved.parent.mkdir(parents=True)
        moved.write_text(text)
        line = 4 if "one" in path else 6
        assert [place(tmp_path, m) for m in (first, second)] == [(moved, line), (moved, line + 1)]
        moved.write_text(text.replace("total", "sum"))
        assert place(tmp_path, first) is None
