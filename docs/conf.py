"""Sphinx configuration. Build with ``make docs``; nothing is fetched from the network."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent), str(HERE)]

_VERSION = re.search(
    r'__version__ = "(.+)"', (HERE.parent / "src" / "largebatch" / "__init__.py").read_text()
)
assert _VERSION, "src/largebatch/__init__.py states no version"

project = "largebatch"
author = "The largebatch authors"
copyright = "The largebatch authors. Licence: Apache-2.0"
version = release = _VERSION[1]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    # Of this folder:
    "generate",
    "references",
]
exclude_patterns = ["_generated", "upstream"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 80

#: Pages whose tables are so wide that they need the room of the second sidebar.
_WIDE = [
    "guides/horovod",
    "guides/lars",
    "guides/muon",
    "guides/self-supervised",
    "reference/recipes",
    "results/all-reduce",
    "results/optimizer-step",
    "results/simulation",
]

html_theme = "pydata_sphinx_theme"
html_title = "largebatch"
# Pages at the top level have no section to navigate.
html_sidebars = {page: [] for page in ("contributing", "getting-started")}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "largebatch"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 7,
    "navigation_with_keys": False,
    "secondary_sidebar_items": {"**": ["page-toc"], **{page: [] for page in _WIDE}},
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
