"""The page: one file of HTML that needs nothing but a browser, and no network.

Plotly (MIT licence) draws the charts; its script is copied into the page from the Python package.
A Content Security Policy admits the page's own scripts, by their hashes, and no request to
anywhere, so that text from a run can neither run as a script nor load or send anything.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from ... import __version__
from ..errors import RecipeError
from . import shares, tables
from .charts import draw
from .curves import not_recorded
from .groups import Group
from .reached import reached, target_of
from .tables import Table

#: Line styles, each with a color of Okabe and Ito's palette (https://jfly.uni-koeln.de/color/).
COLORS = 7
DASHES = ("", "6 3", "2 3", "7 3 2 3", "12 4", "12 3 2 3")


def write_page(
    path: Path,
    found: Sequence[Group],
    target: float | None = None,
    left_out: Sequence[str] = (),
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
    from plotly.offline import get_plotlyjs

    runs = {name: run for group in found for name, run in group.runs.items()}
    single = next(iter(runs.values())) if len(runs) == 1 else None
    data = draw(found)
    scripts = [get_plotlyjs(), _file("page.js")]
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        lstrip_blocks=True,
    )
    summary: list[tuple[str, str]] = []
    setting: list[tuple[str, str]] = []
    per_run: Table | None = None
    groups: list[Table] = []
    compared: list[shares.Row] = []
    if single:
        summary = tables.summary(single, target_of(single, target))
        setting = tables.setting(single)
    else:
        rows = reached(found, target)
        groups = [tables.accuracy_table(rows), tables.time_table(rows)]
        per_run = tables.runs_table(found, target)
        compared = shares.rows(found)
    content: dict[str, Any] = {
        "title": _title(found),
        "lead": tables.lead(single) if single else _lead(found),
        "data": data,
        "series": [_style(i, name) for i, name in enumerate(data["series"])],
        "summary": summary,
        "setting": setting,
        "recipe": single.recipe_text if single else "",
        "groups": groups,
        "compared": compared if any(row.percent for row in compared) else [],
        "parts": _parts(compared),
        "by_group": len(compared) < len(runs),
        "absent": shares.ABSENT if any(not row.percent for row in compared) else "",
        "per_run": per_run,
        "differences": None if single else tables.difference_table(found),
        "notes": [*left_out, *tables.notes(found)],
        "missing": not_recorded(list(runs.values())),
        "version": __version__,
        "css": _file("page.css"),
        "scripts": scripts,
        "hashes": [_hash(script) for script in scripts],
    }
    return environment.get_template("page.html").render(content)


def _title(found: Sequence[Group]) -> str:
    runs = [run for group in found for run in group.runs.values()]
    recipes = list(dict.fromkeys(run.recipe_name for run in runs if run.recipe_name))
    if len(runs) > 1:
        return f"{len(runs)} runs of {recipes[0]}" if len(recipes) == 1 else f"{len(runs)} runs"
    name = recipes[0] if recipes else runs[0].folder.resolve().name
    return name if runs[0].seed is None else f"{name}, seed {runs[0].seed}"


def _lead(found: Sequence[Group]) -> str:
    statuses = [run.status for group in found for run in group.runs.values()]
    counts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    recipes = "1 recipe" if len(found) == 1 else f"{len(found)} recipes"
    return f"{recipes}; {', '.join(counts)}"


def _style(index: int, name: str) -> dict[str, Any]:
    return {"name": name, "color": index % COLORS, "dash": DASHES[index % len(DASHES)]}


def _parts(rows: Sequence[shares.Row]) -> list[dict[str, Any]]:
    """The parts of the time that some rows have: key, name and the number of the color."""
    return [
        {"key": key, "name": name, "color": color}
        for color, (key, name) in enumerate(shares.TITLES.items())
        if any(key in row.percent for row in rows if row.percent)
    ]


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """The hash of a script as a Content Security Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
