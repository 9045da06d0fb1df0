"""Report an estimate as text, a picture and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ...errors import RecipeError
from .estimate import CHECKED, Estimate, Interval, Row
from .fit import WIDEST

NUMBERS, PICTURE = "critical-batch.json", "critical-batch.png"


def write(estimate: Estimate, out: Path) -> list[Path]:
    """Write the numbers and the picture of an estimate into a folder; return their paths.

    Raises:
        RecipeError: One of them cannot be written.
    """
    paths = [out / NUMBERS, out / PICTURE]
    try:
        paths[0].write_text(json.dumps(as_json(estimate), indent=2) + "\n")
        _draw(estimate, paths[1])
    except OSError as error:
        raise RecipeError(
            f"--out: cannot write {error.filename or out}: {error.strerror}; valid: another folder"
        ) from None
    return paths


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON data; infinite numbers are null."""
    base, critical = estimate.base, estimate.critical
    content: dict[str, Any] = _finite(
        {
            "recipe": base.loaded.name,
            "batch_size": base.recipe.batch_size,
            "target_batch_size": min(estimate.batches),
            "training_images": base.images,
            "held_out_images": base.recipe.data.holdout,
            "rule": base.rule,
            "epochs": estimate.epochs,
            "loss_floor": base.floor,
            "target_loss": estimate.target_loss,
            "determined": critical is not None and critical.determined,
            "why": estimate.why,
            "critical_batch": critical and asdict(critical),
            "batches": [asdict(row) for row in estimate.rows()],
            "runs": [asdict(record) for record in estimate.records],
            "left_out": estimate.left_out,
        }
    )
    return content


def print_summary(estimate: Estimate) -> None:
    """Print the critical batch and the table of what each batch needs."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160  # do not wrap lines in a file or a pipe
    for line in head(estimate):
        console.print(line, markup=False)
    if not (rows := estimate.rows()):
        return
    table = Table(box=None, pad_edge=False)
    for column in ("batch", "epochs to the loss", "updates", "speed-up"):
        table.add_column(column, justify="right")
    table.add_column("by its own runs")
    for row in rows:
        cells = (f"{row.batch_size:,}", _text(row.epochs), f"{row.updates[0]:,.0f}")
        table.add_row(*cells, _text(row.speed_up), _own(row))
    console.print(table)
    console.print(
        "90 % intervals in brackets; the speed-up is that over the recipe's batch, "
        f"{estimate.base.recipe.batch_size:,}, by perfect GPUs in proportion to the batch",
        markup=False,
    )
    if far := [row.batch_size for row in rows if row.doublings > CHECKED + 1e-9]:
        console.print(
            "predictions are made for one doubling beyond the largest measured batch; "
            f"{_list(far)} is further out, where learning rates by rule often fail first",
            markup=False,
        )


def head(estimate: Estimate) -> list[str]:
    """Lines on what was measured, and the critical batch."""
    base, records, target = estimate.base, estimate.records, estimate.target_loss
    reached = f", which is {base.floor + target:.4f}" if target else ""
    diverged = {r.run.batch_size for r in records if r.status == "diverged"}
    lines = [
        f"{base.loaded.name}: epochs until the training loss at the end of a run is that of batch "
        f"{min(estimate.batches):,} after {estimate.epochs:g} epochs{reached}",
        f"{len(records)} runs of batches {_list(estimate.batches)} with the learning rate scaled "
        f"by {base.rule}, {sum(record.trained for record in records):.1f} epochs"
        + (f"; diverged: {_list(diverged)}" if diverged else ""),
    ]
    if estimate.left_out:
        lines.append(
            f"not made, as the time does not suffice: {estimate.left_out} runs; the same command "
            "continues"
        )
    return [*lines, f"critical batch: {describe(estimate)}"]


def describe(estimate: Estimate) -> str:
    """Describe the critical batch in a line."""
    critical = estimate.critical
    if critical is None:
        return f"not determined: {estimate.why}"
    low, high = f"{critical.low:,.0f}", f"{critical.high:,.0f}"
    if critical.determined:
        return f"{critical.batch_size:,.0f} images (90 %: {low} to {high})"
    if not math.isfinite(critical.high):
        return (
            f"not determined: at least {low} images, with no upper bound; needed: a larger batch "
            f"than {critical.largest:,}"
        )
    if not critical.low:
        return (
            f"not determined: at most {high} images, with no lower bound; needed: a smaller batch "
            f"than {critical.smallest:,}"
        )
    return (
        f"not determined: {low} to {high} images (90 %), which is wider than a factor of "
        f"{WIDEST:g}; needed: more --minutes, or a larger batch than {critical.largest:,}"
    )


def _own(row: Row) -> str:
    if row.own_epochs:
        return f"{row.own_epochs:.3g} epochs"
    if row.doublings <= 0:
        return "none ended near the loss"
    return f"predicted, {row.doublings:.2g} doubling{'s' * (row.doublings > 1)} beyond"


def _draw(estimate: Estimate, path: Path) -> None:
    """Draw the epochs to the same loss by batch size, dashed beyond the largest measured one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rows, critical = estimate.rows(), estimate.critical
    title = f"epochs to the training loss of batch {min(estimate.batches):,} after "
    axes.set_title(f"{estimate.base.loaded.name}: {title}{estimate.epochs:g} epochs", fontsize=10)
    if critical is not None:
        sizes = np.geomspace(rows[0].batch_size, rows[-1].batch_size, 100)
        factors = [critical.factor(float(size), min(estimate.batches)) for size in sizes]
        epochs, low, high = estimate.epochs * np.array(factors).T
        axes.fill_between(sizes, low, high, alpha=0.2, lw=0, label="90 % interval")
        within = sizes <= critical.largest * 1.001
        axes.plot(sizes[within], epochs[within], color="tab:blue", label="fit")
        axes.plot(sizes[~within], epochs[~within], "--", color="tab:blue", label="predicted")
        if sizes[-1] > (checked := critical.largest * 2**CHECKED) * 1.001:
            axes.axvspan(checked, sizes[-1], color="tab:gray", alpha=0.15, label="not checked")
        if sizes[0] <= critical.batch_size <= sizes[-1]:
            axes.axvline(critical.batch_size, color="tab:red", ls="--", label="critical batch")
        axes.set_ylim(bottom=0, top=1.6 * float(epochs.max()))
    own = [(row.batch_size, row.own_epochs) for row in rows if row.own_epochs]
    axes.plot(*np.array(own or np.empty((0, 2))).T, "o", color="black", label="by its own runs")
    axes.set_xscale("log", base=2)
    axes.set_xticks([row.batch_size for row in rows], [f"{row.batch_size:,}" for row in rows])
    axes.minorticks_off()
    axes.set_xlabel("batch size (images)")
    axes.set_ylabel("epochs to the same loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _text(interval: Interval) -> str:
    value, low, high = interval
    return f"{value:.3g} ({low:.3g} to {high:.3g})"


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(f"{number:,}" for number in sorted(numbers))


def _finite(value: Any) -> Any:
    """The value as JSON can hold it: without infinite numbers and numpy's types."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
