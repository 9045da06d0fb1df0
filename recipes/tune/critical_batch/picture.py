"""Draw an estimate: losses on one curve, epochs to the same loss, and speed-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import RecipeError
from .fit import CriticalBatch
from .prices import CHECKED, Price
from .result import Estimate


def draw(estimate: Estimate, found: Sequence[Price], path: Path) -> None:
    """Draw an estimate whose prices are known.

    Raises:
        RecipeError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    critical = estimate.critical
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    losses, epochs, speed = figure.subplots(1, 3)
    _draw_losses(losses, estimate, critical)
    if critical is not None:
        _draw_epochs(epochs, estimate, critical, found)
        _draw_speed(speed, estimate, critical, found)
    figure.suptitle(
        f"{estimate.base.loaded.name}: epochs to the training loss of batch "
        f"{min(estimate.batches):,} after {estimate.epochs:g} epochs"
    )
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise RecipeError(
            f"--out: cannot write {path}: {error.strerror}; valid: another folder"
        ) from None


def _draw_losses(axes: Any, estimate: Estimate, critical: CriticalBatch | None) -> None:
    """Draw the losses over effective epochs, on which those of one curve fall together."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    curves: dict[tuple[float, int], list[tuple[float, float]]] = {}
    left_out = []
    for record in estimate.records:
        if record.kind == "run" and record.status == "finished":
            run = record.run
            cost = 1 + run.batch_size / critical.batch_size if critical else 1.0
            point = (record.trained / cost, record.loss)
            if run.after or record in estimate.whole:
                curves.setdefault((run.after, run.batch_size), []).append(point)
            else:
                left_out.append(point)
    sizes = sorted({batch for _, batch in curves})
    starts = sorted({after for after, _ in curves})
    for (after, batch), points in sorted(curves.items()):
        x, y = zip(*sorted(points), strict=True)
        axes.plot(
            x,
            y,
            "osD^v"[starts.index(after) % 5],
            color=f"C{sizes.index(batch)}",
            label=f"batch {batch:,}" + (f", from epoch {after:.3g}" if after else ""),
        )
    if left_out:
        label = "far from the target, not counted"
        axes.plot(*zip(*left_out, strict=True), "o", color="gray", fillstyle="none", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("epochs / (1 + batch / critical batch)" if critical else "epochs")
    axes.set_ylabel("training loss above its least possible value")
    axes.set_title("runs of all batches on one curve" if critical else "runs", fontsize="medium")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7)


def _draw_epochs(
    axes: Any, estimate: Estimate, critical: CriticalBatch, found: Sequence[Price]
) -> None:
    smallest = min(estimate.batches)
    sizes = np.geomspace(found[0].batch_size, found[-1].batch_size, 100)
    factors = np.array([critical.factor(float(size), smallest) for size in sizes])
    factors *= estimate.epochs
    _draw_band(axes, sizes, factors, critical.largest)
    for bound, marker, label in (
        ("reached", "o", "by its own runs"),
        ("above", "^", "not reached by its longest run"),
        ("below", "v", "reached by its shortest run"),
    ):
        points = [
            (p.batch_size, p.measured.epochs)
            for p in found
            if p.measured and p.measured.bound == bound
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color="black", ms=5, label=label)
    if math.isfinite(critical.batch_size) and sizes[0] <= critical.batch_size <= sizes[-1]:
        axes.axvline(critical.batch_size, color="tab:red", ls="--", lw=1, label="critical batch")
    axes.set_ylim(bottom=0, top=1.6 * float(factors[:, 0].max()))
    axes.set_ylabel("epochs to the same loss")
    _finish(axes, found)


def _draw_speed(
    axes: Any, estimate: Estimate, critical: CriticalBatch, found: Sequence[Price]
) -> None:
    own = estimate.base.recipe.batch_size
    sizes = np.geomspace(found[0].batch_size, found[-1].batch_size, 100)
    factors = np.array([critical.factor(float(size), own) for size in sizes])
    speeds = (sizes / own)[:, None] / factors[:, [0, 2, 1]]
    axes.plot(sizes, sizes / own, ":", color="tab:gray", label="perfect")
    _draw_band(axes, sizes, speeds, critical.largest)
    axes.set_yscale("log", base=2)
    ticks = [2.0**power for power in range(-6, 8) if sizes[0] <= own * 2.0**power <= 2 * sizes[-1]]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylabel(f"speed-up over batch {own:,}, with perfect GPUs")
    _finish(axes, found)


def _draw_band(axes: Any, sizes: Any, values: Any, largest: int) -> None:
    """Draw a value with its interval, dashed beyond the largest measured batch."""
    axes.fill_between(
        sizes, values[:, 1], values[:, 2], alpha=0.2, color="tab:blue", lw=0, label="90 % interval"
    )
    within = sizes <= largest * 1.001
    axes.plot(sizes[within], values[within, 0], color="tab:blue", label="fit")
    axes.plot(sizes[~within], values[~within, 0], "--", color="tab:blue", label="predicted")
    checked = largest * 2**CHECKED
    if sizes[-1] > 1.001 * checked:
        axes.axvspan(checked, sizes[-1], color="tab:gray", alpha=0.15, lw=0, label="not promised")


def _finish(axes: Any, found: Sequence[Price]) -> None:
    axes.set_xscale("log", base=2)
    sizes = [price.batch_size for price in found]
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel("batch size (images)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left")
