"""The curves of the page as plotly takes them: a chart for each quantity, and a menu for the axis.

They are transparent, in colours for a light and a dark page; the page's CSS colours their text.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..files import number
from ..training.folder.outcome import Line
from .runs import AXES, Group, Run

#: Of series; close to Okabe and Ito's (https://jfly.uni-koeln.de/color/).
COLORS = ("#1f83c4", "#d55e00", "#009e73", "#b4608c", "#8a6500", "#7a68c8", "#7f8893")
_DASHES = ("solid", "6px,3px", "2px,3px", "7px,3px,2px,3px", "12px,4px", "12px,3px,2px,3px")

_TRAINING, _VALIDATION, _AVERAGE = "training", "validation", "validation, EMA of weights"
_SHARE = "% of time"
#: Of each chart: its heading, the unit, and the key of the lines by label of the curve.
_CHARTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Loss", "", {_TRAINING: "loss", _VALIDATION: "loss", _AVERAGE: "ema_loss"}),
    ("Top-1 accuracy", "%", {_VALIDATION: "top1", _AVERAGE: "ema_top1"}),
    ("Learning rate", "", {_TRAINING: "lr"}),
    ("Global batch size", "images", {_TRAINING: "batch_size"}),
    ("Gradient norm before clipping", "", {_TRAINING: "gradient_norm"}),
    ("Gradient noise scale", "images", {_TRAINING: "noise_scale"}),
    ("Loss scale", "", {_TRAINING: "loss_scale"}),
    ("Steps skipped so far", "", {_TRAINING: "skipped_steps"}),
    ("Throughput", "images/s", {_TRAINING: "images_per_second"}),
    ("Memory", "GB", {_TRAINING: "memory_bytes"}),
    ("Wait for input, slowest rank", _SHARE, {_TRAINING: "wait_seconds"}),
    ("Wait for the all-reduce", _SHARE, {_TRAINING: "all_reduce_wait_seconds"}),
)
_RATIOS = "Trust ratio of each layer"
#: Beginnings of the headings of charts whose values may span powers of ten, and from where on they
#: are drawn on a logarithmic axis.
_LOGARITHMIC, _SPAN = ("Loss", "Gradient", _RATIOS), 1000
#: Number of parts into which a long curve is thinned.
_PARTS = 300

Figure = dict[str, Any]


class Curve(NamedTuple):
    """A curve: its series, its name, and its values by axis of :data:`AXES`."""

    series: str
    name: str
    at: dict[str, list[float]]
    values: list[float | None]


class Chart(NamedTuple):
    """A chart: its heading, the unit of its values, and its curves."""

    title: str
    unit: str
    curves: list[Curve]


def charts(groups: Sequence[Group]) -> list[Chart]:
    """The charts that have curves: of one run with both splits, of several each split apart."""
    runs = [(group.name, name, run) for group in groups for name, run in group.runs.items()]
    single = len(runs) == 1
    found = []
    for title, unit, keys in _CHARTS:
        for part in [keys] if single else [{label: keys[label]} for label in keys]:
            heading = title if len(part) == len(keys) else f"{title}, {next(iter(part))}"
            drawn = [
                _curve(label if single else group, label if single else name, run, label, key)
                for label, key in part.items()
                for group, name, run in runs
            ]
            found.append(Chart(heading, unit, [curve for curve in drawn if curve.values]))
    ratios = runs[0][2].metrics.of("trust_ratio") if single else []
    layers = dict.fromkeys(key for n in ratios for key, of in n.items() if isinstance(of, list))
    drawn = [_curve("trust ratio", layer, runs[0][2], "", layer) for layer in layers]
    return [chart for chart in (*found, Chart(_RATIOS, "median", drawn)) if chart.curves]


def figure(groups: Sequence[Group]) -> Figure:
    """Return the figure of all charts of some runs, with a menu that changes the axis of all."""
    drawn = charts(groups)
    single = sum(len(group.runs) for group in groups) == 1
    axis = "steps" if single else "epochs"
    every = [(cell, curve) for cell, chart in enumerate(drawn) for curve in chart.curves]
    series = list(dict.fromkeys(curve.series for _, curve in every))
    # What the legend shows, and then what is drawn.
    traces = [_style(i) | {"y": [None], "name": _plain(of)} for i, of in enumerate(series)]
    places = [{label: [0.0] for label in AXES} for _ in series]
    for cell, curve in every:
        title, unit, _ = drawn[cell]
        own = {"name": _plain(curve.name), "y": curve.values, "meta": title, "showlegend": False}
        marks = {"mode": "lines+markers", "marker": {"size": 5}} if len(curve.values) < 60 else {}
        hover = {"hovertemplate": f"%{{y:.5~g}} {unit}<br>%{{x:,.4~g}}"}
        traces.append(_style(series.index(curve.series)) | own | marks | hover | _axes(cell))
        places.append(curve.at)
    layout = _layout([f"<b>{title}</b>  {unit}" for title, unit, _ in drawn], axis)
    for cell, chart in enumerate(drawn):
        known = [value for curve in chart.curves for value in curve.values if value is not None]
        spans = known and max(known) > _SPAN * min(known) > 0
        if spans and chart.title.startswith(_LOGARITHMIC):
            layout[_axes(cell)["yaxis"].replace("y", "yaxis")] |= {"type": "log", "dtick": 1}
    names = [name for name in layout if name.startswith("xaxis")]
    buttons = []
    for label in AXES:
        new = {"xaxis.autorange": True, **{f"{name}.title.text": label for name in names}}
        args = [{"x": [place[label] for place in places]}, new]
        buttons.append({"label": label, "method": "update", "args": args})
    menu = {"type": "buttons", "direction": "right", "active": AXES.index(axis)}
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 30}}
    layout["updatemenus"] = [menu | place | {"font": {"size": 11}, "buttons": buttons}]
    placed = [trace | {"x": at[axis]} for trace, at in zip(traces, places, strict=True)]
    return {"data": placed, "layout": layout}


def _curve(series: str, name: str, run: Run, label: str, key: str) -> Curve:
    """The curve of a key; that of a layer's trust ratios where the label is empty."""
    splits = {_TRAINING: "train", _VALIDATION: "val", _AVERAGE: "val", "": "trust_ratio"}
    lines = [line for line in run.metrics.of(splits[label]) if key in line]
    values = [_value(line, key) for line in lines]
    points = thinned(values)
    at = run.positions([lines[i] for i in points])
    return Curve(series, name, at, [values[i] for i in points])


def _value(line: Line, key: str) -> float | None:
    """The value of a key in the unit of its chart; of seconds, the share of those of the line."""
    of, seconds = line[key], number(line.get("seconds"))
    # Of trust ratios there are the least, the median and the greatest.
    value = number(of[1] if isinstance(of, list) and len(of) == 3 else of)
    if value is None or not key.endswith("_seconds"):
        return value and value / 1e9 if key == "memory_bytes" else value
    return round(100 * value / seconds, 4) if seconds else None


def thinned(values: Sequence[float | None]) -> list[int]:
    """Indices of the points to draw: both ends, and least and greatest of each equal part."""
    count = len(values)
    found = {count - 1} if count else set()
    for part in np.array_split(np.arange(count), min(count, _PARTS)) if count else ():
        known = [(value, int(i)) for i in part if (value := values[i]) is not None]
        found |= {int(part[0]), *((min(known)[1], max(known)[1]) if known else ())}
    return sorted(found)


def _style(series: int) -> Figure:
    """How the curves of a series are drawn, and what the legend shows and hides together."""
    color, dash = COLORS[series % len(COLORS)], _DASHES[series % len(_DASHES)]
    line = {"color": color, "dash": dash, "width": 1.7}
    return {"type": "scatter", "mode": "lines", "legendgroup": str(series), "line": line}


def _layout(titles: Sequence[str], axis: str) -> Figure:
    """A cell for each title; the page's script puts the cells into rows and columns."""
    clear = "rgba(0,0,0,0)"
    layout: Figure = {
        **{"paper_bgcolor": clear, "plot_bgcolor": clear, "modebar": {"bgcolor": clear}},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#7f8893"},
        "margin": {"l": 48, "r": 12, "t": 84, "b": 48},
        "hoverlabel": {"bgcolor": "#2b3036", "font": {"color": "#ffffff"}, "namelength": 40},
        "legend": {"orientation": "h", "yref": "container", "x": 0, "y": 1, "yanchor": "top"},
        "grid": {"rows": 1, "columns": 1, "pattern": "independent", "ygap": 0.36},
        **{"hovermode": "closest", "meta": {"cells": len(titles)}, "annotations": []},
    }
    for cell, title in enumerate(titles):
        x, y = _axes(cell).values()
        place = {"xref": f"{x} domain", "yref": f"{y} domain", "x": 0, "y": 1, "showarrow": False}
        look = {"xanchor": "left", "yanchor": "bottom", "font": {"size": 13}}
        layout["annotations"].append({"text": title} | place | look)
        line = {"rangemode": "tozero", "zeroline": False}
        layout[x.replace("x", "xaxis")] = line | {
            **{"title": {"text": axis, "standoff": 6}, "matches": "x" if cell else None},
            **{"showgrid": False, "ticks": "outside", "ticklen": 4},
        }
        layout[y.replace("y", "yaxis")] = line | {"automargin": True, "nticks": 6}
    return layout


def _axes(cell: int) -> dict[str, str]:
    return {"xaxis": f"x{cell + 1}" if cell else "x", "yaxis": f"y{cell + 1}" if cell else "y"}


def _plain(text: str) -> str:
    """Text that plotly, which reads names as a kind of HTML, shows as it is."""
    return html.escape(text, quote=False)
