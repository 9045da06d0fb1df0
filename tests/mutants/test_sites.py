"""Each mutation changes one line to valid Python, and is found again where its line has moved."""

import ast
import json
from pathlib import Path

import pytest

from tests.mutants.__main__ import LIST, PARTS, lost, table
from tests.mutants.sites import Mutant, mutants, mutate, place

ROOT = Path(__file__).parents[2]
TEXT = """
LIMIT: int | None = 3


class Counter:
    def count(self, items, strict=False):
        total = 0
        for item in items:
            if item.valid and not item.seen:
                total += len(item.ends) - 1
        self.note(total)
        if total >= LIMIT:
            raise ValueError(f"{total + 1} items")
        return zip(items, items, strict=True)
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "lars").mkdir()
    (tmp_path / "lars" / "one.py").write_text(TEXT)
    return tmp_path


def test_the_mutations_of_a_text(tree):
    found = [(m.line.split()[0], m.old, m.new) for m in mutants(tree, "lars/one.py")]
    assert found == [
        ("LIMIT:", "3", "4"),
        ("def", "False", "True"),
        ("total", "0", "1"),
        ("if", "and", "or"),
        ("if", "not ", ""),
        ("total", "+", "-"),
        ("total", "-", "+"),
        ("total", "1", "2"),
        ("self.note(total)", "self.note(total)", "pass"),
        ("if", ">=", ">"),
    ]


@pytest.mark.parametrize("path", ["lars/fused.py", "recipes/schema/sections.py"])
def test_each_mutation_changes_its_line_alone(path):
    before = (ROOT / path).read_text().split("\n")
    for mutant in mutants(ROOT, path)[::20]:
        file, line = place(ROOT, mutant)
        after = mutate(file, line, mutant).split("\n")
        changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b]
        assert (file, changed) == (ROOT / path, [line])
        ast.parse("\n".join(after))


def test_a_line_that_has_moved_is_found(tree):
    every = mutants(tree, "lars/one.py")
    (tree / "recipes" / "wing").mkdir(parents=True)
    moved = tree / "recipes" / "wing" / "two.py"
    moved.write_text("import os\n\n\n" + TEXT.replace("Counter", "Meter"))
    (tree / "lars" / "one.py").unlink()
    lines = moved.read_text().split("\n")
    for mutant in every:
        file, line = place(tree, mutant)
        assert (file, lines[line - 1].strip()) == (moved, mutant.line)
    moved.write_text(TEXT.replace("total", "sum"))
    assert [place(tree, m) is None for m in every] == [False] * 2 + [True] + [False] * 2 + [
        True
    ] * 5


def test_equal_lines_of_a_function_are_kept_apart(tmp_path):
    (tmp_path / "amp").mkdir()
    (tmp_path / "amp" / "one.py").write_text("def f(x):\n    x += 1\n    x += 1\n    return x\n")
    every = mutants(tmp_path, "amp/one.py")
    assert [place(tmp_path, mutant)[1] for mutant in every] == [2, 2, 3, 3]


def test_a_mutant_that_is_not_caught_any_more_is_named():
    def row(name, outcome):
        return {"part": "lars", "mutant": name, "outcome": outcome, "by": "tests/t.py::test"}

    before = [row("a", "caught"), row("b", "caught"), row("c", "missed"), row("d", "caught")]
    after = [row("a", "caught"), row("b", "missed"), row("c", "missed"), row("d", "gone")]
    assert lost(before, after) == [
        "missed: b (was caught by tests/t.py::test)",
        "gone: d (was caught by tests/t.py::test)",
    ]
    assert "| lars | 4 | 1 | 2 | 0 | 0 | 1 |" in table(after)


def test_the_list_has_the_mutants_of_each_part():
    chosen = [Mutant(**record) for record in json.loads(LIST.read_text())]
    assert len({str(m) for m in chosen}) == len(chosen) == 200
    assert sum(number for number, _ in PARTS.values()) == 200
