"""Report an estimate as a table, a picture and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from .fit import WIDEST, CriticalBatch
from .prices import CHECKED, Interval, Measured, Price, images_to_determine, target_loss
from .result import Estimate

NUMBERS, PICTURE = "critical-batch.json", "critical-batch.png"

_THIRDS = ((0.0, 1 / 3), (2 / 3, 1.0 + 1e-9))  # the first and the last, in the length of a run

#: Hours to the target by number of GPUs and batch size.
Hours = Mapping[int, Mapping[int, float]]


def as_json(estimate: Estimate, found: Sequence[Price], hours: Hours) -> dict[str, Any]:
    """Return an estimate as JSON data; infinite numbers are null."""
    base = estimate.base
    methods = {}
    for name, method in estimate.methods.items():
        if isinstance(method, CriticalBatch):
            more = images_to_determine(estimate, name)
            determined = {"determined": method.determined, "more_images": more}
            methods[name] = {**asdict(method), **determined}
        else:
            methods[name] = {"determined": False, "why": method}
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
            "target_loss": target_loss(estimate),
            "methods": methods,
            "gradient_noise": gradient_noise(estimate),
            "prices": [
                {
                    **asdict(price),
                    "updates": price.updates,
                    "epochs_by_noise": epochs_by_noise(estimate, price.batch_size),
                }
                for price in found
            ],
            "hours": {str(n): {str(b): h for b, h in row.items()} for n, row in hours.items()},
            "runs": [asdict(record) for record in estimate.records],
            "left_out": [asdict(run) for run in estimate.left_out],
            "seconds": estimate.seconds,
        }
    )
    return content


def gradient_noise(estimate: Estimate) -> dict[str, float] | None:
    """The gradient noise scale along whole runs: its first and last thirds, and all; None: unknown.

    The unit is images. It is the mean of all readings, without weights by their errors; a third
    without readings is NaN.
    """
    points = [
        (epoch / record.trained, value)
        for record in estimate.records
        if record.kind == "run" and not record.run.after
        for epoch, value, _ in record.noise
        if math.isfinite(value) and value > 0
    ]
    if not points:
        return None
    thirds = [[v for part, v in points if low < part <= high] for low, high in _THIRDS]
    early, late = (fmean(values) if values else math.nan for values in thirds)
    return {"first_third": early, "last_third": late, "mean": fmean(v for _, v in points)}


def epochs_by_noise(estimate: Estimate, batch: int) -> Interval | None:
    """Epochs to the target if the critical batch were the gradient noise scale along the runs.

    That is the first guess of McCandlish et al. (2018). The ends are those by the noise in the
    first and in the last third of the runs.
    """
    noise = gradient_noise(estimate)
    if noise is None:
        return None
    own = min(estimate.batches)
    scales = [noise["mean"], noise["first_third"], noise["last_third"]]
    found = [
        estimate.epochs * (1 + batch / scale) / (1 + own / scale)
        for scale in scales
        if math.isfinite(scale)
    ]
    return found[0], min(found), max(found)


def print_summary(estimate: Estimate, found: Sequence[Price], hours: Hours) -> None:
    """Print the critical batch by each method, and the table of prices."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160  # do not wrap lines in a file or a pipe
    for line in head(estimate):
        console.print(line, markup=False)
    if found:
        console.print(_table(found))
        for line in notes(estimate, found):
            console.print(line, markup=False)
    if hours:
        console.print(_table_of_hours(found, hours))


def head(estimate: Estimate) -> list[str]:
    """Lines on what was measured, and the critical batch by each method."""
    base = estimate.base
    runs = [record for record in estimate.records if record.kind == "run"]
    target = target_loss(estimate)
    reached = f", which is {base.floor + target:.4f}" if target else ""
    diverged = sum(record.status == "diverged" for record in runs)
    lines = [
        f"{base.loaded.name}: epochs until the training loss at the end of a run is that of batch "
        f"{min(estimate.batches):,} after {estimate.epochs:g} epochs{reached}",
        f"{len(runs)} runs of batches {_list(estimate.batches)} with the learning rate scaled by "
        f"{base.rule}, {sum(r.trained for r in estimate.records):.1f} epochs in "
        f"{estimate.seconds / 60:.1f} minutes" + (f"; {diverged} diverged" if diverged else ""),
    ]
    if estimate.left_out:
        lines.append(f"not made, as the budget does not suffice: {len(estimate.left_out)} runs")
    for name in estimate.methods:
        lines.append(f"critical batch by {name}: {describe(estimate, name)}")
    lines.append(f"gradient noise scale: {_noise(estimate)}")
    passes = {base.micro_batch_size(batch) for batch in estimate.batches}
    if len(passes) > 1:
        lines.append(
            f"images per forward pass, over which batch norm averages, differ: {_list(passes)}"
        )
    return lines


def _noise(estimate: Estimate) -> str:
    """Describe the gradient noise scale along the runs."""
    noise, base = gradient_noise(estimate), estimate.base
    without = [batch for batch in estimate.batches if not base.has_noise(batch)]
    why = "one backward pass per step"
    left_out = f"not measured at batches {_list(without)}: {why}" if without else ""
    if noise is None:
        return left_out if len(without) == len(estimate.batches) else "not determined by these runs"
    thirds = ", ".join(
        f"{noise[key]:,.0f} in their {name}"
        for key, name in (("first_third", "first third"), ("last_third", "last"))
        if math.isfinite(noise[key])
    )
    found = f"{noise['mean']:,.0f} images along the runs ({thirds or 'in their middle'})"
    return f"{found}; {left_out}" if left_out else found


def describe(estimate: Estimate, name: str) -> str:
    """Describe the critical batch by one method, a key of ``estimate.methods``, in a line."""
    method = estimate.methods[name]
    if isinstance(method, str):
        return f"not determined: {method}"
    interval = f"{method.batch_size:,.0f} images (90 %: {method.low:,.0f} to {method.high:,.0f})"
    if method.determined:
        return interval
    if not math.isfinite(method.high):
        larger = 2 * method.largest
        remedy = "a larger batch"
        if larger <= estimate.base.images:
            price = method.factor(larger, method.smallest)[0]
            images = (1 + price) * estimate.epochs * estimate.base.images
            remedy = f"runs of batch {larger:,} too (about {images:,.0f} images)"
        return (
            f"not determined: at least {method.low:,.0f} images, with no upper bound; needed: "
            f"{remedy}"
        )
    if not method.low:
        return (
            f"not determined: at most {method.high:,.0f} images, with no lower bound; needed: a "
            f"batch smaller than {method.smallest:,}"
        )
    more = images_to_determine(estimate, name)
    needed = f"about {more:,.0f} more images" if more else "larger batches"
    return (
        f"not determined: {method.low:,.0f} to {method.high:,.0f} images (90 %), which is wider "
        f"than a factor of {WIDEST:g}; needed: {needed}"
    )


def notes(estimate: Estimate, found: Sequence[Price]) -> list[str]:
    """Lines that explain the table."""
    lines = [
        "90 % intervals in brackets; the speed-up is that over the recipe's batch, "
        f"{estimate.base.recipe.batch_size:,}, by perfect GPUs in proportion to the batch"
    ]
    by_noise = epochs_by_noise(estimate, largest := found[-1].batch_size)
    if by_noise:
        lines.append(
            f"if the critical batch were the gradient noise scale, batch {largest:,} would take "
            f"{_text(by_noise)} epochs; the ends are by the noise early and late in the runs"
        )
    far = [price for price in found if price.doublings > CHECKED + 1e-9]
    if far:
        lines.append(
            f"predictions are made for one doubling beyond the largest measured batch; "
            f"{_list(p.batch_size for p in far)} is further out, where learning rates by rule "
            "often fail first"
        )
    return lines


def _table(found: Sequence[Price]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("batch", "updates/epoch", "epochs to the loss", "updates", "speed-up"):
        table.add_column(column, justify="right")
    table.add_column("by its own runs")
    for price in found:
        table.add_row(
            f"{price.batch_size:,}",
            f"{price.updates_per_epoch:,.1f}",
            _text(price.epochs),
            f"{price.updates[0]:,.0f}",
            _text(price.speed_up),
            _how(price),
        )
    return table


def _how(price: Price) -> str:
    if price.measured is None:
        if price.doublings <= 0:
            return "predicted"
        return f"predicted, {price.doublings:.2g} doubling{'s' * (price.doublings > 1)} beyond"
    return describe_measured(price.measured)


def describe_measured(measured: Measured) -> str:
    """Describe what a batch's own runs say about the target."""
    return {
        "reached": f"{measured.epochs:.3g} epochs",
        "above": f"not reached in {measured.epochs:.3g} epochs",
        "below": f"less than {measured.epochs:.3g} epochs",
        "diverged": "diverged",
    }[measured.bound]


def _table_of_hours(found: Sequence[Price], hours: Hours) -> Table:
    table = Table(box=None, pad_edge=False, title="predicted time to the loss, in minutes")
    table.title_justify = "left"
    table.add_column("GPUs", justify="right")
    for price in found:
        table.add_column(f"batch {price.batch_size:,}", justify="right")
    for number, row in hours.items():
        best = min(row.values(), default=None)
        cells = []
        for price in found:
            value = row.get(price.batch_size)
            text = "" if value is None else f"{60 * value:,.3g}"
            cells.append(f"{text}*" if value is not None and value == best else text)
        table.add_row(f"{number:,}", *cells)
    table.caption = "* the fastest batch; without evaluation, checkpoints and start"
    table.caption_justify = "left"
    return table


def _text(interval: Interval) -> str:
    value, low, high = interval
    return f"{value:.3g} ({low:.3g} to {high:.3g})"


def _list(numbers: Any) -> str:
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
