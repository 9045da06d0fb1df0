"""The picture of one step: what each rank does, and what is communicated meanwhile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..phases import (
    ALL_REDUCE_WAIT,
    AVERAGE,
    BACKWARD,
    FORWARD,
    HOST_TO_DEVICE,
    INPUT_WAIT,
    METERS,
    OPTIMIZER,
)
from .figures import Bar, Figures
from .intervals import difference, in_rows, union

PICTURE = "summary.png"

#: Most ranks that are drawn, the first ones.
MOST = 4

_HIDDEN, _EXPOSED = "communication, hidden", "communication, exposed"
#: Colours that differ in lightness too, close to the palette of Okabe and Ito.
_COLOURS = {
    INPUT_WAIT: "#999999",
    HOST_TO_DEVICE: "#cc79a7",
    FORWARD: "#56b4e9",
    BACKWARD: "#0072b2",
    ALL_REDUCE_WAIT: "#f5c7ac",
    OPTIMIZER: "#009e73",
    METERS: "#e6d32b",
    AVERAGE: "#8c613c",
    _HIDDEN: "#7f7fbf",
    _EXPOSED: "#d55e00",
}


def draw(found: Sequence[Figures], path: Path) -> None:
    """Draw the step that the figures show, with a row of lanes for each rank.

    Args:
        found: Figures of the ranks.
        path: The PNG file to write.

    Raises:
        OSError: It cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Patch

    drawn = list(found[:MOST])
    canvas = Canvas(figsize=(11, 1.4 + 1.7 * len(drawn)), layout="constrained")
    FigureCanvasAgg(canvas)
    axes: list[Any] = list(canvas.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0])
    together = max(f.start for f in drawn) < min(f.end for f in drawn)
    origin = min(f.start for f in drawn)
    used: set[str] = set()
    for figures, axis in zip(drawn, axes, strict=True):
        used |= _draw_rank(axis, figures, origin if together else figures.start)
    unit = "" if together else ", from its start on each rank: their clocks differ"
    axes[-1].set_xlabel(f"milliseconds{unit}")
    ends = [f.end - (origin if together else f.start) for f in drawn]
    axes[-1].set_xlim(0, 1005 * max(ends))
    patches = [Patch(color=_COLOURS[name], label=name) for name in _COLOURS if name in used]
    canvas.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False)
    first = drawn[0]
    canvas.suptitle(f"Step {first.shown}" + _hidden_in(first))
    canvas.savefig(path, dpi=110)


def _draw_rank(axis: Any, figures: Figures, origin: float) -> set[str]:
    """Draw the lanes of a rank; return the names of the colours that they take."""
    used = set()

    def box(name: str, start: float, end: float, bottom: float, height: float) -> None:
        used.add(name)
        place = (1000 * (start - origin), 1000 * (end - start))
        axis.broken_barh([place], (bottom, height), color=_COLOURS[name], linewidth=0)

    for bar in figures.bars:
        if bar.lane != "communication":
            bottom = {"compute": 1.1, "input": 2.1, "copies": 3.1}[bar.lane]
            box(bar.name, bar.start, bar.end, bottom, 0.8)
    computes = union(
        (bar.start, bar.end)
        for bar in figures.bars
        if bar.lane == "compute" and bar.name != ALL_REDUCE_WAIT
    )
    reduces = [bar for bar in figures.bars if bar.lane == "communication"]
    rows = in_rows([(bar.start, bar.end) for bar in reduces])
    height = 0.8 / (max(rows, default=0) + 1)
    width = figures.end - figures.start
    for bar, row in zip(reduces, rows, strict=True):
        bottom = 0.9 - (row + 1) * height
        box(_HIDDEN, bar.start, bar.end, bottom, 0.9 * height)
        for start, end in difference([(bar.start, bar.end)], computes):
            box(_EXPOSED, start, end, bottom, 0.9 * height)
        if bar.end - bar.start > 0.04 * width and height > 0.1:
            middle = 1000 * ((bar.start + bar.end) / 2 - origin)
            axis.text(
                middle, bottom + 0.45 * height, _label(bar, width), ha="center", va="center",
                fontsize=7, color="white", clip_on=True,
            )  # fmt: skip
    for edge in (figures.start, figures.end):
        axis.axvline(1000 * (edge - origin), color="black", linewidth=0.8, linestyle=":")
    compute = "GPU" if figures.on_gpu else "main thread"
    lanes = ["communication", compute, "input", *(["copies"] if figures.on_gpu else [])]
    axis.set_yticks([0.5 + lane for lane in range(len(lanes))], lanes)
    axis.set_ylim(0, len(lanes))
    axis.set_title(f"rank {figures.rank}", loc="left", fontsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    return used


def _label(bar: Bar, width: float) -> str:
    """What a bar is of, as far as it has room: bucket and size."""
    match = re.match(r"all-reduce bucket (\d+), ([^,]+)", bar.name)
    if match is None:
        return ""
    wide = bar.end - bar.start > 0.15 * width
    return f"bucket {match[1]}, {match[2]}" if wide else match[1]


def _hidden_in(figures: Figures) -> str:
    if not figures.communication:
        return ""
    return (
        f": {figures.hidden / figures.communication:.0%} of the communication of "
        f"{len(figures.steps)} steps is hidden on rank {figures.rank}"
    )
