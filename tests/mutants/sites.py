"""Where a file can be changed by one mutation, and where a recorded mutation stands today."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOMS = ("recipes", "lars", "amp", "comm", "pipeline")

COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "in": "not in", "not in": "in", "is": "is not", "is not": "is",
}  # fmt: skip
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "&": "|"}
# Parts of a program that are messages, or not executed.
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
# Arguments of calls that no test can see: guards against errors in the program itself, layout.
UNSEEN = ("strict", "indent", "daemon")


@dataclass(frozen=True)
class Mutant:
    """One mutation, recorded by the text that it changes, so that it can be found after a move.

    Attributes:
        path: File, relative to the root.
        function: Qualified name of the innermost function or class; empty at the module's level.
        line: Text of the line, without indentation.
        occurrence: Which of the lines of this text in ``function``, from 0.
        column: Where ``old`` begins in ``line``, in characters.
        old: Text that is replaced.
        new: Text that replaces it.
    """

    path: str
    function: str
    line: str
    occurrence: int
    column: int
    old: str
    new: str

    def __str__(self) -> str:
        mutated = self.mutated
        return f"{self.path}: {self.function or 'module'}: `{self.line}` -> `{mutated}`"

    @property
    def mutated(self) -> str:
        """The changed line."""
        return self.line[: self.column] + self.new + self.line[self.column + len(self.old) :]

    def record(self) -> dict[str, str | int]:
        """The attributes by name."""
        return asdict(self)


def mutants(root: Path, path: str) -> list[Mutant]:
    """Return each mutation of a file that this module knows, in the order of its lines."""
    text = (root / path).read_text()
    lines = text.split("\n")
    functions = _functions(ast.parse(text))
    found = []
    for number, start, stop, new in sorted(set(_changes(ast.parse(text), lines))):
        line = lines[number - 1]
        indent = len(line) - len(line.lstrip())
        name = functions.get(number, "")
        alike = [
            n
            for n in range(1, number)
            if functions.get(n, "") == name and lines[n - 1].strip() == line.strip()
        ]
        old = line[start:stop]
        found.append(Mutant(path, name, line.strip(), len(alike), start - indent, old, new))
    return found


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


def _changes(tree: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, int, str]]:
    """Yield line, first and last column, and the new text of each change."""
    for node in _code(tree):
        match node:
            case ast.Compare(left, [_], [right]):
                yield from _operator(lines, left, right, COMPARISONS)
            case ast.BinOp(left, _, right) if not (_is_text(left) or _is_text(right)):
                yield from _operator(lines, left, right, ARITHMETIC)
            case ast.BoolOp(_, [left, right, *_]):
                yield from _operator(lines, left, right, {"and": "or", "or": "and"})
            case ast.UnaryOp(ast.Not() | ast.USub(), operand) if node.lineno == operand.lineno:
                start = _column(lines, node.lineno, node.col_offset)
                stop = start + (4 if isinstance(node.op, ast.Not) else 1)
                yield node.lineno, start, stop, ""
            case ast.Constant(value) if type(value) in (bool, int, float):
                new = not value if isinstance(value, bool) else value + 1
                yield from _span(lines, node, repr(new))
            case ast.AugAssign(target, ast.Add() | ast.Sub(), value):
                start = _end_column(lines, target)
                at = re.compile(r"\s*([+-])=").match(lines[target.lineno - 1], start)
                if at:
                    new = "-" if at[1] == "+" else "+"
                    yield target.lineno, at.start(1), at.end(1), new
            case ast.If(test) | ast.IfExp(test) | ast.While(test):
                if isinstance(test, ast.Name | ast.Call | ast.Attribute):
                    text = ast.get_source_segment("\n".join(lines), test)
                    yield from _span(lines, test, f"not ({text})")
            case ast.Expr(ast.Call()):
                yield from _span(lines, node, "pass")


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one that are executed, without annotations and messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, SKIPPED):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.keyword) and child.arg in UNSEEN:
                continue
            yield child
            yield from _code(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _operator(
    lines: list[str], left: ast.expr, right: ast.expr, names: dict[str, str]
) -> Iterator[tuple[int, int, int, str]]:
    """Yield the exchange of the operator between two operands, if it is on the line of the left."""
    number = left.end_lineno or 0
    start = _end_column(lines, left)
    end = _column(lines, number, right.col_offset) if right.lineno == number else None
    between = lines[number - 1][start:end]
    found = re.fullmatch(r"[\s)]*(.*?)[\s(]*", between)
    if found and found[1] in names:
        yield number, start + found.start(1), start + found.end(1), names[found[1]]


def _span(
    lines: list[str], node: ast.expr | ast.stmt, new: str
) -> Iterator[tuple[int, int, int, str]]:
    if node.lineno == node.end_lineno:
        start = _column(lines, node.lineno, node.col_offset)
        yield node.lineno, start, _end_column(lines, node), new


def _column(lines: list[str], number: int, offset: int) -> int:
    """The column in characters of an offset in bytes."""
    return len(lines[number - 1].encode()[:offset].decode())


def _end_column(lines: list[str], node: ast.expr | ast.stmt) -> int:
    return _column(lines, node.end_lineno or 0, node.end_col_offset or 0)
