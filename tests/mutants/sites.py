"""A recorded mutation: where its line stands today, and the text of the file with it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("recipes", "lars", "amp", "comm", "pipeline")


@dataclass(frozen=True)
class Mutant:
    """One mutation, recorded by the text that it changes, so that it can be found after a move."""

    path: str
    function: str
    line: str
    occurrence: int  # which of the lines of this text in the function, from 0
    column: int  # of the line without its indentation
    old: str
    new: str

    def __str__(self) -> str:
        mutated = self.mutated
        return f"{self.path}: {self.function or 'module'}: `{self.line}` -> `{mutated}`"

    @property
    def mutated(self) -> str:
        """The changed line."""
        return self.line[: self.column] + self.new + self.line[self.column + len(self.old) :]


def place(root: Path, mutant: Mutant) -> tuple[Path, int] | None:
    """Return the file and the line (from 1) of a mutant, or None if its line is gone.

    A line that was moved is found by its text in a function of the same name of any file of
    ``ROOMS``; the file and the full name of the function that were recorded are preferred.
    """
    own = root / mutant.path
    others = (path for room in ROOMS for path in sorted((root / room).rglob("*.py")) if path != own)
    last = mutant.function.rpartition(".")[2]
    for path in (*([own] if own.exists() else []), *others):
        lines = path.read_text().split("\n")
        numbers = [n for n, line in enumerate(lines, 1) if line.strip() == mutant.line]
        if not numbers:
            continue
        functions = _functions(ast.parse("\n".join(lines)))
        for same in (
            [n for n in numbers if functions.get(n, "") == mutant.function],
            [n for n in numbers if functions.get(n, "").rpartition(".")[2] == last],
        ):
            if same:
                return path, same[min(mutant.occurrence, len(same) - 1)]
    return None


def mutate(path: Path, number: int, mutant: Mutant) -> str:
    """Return the text of a file with the mutant at a line."""
    lines = path.read_text().split("\n")
    line = lines[number - 1]
    lines[number - 1] = line[: len(line) - len(line.lstrip())] + mutant.mutated
    text = "\n".join(lines)
    ast.parse(text)
    return text


def _functions(tree: ast.AST) -> dict[int, str]:
    """Qualified name of the innermost function or class around each line of one's body."""
    names: dict[int, str] = {}

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}" if name else child.name
                for number in range(child.lineno, (child.end_lineno or child.lineno) + 1):
                    names[number] = inner
            visit(child, inner)

    visit(tree, "")
    return names
