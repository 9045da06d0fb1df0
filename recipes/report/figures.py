"""The figures of the page as plotly takes them: curves, shares of the time, trust ratios.

They are transparent, in colours for a light and a dark page; the page's CSS colours their text.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Sequence
from typing import Any

from ..files import number
from ..training.folder.outcome import Line
from .curves import TRAINING, Chart, Curve, cut
from .groups import Group
from .positions import AXES, Places
from .run import Run
from .shares import TITLES, Shares, shares

#: Of series and of the parts of the time; close to Okabe and Ito's (https://jfly.uni-koeln.de/color/).
COLORS = ("#1f83c4", "#d55e00", "#009e73", "#b4608c", "#8a6500", "#7a68c8", "#7f8893")
PARTS = ("#d55e00", "#f0e442", "#56b4e9", "#0072b2", "#cc79a7", "#009e73", "#5f6670")
_DASHES = ("solid", "6px,3px", "2px,3px", "7px,3px,2px,3px", "12px,4px", "12px,3px,2px,3px")
_PART_COLORS = dict(zip(TITLES, PARTS, strict=True))

#: Number of points on a page, the least and the most of a curve, and columns of a picture.
_POINTS, _FEWEST, _MOST, _COLUMNS = 50_000, 200, 2_000, 300
_SHARES = "Where the time of training went"

Figure = dict[str, Any]


def of_curves(found: Sequence[Group], drawn: Sequence[Chart]) -> Figure:
    """Return the figure of all charts, and of the shares of the time of a single run, over it."""
    runs = [run for group in found for run in group.runs.values()]
    single = len(runs) == 1
    group_of = {name: group.name for group in found for name in group.runs}
    every = [(cell, chart, curve) for cell, chart in enumerate(drawn) for curve in chart.curves]
    of = [curve.label if single else group_of[curve.name] for _, _, curve in every]
    series = list(dict.fromkeys(of))
    few = max(len(chart.curves) for chart in drawn) <= 4
    most = max(_FEWEST, min(_MOST, _POINTS // len(every)))
    # What the legend shows, and then what is drawn.
    traces = [_style(i) | {"y": [None], "name": _plain(name)} for i, name in enumerate(series)]
    places: list[Places] = [{axis: [0] for axis in AXES} for _ in series]
    for (cell, chart, curve), name in zip(every, of, strict=True):
        points = kept(curve.values, most)
        style = _style(series.index(name)) | _axes(cell) | {"showlegend": False}
        style |= {"name": _plain(curve.label if single else curve.name)}
        traces.append(style | _line(chart, curve, points, few))
        places.append(curve.run.positions.at([curve.steps[i] for i in points]))
    titles = [_title(chart.title, chart.unit) for chart in drawn]
    parts = _stack(runs[0], len(drawn)) if single else []
    if parts:
        traces += parts
        places += [runs[0].positions.at(_edges(runs[0].train))] * len(parts)
        titles.append(_title(_SHARES, "%"))
    figure = _figure(traces, places, titles, "step" if single else "epoch")
    layout = figure["layout"]
    layout["meta"]["parts"] = len(parts)
    layout["hovermode"] = "x unified" if few else "closest"
    linear: Figure = {}
    log: Figure = {}
    for cell, chart in enumerate(drawn):
        if chart.may_be_log:
            axis, top = _axes(cell)["yaxis"].replace("y", "yaxis"), cut(chart)
            layout[axis] |= {"range": [0, top]} if top else {}
            linear |= {f"{axis}.type": "linear", f"{axis}.range": [0, top] if top else None}
            linear |= {f"{axis}.autorange": not top}
            log |= {f"{axis}.type": "log", f"{axis}.autorange": True}
    button = {"label": "log", "method": "relayout", "args": [log], "args2": [linear]}
    layout["updatemenus"].append(_menu([button], -1) | {"x": 1, "xanchor": "right"})
    return figure


def of_shares(rows: dict[str, Shares]) -> Figure:
    """Return the figure of the shares of the time of some runs, a bar each."""
    names = [name if row else f"{name}: not recorded" for name, row in rows.items()]
    bar = {
        **{"type": "bar", "orientation": "h", "width": 0.45, "y": [_plain(name) for name in names]},
        **{"texttemplate": "%{x:.1f}", "hovertemplate": "%{y}: %{x:.1f} %", "textangle": 0},
        **{"textposition": "inside", "insidetextanchor": "middle"},
    }
    traces = [
        bar
        | {"name": TITLES[key], "marker": {"color": color}}
        | {"x": [row.get(key) for row in rows.values()]}
        for key, color in _PART_COLORS.items()
        if any(key in row for row in rows.values())
    ]
    place = {"x": 0, "xref": "x", "yref": "y"}
    layout = _layout(46 * len(rows) + 70) | {
        "annotations": [_text(_plain(n)) | place | {"y": i - 0.24} for i, n in enumerate(names)],
        "xaxis": {"visible": False, "range": [0, 100], "fixedrange": True},
        "yaxis": {"visible": False, "range": [len(rows) - 0.8, -0.8], "fixedrange": True},
        "uniformtext": {"minsize": 9, "mode": "hide"},
        "margin": {"l": 0, "r": 0, "t": 40, "b": 4},
    }
    return {"data": traces, "layout": layout | {"barmode": "stack"}}


def of_trust_ratios(run: Run) -> Figure | None:
    """Return the heat map of the trust ratios of a run's layers; None if it recorded none."""
    lines = run.trust_ratios
    layers = list(dict.fromkeys(key for line in lines for key in line if _ratios(line, key)))
    if not layers:
        return None
    ratios = [[_merged(column, layer) for column in _columns(lines)] for layer in layers]
    logs = [[math.log10(of[0]) if of and of[0] > 0 else None for of in row] for row in ratios]
    known = [value for row in logs for value in row if value is not None] or [0.0]
    powers = list(range(math.floor(min(known)), math.ceil(max(known)) + 1))
    trace = {
        **{"type": "heatmap", "z": logs, "zmin": powers[0], "zmax": powers[-1]},
        "y": [_plain(layer.removesuffix(".weight")) for layer in layers],
        "customdata": [[of or [math.nan] * 3 for of in row] for row in ratios],
        **{"colorscale": "Cividis", "hoverongaps": False},
        "hovertemplate": "%{customdata[0]:.3~g} (%{customdata[1]:.3~g} to %{customdata[2]:.3~g})"
        "<extra>%{y}</extra>",
        "colorbar": {
            **{"orientation": "h", "thickness": 8, "outlinewidth": 0},
            **{"yref": "container", "y": 0, "yanchor": "bottom", "ypad": 4},
            **{"tickvals": powers, "ticktext": [f"{10.0**power:g}" for power in powers]},
        },
    }
    title = _title("Trust ratio by layer", "median")
    figure = _figure([trace], [run.positions.at(_edges(lines))], [title], "step")
    layout = figure["layout"]
    layout["meta"]["height"] = 15 * len(layers) + 180
    layout["margin"]["b"] = 88
    layout["updatemenus"][0] |= {"x": 1, "xanchor": "right"}  # there is room on the left
    layout["yaxis"] |= {
        **{"type": "category", "autorange": "reversed", "tickmode": "linear"},
        **{"fixedrange": True, "showgrid": False, "tickfont": {"size": 10}},
    }
    return figure


def kept(values: Sequence[float | None], most: int) -> list[int]:
    """Return the indices of the points of a curve to draw, ascending: at most ``most``, from 8 on.

    Of each of equal parts of a longer curve these are the first point, the least, the greatest and
    the first that is None, and of all the last. So a single spike stays visible, and so does a gap.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    parts = (most - 1) // 4
    found = {count - 1}
    for part in range(parts):
        inside = range(part * count // parts, (part + 1) * count // parts)
        known = [(value, i) for i in inside if (value := values[i]) is not None]
        found |= {inside[0], *[i for i in inside if values[i] is None][:1]}
        found |= {min(known)[1], max(known)[1]} if known else set()
    return sorted(found)


def _style(series: int) -> Figure:
    """How the curves of a series are drawn, and what the legend shows and hides together."""
    color, dash = COLORS[series % len(COLORS)], _DASHES[series % len(_DASHES)]
    line = {"color": color, "dash": dash, "width": 1.7}
    return {"type": "scatter", "mode": "lines", "legendgroup": str(series), "line": line}


def _line(chart: Chart, curve: Curve, points: Sequence[int], few: bool) -> Figure:
    """The values of a curve, with marks if it has few, and a cross where a run diverged."""
    values = [curve.values[i] for i in points]
    trace: Figure = {"y": values, "meta": _plain(chart.title), "cliponaxis": False}
    trace["hovertemplate"] = f"%{{y:.5~g}} {chart.unit}" + ("" if few else "<br>%{x:,.4~g}")
    last = max((i for i, value in enumerate(values) if value is not None), default=None)
    if chart.is_loss and curve.label == TRAINING and curve.run.status == "diverged":
        size = [10 if i == last else 0 for i in range(len(values))]
        trace |= {"mode": "lines+markers", "marker": {"symbol": "x", "size": size, "opacity": 1}}
    elif few and len(points) <= 60:
        trace |= {"mode": "lines+markers", "marker": {"size": 5}}
    return trace


def _stack(run: Run, cell: int) -> list[Figure]:
    """The shares of the time of a run over its steps, as areas in steps on each other."""
    columns = [shares(column) for column in _columns(run.train)]
    area = {
        **{"type": "scatter", "mode": "lines", "line": {"shape": "vh", "width": 0}},
        **{"stackgroup": "time", "legend": "legend2", "hovertemplate": "%{y:.1f} %"},
        **{"meta": _SHARES, **_axes(cell)},
    }
    return [
        area
        | {"name": f"{TITLES[key]} {percent:.1f} %", "fillcolor": _PART_COLORS[key]}
        | {"y": [of.get(key, 0.0) if of else None for of in (columns[0], *columns)]}
        for key, percent in shares(run.train).items()
    ]


def _figure(traces: list[Figure], places: list[Places], titles: list[Figure], axis: str) -> Figure:
    """Traces in a cell for each title, with a menu that changes the axis of all."""
    layout = _layout(0, len(titles))
    layout["grid"] = {"rows": 1, "columns": 1, "pattern": "independent", "ygap": 0.36}
    layout["annotations"] = []
    for cell, title in enumerate(titles):
        x, y = _axes(cell).values()
        layout["annotations"].append(title | {"xref": f"{x} domain", "yref": f"{y} domain"})
        line = {"rangemode": "tozero", "zeroline": False}
        layout[x.replace("x", "xaxis")] = line | {
            **{"title": {"text": AXES[axis], "standoff": 6}, "matches": "x" if cell else None},
            **{"showgrid": False, "ticks": "outside", "ticklen": 4},
        }
        layout[y.replace("y", "yaxis")] = line | {"automargin": True, "nticks": 6}
    names = [name for name in layout if name.startswith("xaxis")]
    buttons = []
    for key, label in AXES.items():
        new = {"xaxis.autorange": True, **{f"{name}.title.text": label for name in names}}
        args = [{"x": [place[key] or [] for place in places]}, new]
        buttons.append({"label": label, "method": "update", "args": args})
    layout["updatemenus"] = [_menu(buttons, list(AXES).index(axis))]
    placed = [trace | {"x": at[axis] or []} for trace, at in zip(traces, places, strict=True)]
    return {"data": placed, "layout": layout}


def _layout(height: int, cells: int = 0) -> Figure:
    """What all figures have; ``meta`` is for the page's script."""
    clear = "rgba(0,0,0,0)"
    legend = {"orientation": "h", "yref": "container", "x": 0, "traceorder": "normal"}
    return {
        **{"paper_bgcolor": clear, "plot_bgcolor": clear, "modebar": {"bgcolor": clear}},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#7f8893"},
        "margin": {"l": 48, "r": 12, "t": 84, "b": 48},
        "hoverlabel": {"bgcolor": "#2b3036", "font": {"color": "#ffffff"}, "namelength": 40},
        "legend": legend | {"y": 1, "yanchor": "top"},
        "legend2": legend | {"y": 0, "yanchor": "bottom"},
        "meta": {"cells": cells, "height": height, "parts": 0},
    }


def _menu(buttons: list[Figure], active: int) -> Figure:
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 30}}
    look = {"type": "buttons", "direction": "right", "active": active, "font": {"size": 11}}
    return place | look | {"buttons": buttons}


def _title(title: str, unit: str) -> Figure:
    short = title if len(title) <= 40 else f"{title[:39]}…"
    return _text(f"<b>{_plain(short)}</b>  {unit}") | {"x": 0, "y": 1}


def _text(text: str) -> Figure:
    place = {"showarrow": False, "xanchor": "left", "yanchor": "bottom"}
    return place | {"text": text, "font": {"size": 13}}


def _axes(cell: int) -> dict[str, str]:
    return {"xaxis": f"x{cell + 1}" if cell else "x", "yaxis": f"y{cell + 1}" if cell else "y"}


def _plain(text: str) -> str:
    """Text that plotly, which reads names as a kind of HTML, shows as it is."""
    return html.escape(text, quote=False)


def _columns(lines: Sequence[Line]) -> list[Sequence[Line]]:
    """Lines in equal parts, as many as a picture has columns."""
    size = max(1, -(-len(lines) // _COLUMNS))
    return [lines[i : i + size] for i in range(0, len(lines), size)]


def _edges(lines: Sequence[Line]) -> list[int]:
    """The steps at the edges of the columns, one more than there are."""
    return [0, *(column[-1]["step"] for column in _columns(lines))]


def _ratios(line: Line, layer: str) -> list[float | None] | None:
    """The least, the median and the greatest ratio of a layer; None if a line has none."""
    value = line.get(layer)
    return [number(of) for of in value] if isinstance(value, list) and len(value) == 3 else None


def _merged(column: Sequence[Line], layer: str) -> list[float] | None:
    """The median, the least and the greatest ratio of a layer in some lines."""
    rows = [of for line in column if (of := _ratios(line, layer)) and None not in of]
    if not rows:
        return None
    least, median, greatest = zip(*rows, strict=True)
    return [statistics.median(median), min(least), max(greatest)]
