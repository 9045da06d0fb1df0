"""The result of a learning-rate range test as a table, a picture and JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...schema.optimizers import entry_of
from .range_test import MARGIN, RangeTest

PICTURE, NUMBERS = "range.png", "range.json"


def numbers(test: RangeTest) -> dict[str, Any]:
    """Return all results as JSON data; a loss that is not finite is null."""
    found = test.findings
    return {
        "recipe": test.recipe,
        "optimizer": test.optimizer,
        "batch_size": test.batch_size,
        "ranks": test.ranks,
        "present_lr": test.present_lr,
        "steepest_lr": found.steepest_lr,
        "lowest_lr": found.lowest_lr,
        "diverging_lr": found.diverging_lr,
        "suggested_lr": found.suggested_lr,
        "epochs": round(test.epochs, 4),
        "seconds": round(test.seconds, 1),
        "lr": test.lr,
        "loss": [_finite(loss) for loss in test.loss],
        "smoothed": [_finite(loss) for loss in found.smoothed],
    }


def show(test: RangeTest, out: Path, as_json: bool = False) -> None:
    """Write the picture and the numbers into a folder, and print a table, or the numbers."""
    written = write(test, out)
    if as_json:
        print(json.dumps(numbers(test), indent=1, allow_nan=False))
        return
    print_summary(test)
    for path in written:
        print(path)


def print_summary(test: RangeTest) -> None:
    """Print the rates that the test found."""
    found = test.findings
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("training loss falls fastest at", f"{found.steepest_lr:.3g}")
    table.add_row("training loss is lowest at", f"{found.lowest_lr:.3g}")
    diverges = f"not up to {test.lr[-1]:.3g}"
    if found.diverging_lr is not None:
        diverges = f"{found.diverging_lr:.3g}"
    table.add_row(f"{_title(test)} diverges at", diverges)
    if found.suggested_lr is not None:
        table.add_row(f"suggested peak (a {MARGIN:g}th of that)", f"{found.suggested_lr:.3g}")
    table.add_row("the recipe's peak", f"{test.present_lr:.3g}")
    console = Console(highlight=False, soft_wrap=True)
    ranks = "1 rank" if test.ranks == 1 else f"{test.ranks} ranks"
    console.print(
        f"{test.recipe}, batch {test.batch_size:,} on {ranks}: learning rates from "
        f"{test.lr[0]:.3g} to {test.lr[-1]:.3g} in {len(test.lr)} updates, {test.epochs:.2f} "
        f"epochs, {test.seconds:.0f} s",
        markup=False,
    )
    console.print(table)
    if found.suggested_lr is None:
        console.print("No peak is suggested: raise HIGH of --lr until the run diverges")


def write(test: RangeTest, out: Path) -> list[Path]:
    """Write the results and the picture into a folder; return their paths."""
    (out / NUMBERS).write_text(json.dumps(numbers(test), indent=1, allow_nan=False) + "\n")
    draw(test, out / PICTURE)
    return [out / NUMBERS, out / PICTURE]


def draw(test: RangeTest, path: Path) -> None:
    """Plot the training loss over the learning rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = test.findings
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(test.lr, test.loss, color="tab:blue", alpha=0.35, linewidth=1, label="each update")
    axes.plot(test.lr, found.smoothed, color="tab:blue", label="smoothed")
    for lr, name, color, style in (
        (test.present_lr, "the recipe's peak", "tab:gray", "--"),
        (found.suggested_lr, "suggested peak", "tab:green", "-"),
        (found.diverging_lr, f"{_title(test)} diverges", "tab:red", "-"),
    ):
        if lr is not None:
            axes.axvline(lr, color=color, linestyle=style, label=f"{name}: {lr:.3g}")
    axes.set_xscale("log")
    usual = [loss for loss in found.smoothed if math.isfinite(loss)]
    below = [loss for loss in test.loss if math.isfinite(loss)]
    # The losses of a diverging run would press the rest of the curve flat.
    axes.set_ylim(min(below) * 0.95, min(max(usual), 1.5 * usual[0]))
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss")
    axes.set_title(f"Learning-rate range test of {test.recipe}, global batch {test.batch_size:,}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=110)


def _title(test: RangeTest) -> str:
    return entry_of(test.optimizer).title


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
