"""Report an estimate as text and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...output import console, table, writing
from .estimate import Estimate, Interval
from .fit import WIDEST

NUMBERS = "critical-batch.json"


def write(estimate: Estimate, out: Path) -> Path:
    """Write the numbers of an estimate into a folder; return their path."""
    path = out / NUMBERS
    with writing(path):
        path.write_text(json.dumps(as_json(estimate), indent=2) + "\n")
    return path


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON data; infinite numbers are null."""
    base, critical = estimate.base, estimate.critical
    content = {
        "recipe": base.loaded.name,
        "batch_size": base.recipe.batch_size,
        "target_batch_size": min(estimate.batches),
        "training_images": base.images,
        "held_out_images": base.recipe.data.holdout,
        "rule": base.rule,
        "epochs": estimate.epochs,
        "loss_floor": base.floor,
        "determined": critical is not None and critical.determined,
        "why": estimate.why,
        "critical_batch": critical and asdict(critical),
        "batches": [asdict(row) for row in estimate.rows()],
        "runs": [asdict(record) for record in estimate.records],
        "left_out": estimate.left_out,
    }
    return {key: _finite(value) for key, value in content.items()}


def print_summary(estimate: Estimate) -> None:
    """Print the critical batch and the table of what each batch needs."""
    out = console()
    for line in head(estimate):
        out.print(line, markup=False)
    if not (rows := estimate.rows()):
        return
    found = table("batch", "epochs to the loss", "updates", "speed-up", "", words=4)
    for row in rows:
        beyond = f"predicted, {row.doublings:.2g} doubling{'s' * (row.doublings > 1)} beyond"
        cells = (f"{row.batch_size:,}", _text(row.epochs), f"{row.updates:,.0f}")
        found.add_row(*cells, _text(row.speed_up), beyond if row.doublings > 0 else "measured")
    out.print(found)
    out.print(
        "90 % intervals in brackets; the speed-up is that over the recipe's batch, "
        f"{estimate.base.recipe.batch_size:,}, by perfect GPUs in proportion to the batch",
        markup=False,
    )


def head(estimate: Estimate) -> list[str]:
    """Lines on what was measured, and the critical batch."""
    base, records = estimate.base, estimate.records
    diverged = {r.run.batch_size for r in records if r.status == "diverged"}
    lines = [
        f"{base.loaded.name}: epochs until the training loss at the end of a run is that of batch "
        f"{min(estimate.batches):,} after {estimate.epochs:g} epochs",
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
    interval = f"{critical.low:,.0f} to {critical.high:,.0f}"
    if critical.determined:
        return f"{critical.batch_size:,.0f} images (90 %: {interval})"
    larger, no_end = f"a larger batch than {critical.largest:,}", math.isinf(critical.high)
    needed = f"more --minutes, or {larger}"
    if no_end and not critical.low:
        interval = "any number of"
    elif no_end:
        interval, needed = f"at least {critical.low:,.0f}", larger
    elif not critical.low:
        interval = f"at most {critical.high:,.0f}"
        needed = f"a smaller batch than {critical.smallest:,}"
    return (
        f"not determined: {interval} images (90 %), which is wider than a factor of {WIDEST:g}; "
        f"needed: {needed}"
    )


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
