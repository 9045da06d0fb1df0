"""The page: one file of HTML that needs nothing but a browser, and no network.

Plotly (MIT licence) draws the curves; its script is copied into the page from the Python package.
A Content Security Policy admits the page's own scripts, by their hashes, and no request to
anywhere, so that text from a run can neither run as a script nor load or send anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources

from ... import __version__
from ..output import template
from ..training.folder.outcome import Outcome
from .figures import figure
from .runs import PARTS, QUANTITIES, Estimate, Group, differences

_CONFIG = {
    "displaylogo": False,
    "showTips": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
}


def render(groups: Sequence[Group], notes: Sequence[str] = ()) -> str:
    """Return the report of some runs as HTML; a reader has to know the ``notes`` about them."""
    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    curves = to_html(
        *(figure(groups), _CONFIG),
        include_plotlyjs=False,
        full_html=False,
        div_id="curves",
        validate=False,
    )
    # Plotly escapes `<` in its JSON, so no text of a run ends its script or begins another.
    own = re.findall("<script>(.*?)</script>", curves, re.DOTALL)
    scripts = [get_plotlyjs(), _file("page.js")]
    runs = [run for group in groups for run in group.runs.values()]
    recipes = {run.outcome.recipe for run in runs}
    of = f" of {recipes.pop()}" if len(recipes) == 1 and None not in recipes else ""
    states = [run.outcome.state for run in runs]
    return template(__package__, "page.html", autoescape=True).render(
        title=groups[0].name if len(runs) == 1 else f"{len(runs)} runs{of}",
        lead=_state(runs[0].outcome)
        if len(runs) == 1
        else ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        notes=notes,
        table_of=results(groups),
        names=[group.name for group in groups],
        differences=[[k, *v] for k, v in differences([g.runs.values() for g in groups]).items()],
        parts=PARTS,
        shares={group.name: group.shares for group in groups},
        curves=curves,
        run=runs[0] if len(runs) == 1 else None,
        version=__version__,
        css=_file("page.css"),
        scripts=scripts,
        hashes=[_hash(script) for script in (*scripts, *own)],
    )


def results(groups: Sequence[Group]) -> list[list[str]]:
    """Return the table of what runs and groups of several reached: its columns, then its rows."""
    rows: list[tuple[list[str], Estimate | None, dict[str, Estimate]]] = []
    for group in groups:
        against, several = group.against(groups[0]), len(group.runs) > 1
        if several:
            rows.append(([group.name, group.states], against, group.estimates))
        for name, run in group.runs.items():
            found: dict[str, Estimate] = {key: (of, None) for key, of in run.reached.items()}
            rows.append(([name, _state(run.outcome)], None if several else against, found))
    keys = [key for key in QUANTITIES if any(key in found for *_, found in rows)]
    table = [["run", "state", *(QUANTITIES[key][0] for key in keys)]]
    for names, _, found in rows:
        table.append(names + [_estimate(found.get(key), QUANTITIES[key][1]) for key in keys])
    if any(against for _, against, _ in rows):
        differences = ["top-1 against the first", *(_difference(of) for _, of, _ in rows)]
        table = [[*row[:3], cell, *row[3:]] for row, cell in zip(table, differences, strict=True)]
    return table


def _state(outcome: Outcome) -> str:
    """How a run ended or where it is, in words."""
    if outcome.state == "finished":
        return "finished"
    of = f" of {outcome.epochs:g}" if outcome.epochs else ""
    reason = outcome.reason if outcome.state != "running" else ""
    return f"{outcome.state} at epoch {outcome.epoch or 0:.4g}{of}" + (f": {reason}" * bool(reason))


def _estimate(estimate: Estimate | None, digits: int) -> str:
    if estimate is None:
        return "—"
    # There is no interval of one seed, or of values that are equal.
    values = [estimate[0], *([estimate[1]] if estimate[1] else [])]
    large = abs(estimate[0]) >= 1e6  # as of a loss that has grown out of bounds
    return " ± ".join(f"{of:.3g}" if large else f"{of:,.{digits}f}" for of in values)


def _difference(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    mean, half = estimate
    text = f"{mean:+.2f}".replace("-", "\N{MINUS SIGN}")
    if half is None:
        return f"{text}, one seed"
    return f"{text} ± {half:.2f}" + (", not significant" if abs(mean) <= half else "")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """The hash of a script as a Content Security Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
