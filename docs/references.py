"""Resolve what docstrings and signatures refer to, and fail the build where there is no such thing.

A class is documented under its room (``largebatch.pipeline.Batch``) and mentioned under the module
that defines it, or by its bare name. Pages of other projects are not linked, since their
inventories would have to be fetched.
"""

from __future__ import annotations

import ast
import builtins
from pathlib import Path
from typing import Any

from docutils import nodes

_PACKAGE = Path(__file__).parents[1] / "src" / "largebatch"

#: Packages whose names docstrings and signatures may mention.
_EXTERNAL = {"collections", "concurrent", "datetime", "numpy", "np", "os", "pathlib", "torch"}


def names_of_the_package() -> set[str]:
    """Every name that a module of the package defines or imports."""
    found: set[str] = set()
    for path in _PACKAGE.glob("*/**/*.py"):
        found.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.ImportFrom):
                found.update(alias.asname or alias.name for alias in node.names)
    return found


def resolve(app: Any, env: Any, node: Any, contnode: nodes.Element) -> nodes.Element | None:
    """Handle a reference that names no page of the site.

    A public class or function is linked, under whatever module it was mentioned. Another name of
    the package, or of a package in :data:`_EXTERNAL`, is shown without a link. Any other name is
    left unresolved, which fails the build.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    root, last = target.partition(".")[0], target.rpartition(".")[2]
    for name, entry in env.get_domain("py").objects.items():
        if name.rpartition(".")[2] == last and entry.objtype in ("class", "function", "exception"):
            reference = nodes.reference("", "", contnode, internal=True)
            page = app.builder.get_relative_uri(env.current_document.docname, entry.docname)
            reference["refuri"] = f"{page}#{entry.node_id}"
            return reference
    known = root in _EXTERNAL or hasattr(builtins, root) or last in app.package_names
    return contnode if known else None


def skip(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of a NamedTuple: the docstring of the class lists them."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field") else None


def setup(app: Any) -> dict[str, bool]:
    """Register as an extension of Sphinx."""
    app.package_names = names_of_the_package()
    app.connect("missing-reference", resolve)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
