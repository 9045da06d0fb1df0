"""Sphinx configuration. Build with ``make docs``; nothing is fetched from the network."""

from __future__ import annotations

import ast
import builtins
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src"
sys.path[:0] = [str(SOURCE), str(HERE)]

from docutils import nodes  # noqa: E402 -- the paths above must come first
from generate import write  # noqa: E402

import largebatch  # noqa: E402

project = "largebatch"
author = "The largebatch authors"
copyright = "The largebatch authors; Apache-2.0"
version = release = largebatch.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_generated"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 80

html_theme = "pydata_sphinx_theme"
html_title = "largebatch"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "largebatch"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "header_links_before_dropdown": 7,
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}

#: Packages whose names docstrings and signatures may mention. Their own pages are not linked,
#: since the inventories of other sites would have to be fetched.
_EXTERNAL = {"collections", "concurrent", "datetime", "numpy", "np", "os", "pathlib", "torch"}


def _names_of_the_package() -> set[str]:
    """Every name that a module of the package defines or imports."""
    found: set[str] = set()
    for path in SOURCE.glob("largebatch/*/**/*.py"):
        found.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.ImportFrom):
                found.update(alias.asname or alias.name for alias in node.names)
    return found


def _without_link(app: Any, env: Any, node: Any, contnode: nodes.Element) -> Any:
    """Resolve a reference that names no page of the site.

    A public name is linked, under whatever module it was mentioned. Another name that the package
    or a package of :data:`_EXTERNAL` has is shown without a link. A name that nobody has is left
    unresolved, and fails the build.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    root, _, _ = target.partition(".")
    last = target.rpartition(".")[2]
    domain = env.get_domain("py")
    for name, entry in domain.objects.items():
        if name.rpartition(".")[2] == last and not entry.aliased and entry.objtype == "class":
            reference = nodes.reference("", "", contnode, internal=True)
            page = app.builder.get_relative_uri(env.current_document.docname, entry.docname)
            reference["refuri"] = f"{page}#{entry.node_id}"
            return reference
    known = root in _EXTERNAL or hasattr(builtins, root) or last in app.config.names_of_the_package
    return contnode if known else None


def setup(app: Any) -> None:
    """Generate the reference pages' tables, and check references by name."""
    write(HERE / "_generated")
    app.add_config_value("names_of_the_package", _names_of_the_package(), "")
    app.connect("missing-reference", _without_link)
