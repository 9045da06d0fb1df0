"""What the page draws: curves with their positions, and the heat map, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .captions import caption, caption_of_stack, cut
from .curves import TRAINING, VALIDATION, Chart, Curve, charts, curves
from .groups import Group
from .positions import AXES
from .run import Run
from .shares import TITLES, stack, whole
from .thinning import kept
from .trust_ratios import heat_map

#: Number of points on a page, and the least and the most of a curve.
_POINTS, _FEWEST, _MOST = 80_000, 200, 2_000

#: Charts whose values span powers of ten.
_LOGARITHMIC = ("loss", "gradient_norm", "noise_scale", "loss_scale")


def draw(found: Sequence[Group]) -> dict[str, Any]:
    """Return what the page draws.

    The curves of one run are coloured by split, in charts that they share; those of several runs by
    group, in a chart for each split.

    Returns:
        ``axes``: labels by axis, and ``axis``: the one to start with. ``series``: names of the
        lines' styles. ``places``: positions by axis. ``charts``: each with ``title``, ``unit``,
        ``note``, ``may_be_log`` (whether its axis may be so), ``top`` (where it is cut; None:
        nowhere) and ``curves``, which have a ``name``, a ``series``, the ``place`` of their points,
        ``values`` and ``diverged``.
        ``stack``: the shares of the time of a single run, with ``names``, ``edges``, ``percent``
        and ``merged`` as in :class:`.shares.Stack`, the ``place`` of the edges, the shares of the
        ``whole`` run, the numbers of the parts' ``colors`` and a ``note``; None without one.
        ``ratios``: the heat map of a single run; None without one.
    """
    runs = {name: run for group in found for name, run in group.runs.items()}
    of_run = {name: curves(run) for name, run in runs.items()}
    single = next(iter(runs.values())) if len(runs) == 1 else None
    places = _Places(runs)
    stacked = _stack(runs, places) if single else None
    if stacked:  # it shows these curves
        of_run = {
            name: [c for c in each if c.chart != "time" or c.label not in TITLES.values()]
            for name, each in of_run.items()
        }
    every = [curve for each in of_run.values() for curve in each]
    most = max(_FEWEST, min(_MOST, _POINTS // max(1, len(every))))
    if single:
        series = list(dict.fromkeys(curve.label for curve in every))
    else:
        series = [group.name for group in found]
    group_of = {name: group.name for group in found for name in group.runs}
    drawn = []
    for chart, label in _charts(every, single is not None):
        lines, thinned = [], False
        for name, curve in _of_chart(of_run, chart, label):
            points = kept(curve.values, most)
            thinned |= len(points) < len(curve.values)
            line: dict[str, Any] = {
                "name": curve.label if single else name,
                "series": series.index(curve.label if single else group_of[name]),
                "place": places.number(name, [curve.steps[i] for i in points]),
                "values": [curve.values[i] for i in points],
                "diverged": (chart.key, curve.label) == ("loss", TRAINING)
                and runs[name].status == "diverged",
            }
            lines.append(line)
        is_loss = chart.key == "loss"
        top = cut([line["values"] for line in lines]) if is_loss else None
        of_split = label and (label != TRAINING or is_loss)
        drawn.append(
            {
                "title": f"{chart.title}, {label}" if of_split else chart.title,
                "unit": chart.unit,
                "note": caption(chart, label, list(runs.values()), top, thinned),
                "may_be_log": chart.key in _LOGARITHMIC,
                "top": top,
                "curves": lines,
            }
        )
    return {
        "axes": AXES,
        "axis": "step" if single else "epoch",
        "series": series,
        "charts": drawn,
        "stack": stacked,
        "ratios": _ratios(runs, places) if single else None,
        "places": places.all,
    }


class _Places:
    """Positions of the points of curves, held once for all curves of a run with the same steps."""

    def __init__(self, runs: dict[str, Run]) -> None:
        self.all: list[dict[str, list[float] | None]] = []
        self._runs = runs
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}

    def number(self, name: str, steps: Sequence[int]) -> int:
        """Return the index of the positions of some steps of a run."""
        key = name, tuple(steps)
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(self._runs[name].positions.at(steps))
        return self._numbers[key]


def _stack(runs: dict[str, Run], places: _Places) -> dict[str, Any] | None:
    """The shares of the time of the only run."""
    ((name, run),) = runs.items()
    found, of_run = stack(run), whole(run)
    if found is None or of_run is None:
        return None
    return {
        **asdict(found),
        "names": [TITLES[key] for key in found.keys],
        "whole": [of_run.percent[key] for key in found.keys],
        "colors": [list(TITLES).index(key) for key in found.keys],
        "place": places.number(name, found.edges),
        "note": caption_of_stack(run, found),
    }


def _ratios(runs: dict[str, Run], places: _Places) -> dict[str, Any] | None:
    """The heat map of the only run."""
    ((name, run),) = runs.items()
    found = heat_map(run)
    if found is None:
        return None
    return {**asdict(found), "place": places.number(name, found.edges)}


def _of_chart(
    of_run: dict[str, list[Curve]], chart: Chart, label: str | None
) -> list[tuple[str, Curve]]:
    """The curves of a chart, with the names of their runs."""
    return [
        (name, curve)
        for name, each in of_run.items()
        for curve in each
        if curve.chart == chart.key and label in (None, curve.label)
    ]


def _charts(every: Sequence[Curve], is_one: bool) -> list[tuple[Chart, str | None]]:
    """The charts, each with the label of its curves; None: of any label."""
    found: list[tuple[Chart, str | None]] = []
    for chart in charts(every):
        labels = list(dict.fromkeys(curve.label for curve in every if curve.chart == chart.key))
        if is_one:
            found.append((chart, None))
        elif chart.key == "top1":  # in training that of single steps, too noisy to compare
            found += [(chart, label) for label in labels if label != TRAINING]
        else:
            found += [(chart, label) for label in sorted(labels, key=lambda x: x != VALIDATION)]
    return found
