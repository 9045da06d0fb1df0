"""The page: one file of HTML that needs nothing but a browser, and no network.

Plotly (MIT licence) draws the figures; its script is copied into the page from the Python package.
A Content Security Policy admits the page's own scripts, by their hashes, and no request to
anywhere, so that text from a run can neither run as a script nor load or send anything.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path

from ... import __version__
from ..errors import RecipeError
from . import figures, tables
from .curves import charts, cut
from .groups import Group, notes
from .reached import target_of
from .shares import by_run

_CONFIG = {
    "displaylogo": False,
    "displayModeBar": "hover",
    "showTips": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
}


def write_page(
    path: Path, found: Sequence[Group], target: float | None = None, left_out: Sequence[str] = ()
) -> None:
    """Write the report of some runs. A page that is there already stays until it is replaced whole.

    Args:
        path: The file.
        found: The runs, grouped.
        target: Top-1 in percent to tell the way to; None: the recipes' own.
        left_out: A note about each run that is not shown.

    Raises:
        RecipeError: The file cannot be written.
    """
    text = render(found, target, left_out)
    place = path.resolve()  # where it is a link, the page that it leads to is replaced
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        # A folder's name may be bytes that are no UTF-8.
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(place)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise RecipeError(
            f"--out: cannot write {path}: {error.strerror}; valid: a file in a folder that exists"
        ) from None


def render(
    found: Sequence[Group], target: float | None = None, left_out: Sequence[str] = ()
) -> str:
    """Return the report of some runs as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    runs = [run for group in found for run in group.runs.values()]
    single = runs[0] if len(runs) == 1 else None
    drawn, rows = charts(found), by_run(found)
    drawings = {"curves": figures.of_curves(found, drawn)}
    if single and (ratios := figures.of_trust_ratios(single)):
        drawings["ratios"] = ratios
    if not single and any(rows.values()):
        drawings["bars"] = figures.of_shares(rows)
    html = dict.fromkeys(("curves", "ratios", "bars"), "")
    for name, drawing in drawings.items():
        html[name] = to_html(
            *(drawing, _CONFIG),
            include_plotlyjs=False,
            full_html=False,
            div_id=name,
            validate=False,
        )
    scripts = [get_plotlyjs(), _file("page.js")]
    # Plotly escapes `<` in its JSON, so no text of a run ends its script or begins another.
    own = re.findall("<script>(.*?)</script>", "".join(html.values()), re.DOTALL)
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        lstrip_blocks=True,
    )
    statuses = [run.status for run in runs]
    counts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    recipes = list(dict.fromkeys(run.recipe_name for run in runs if run.recipe_name))
    name = recipes[0] if recipes else runs[0].folder.resolve().name
    name += f", seed {runs[0].seed}" if runs[0].seed is not None else ""
    what = [runs[0].keys.get("model.name"), runs[0].keys.get("optimizer.name")]
    several = f"{len(runs)} runs" + (f" of {recipes[0]}" if len(recipes) == 1 else "")
    return environment.get_template("page.html").render(
        title=name if single else several,
        lead=", ".join(str(w) for w in (*what, tables.outcome(single)) if w)
        if single
        else ", ".join(counts),
        notes=[*left_out, *notes(found)],
        summary=tables.summary(single, target_of(single, target)) if single else [],
        groups=[] if single else tables.group_tables(found, target),
        differences=None if single else tables.difference_table(found),
        figures=html,
        cuts={chart.title: f"{top:g}" for chart in drawn if (top := cut(chart))},
        scheduled=all(run.schedule for run in runs),
        per_run=None if single else tables.runs_table(found, target),
        setting=tables.setting(single) if single else [],
        recipe=single.recipe_text if single else "",
        version=__version__,
        css=_file("page.css"),
        scripts=scripts,
        hashes=[_hash(script) for script in (*scripts, *own)],
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """The hash of a script as a Content Security Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
