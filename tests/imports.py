"""The import graph of a tree of packages, read from its source, and what is wrong with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

#: executed: when the importer is; types: under ``TYPE_CHECKING``; function: inside a function.
Kind = Literal["executed", "types", "function"]


@dataclass(frozen=True)
class Import:
    """One import of a module of the tree by another."""

    importer: str  # dotted, from the root of the tree, as the next
    imported: str
    names: tuple[str, ...]  # that are taken from it, as they are called there
    kind: Kind
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.importer} imports {self.imported}"


@dataclass(frozen=True)
class Graph:
    """All modules below some packages, and the imports between them."""

    modules: Mapping[str, Path]  # by dotted name, without ``__init__``
    imports: Sequence[Import]
    # Those that name the tree in full, by which a module could be loaded twice under two names.
    absolute: Sequence[str]


def read_graph(root: Path, packages: Sequence[str], name: str = "largebatch") -> Graph:
    """Read the import graph of ``root/package`` for each package; ``name`` is the root's own."""
    files = sorted(path for package in packages for path in (root / package).rglob("*.py"))
    modules = {_dotted(path.relative_to(root)): path.relative_to(root) for path in files}
    public = {
        module: set(_public_names(root / path))
        for module, path in modules.items()
        if path.name == "__init__.py"
    }
    imports, absolute = [], []
    for importer, path in modules.items():
        # The package that one leading dot in a relative import refers to.
        package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        for node, kind in _import_statements(ast.parse((root / path).read_text()), "executed"):
            if isinstance(node, ast.Import) or not node.level:
                names = [alias.name for alias in node.names]
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                absolute += [
                    f"{path}:{node.lineno}: {importer} imports {full} by its absolute name"
                    for full in names
                    if full.split(".")[0] in (name, *packages)
                ]
                continue
            steps = package.split(".")
            base = [*steps[: len(steps) - node.level + 1], *(node.module or "").split(".")]
            source = ".".join(part for part in base if part)
            taken: dict[str, list[str]] = {}
            for alias in node.names:
                target = f"{source}.{alias.name}" if source else alias.name
                if alias.name in public.get(source, ()):
                    target = (
                        source  # a public name of a package that also has a module of this name
                    )
                while target and target not in modules:  # a name inside a module
                    target = target.rpartition(".")[0]
                if target:  # `from .. import __version__` reaches no package of the tree
                    taken.setdefault(target, []).append(alias.name)
            imports += [
                Import(importer, target, tuple(names), kind, path, node.lineno)
                for target, names in taken.items()
            ]
    return Graph(modules, imports, absolute)


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _public_names(path: Path) -> Iterator[str]:
    """The strings in ``__all__``."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
            for value in ast.walk(node.value):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def _import_statements(
    node: ast.AST, kind: Kind
) -> Iterator[tuple[ast.Import | ast.ImportFrom, Kind]]:
    """Each import below ``node``, which is of this kind itself, and its kind."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, kind
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield from _import_statements(ast.Module([statement], []), "types")
            for statement in child.orelse:
                yield from _import_statements(ast.Module([statement], []), kind)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _import_statements(child, "function" if inside else kind)


# --- faults: each function returns one message per fault -------------------------------------


def import_cycles(graph: Graph) -> list[str]:
    """Report each cycle of imports at the top of modules, those for types among them.

    One through an import inside a function is no fault.
    """
    edges: dict[str, dict[str, Import]] = {module: {} for module in graph.modules}
    for one in graph.imports:
        if one.kind == "function":
            continue
        # Importing a.b.c executes a and a.b as well, unless the importer lies inside them.
        parts = one.imported.split(".")
        for stop in range(1, len(parts) + 1):
            executed = ".".join(parts[:stop])
            inside = f"{one.importer}.".startswith(f"{executed}.")
            if executed == one.imported or not inside:
                edges[one.importer].setdefault(executed, one)
    found, done = [], set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            cycle = [*trail[trail.index(module) :], module]
            steps = [edges[a][b] for a, b in pairwise(cycle)]
            found.append("cycle: " + "; ".join(map(str, steps)))
        elif module not in done:
            for imported in edges[module]:
                visit(imported, [*trail, module])
            done.add(module)

    for module in edges:
        visit(module, [])
    return found


def imports_between(graph: Graph, independent: Sequence[str]) -> list[str]:
    """Report each import of another package by one that must be independent."""
    return [
        f"{one}; {package} may import nothing but itself"
        for one in graph.imports
        for package in independent
        if one.importer.split(".")[0] == package and one.imported.split(".")[0] != package
    ]


def upward_imports(graph: Graph, package: str, order: Sequence[str]) -> list[str]:
    """Report imports from a lower to a higher level of ``package``, and modules without a level.

    ``order`` has the levels from the lowest on; names in one string are on one level.
    """
    level = {name: height for height, names in enumerate(order) for name in names.split()}
    faults = [
        f"{graph.modules[module]}: {module} is missing in the order of {package}"
        for module in graph.modules
        if module.split(".")[0] == package and module.count(".") == 1
        if module.split(".")[1] not in level
    ]
    faults += [
        f"{name} is in the order of {package} and not in the tree"
        for name in level
        if f"{package}.{name}" not in graph.modules
    ]
    for one in graph.imports:
        importer, imported = one.importer.split("."), one.imported.split(".")
        if importer[0] != package or imported[0] != package or len(importer) == 1:
            continue
        if len(imported) == 1:  # the package itself, whose __init__ is above all its modules
            faults.append(f"{one}; {importer[1]} is below {package}/__init__.py")
        elif level.get(importer[1], 0) < level.get(imported[1], 0):
            faults.append(f"{one}; {importer[1]} is below {imported[1]}")
    return faults


def imports_by_others(graph: Graph, package: str, allowed: Sequence[str]) -> list[str]:
    """Report each import of ``package`` by a module outside it that is not in ``allowed``."""
    return [
        f"{one}; only {' and '.join(allowed)} may"
        for one in graph.imports
        if f"{one.imported}.".startswith(f"{package}.")
        if one.importer not in allowed and not f"{one.importer}.".startswith(f"{package}.")
    ]


def imports_of_internals(graph: Graph, importer: str, interfaces: Sequence[str]) -> list[str]:
    """Report each import by ``importer`` of another package's module that is not an interface."""
    return [
        f"{one}; import it from {' or '.join(i for i in interfaces if i.split('.')[0] == package)}"
        for one in graph.imports
        if one.importer.split(".")[0] == importer
        if (package := one.imported.split(".")[0]) != importer and one.imported not in interfaces
    ]
