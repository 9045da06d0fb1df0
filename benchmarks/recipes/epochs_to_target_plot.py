"""Plot the epochs and the updates to a target against the batch size."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.recipes.crossing import Crossing
from benchmarks.recipes.epochs_to_target_estimates import (
    HEADLINE,
    IMAGES,
    SMALL,
    TEN_TIMES,
    Rows,
    cells_of,
    crossings,
    finals,
    name_of,
    never_reached,
)

COLORS = dict(zip(HEADLINE, ("tab:orange", "tab:blue", "tab:green", "tab:red"), strict=True))
_HOLLOW = {"markersize": 8, "markerfacecolor": "white", "linestyle": "none"}


def draw(runs: Rows, target: float, path: Path) -> None:
    """Plot the epochs to the target against the batch size, and beside them the updates.

    A line joins neighbouring batch sizes that both have an estimate. An arrow ends an interval at
    the shortest or longest run of its cell: it reaches further. Where both ends are open, no
    estimate is drawn. A hollow triangle that points up is at the longest run of a cell that did not
    reach the target, one that points down at the most that a cell takes whose shortest run did.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    batches = sorted({b for optimizer, b in cells_of(runs) if optimizer in HEADLINE})
    for axes, images in ((left, None), (right, IMAGES)):
        for optimizer in HEADLINE:
            _draw_optimizer(axes, runs, optimizer, target, batches, images)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(batches, [f"{b:,}\n({IMAGES / b:.3g})" for b in batches])
        axes.set_xlabel("batch size, images (updates per epoch)")
        axes.grid(alpha=0.3)
        low, high = axes.get_ylim()
        ticks = [5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40]
        ticks += [100, 150, 200, 300, 400, 600, 800, 1000, 1500, 2000, 3000, 4000, 6000]
        axes.set_yticks([n for n in ticks if low <= n <= high], minor=False)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    left.set_ylabel(f"epochs to {target:.1f} % on the test set")
    right.set_ylabel(f"updates to {target:.1f} %")
    limits = right.get_ylim()
    top = crossings(runs, target).get(("Muon", SMALL))
    if top and 0 < top.epochs < math.inf:  # equal epochs, from Muon's at the small batch
        perfect = [top.epochs * IMAGES / b for b in batches]
        right.plot(batches, perfect, color="gray", linestyle=":", label="equal epochs")
        right.set_ylim(*limits)
        right.legend()
    left.legend()
    figure.suptitle(
        "CIFAR-10: epochs and updates to the same accuracy, with 95 % intervals\n"
        "(arrow: open end; hollow triangle: more than that, or, pointing down, less)",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_ten_times(runs: Rows, target: float, path: Path) -> None:
    """Draw the epochs to the target at the small batch and at ten times as much, as bars.

    Lines are the 95 % intervals. An arrow ends one that goes beyond the lengths that were trained.
    """
    figure, axes = plt.subplots(figsize=(7.2, 2.8), layout="constrained")
    found, optimizers = crossings(runs, target), ("Muon", "LARS", "Nesterov-1x")
    for place, optimizer in enumerate(optimizers):
        for batch, shift, alpha in ((SMALL, -0.2, 0.45), (TEN_TIMES, 0.2, 1.0)):
            one, color = found[optimizer, batch], COLORS[optimizer]
            trained = [row["epochs"] for row in finals(runs, optimizer, batch)]
            ends = max(one.low, min(trained)), min(one.high, max(trained))
            axes.barh(place + shift, one.epochs, 0.38, color=color, alpha=alpha)
            axes.plot(ends, [place + shift] * 2, color="black", lw=1)
            for end, known, open_end in zip(ends, (one.low, one.high), "<>", strict=True):
                marker = "|" if end == known else open_end
                axes.plot([end], [place + shift], marker, color="black", markersize=5)
            axes.text(0.2, place + shift, f"batch {batch:,}", va="center", fontsize=9)
    axes.set_yticks(range(len(optimizers)), [name_of(name) for name in optimizers])
    axes.invert_yaxis()
    axes.set_xlabel(f"epochs to {target:.0f} % on CIFAR-10, a CNN of 1.1 M parameters")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_optimizer(
    axes: Axes, runs: Rows, optimizer: str, target: float, batches: list[int], images: int | None
) -> None:
    """Draw the cells of an optimizer, in epochs, or in updates for that many images."""
    cells = [b for b in batches if (optimizer, b) in cells_of(runs)]
    if not cells:
        return
    found, color = crossings(runs, target), COLORS[optimizer]
    axes.plot([], [], color=color, marker="o", label=name_of(optimizer))

    def place(batch: int) -> float:  # so that intervals do not overlap
        return batch * 1.04 ** (HEADLINE.index(optimizer) - 1)

    def height(batch: int, epochs: float) -> float:
        return epochs * images / batch if images else epochs

    def mark(batch: int, epochs: float, marker: str) -> None:
        """Mark that a cell takes more epochs, or fewer, than that, with an arrow to them."""
        x, y = place(batch), height(batch, epochs)
        axes.plot([x], [y], color=color, marker=marker, **_HOLLOW)
        further = (0, 24 if marker == "^" else -24)
        arrow = {"arrowstyle": "<-", "color": color}
        axes.annotate("", (x, y), further, textcoords="offset points", arrowprops=arrow)

    known: dict[int, Crossing] = {}
    for batch in cells:
        value = found.get((optimizer, batch))
        trained = [row["epochs"] for row in finals(runs, optimizer, batch)]
        beyond = value is not None and value.epochs == math.inf
        if beyond or never_reached(runs, optimizer, batch, target):
            mark(batch, max(trained), "^")
        elif value is not None and value.epochs == 0 and value.high < math.inf:
            mark(batch, value.high, "v")
        elif value is not None and value.epochs > 0 and (value.low > 0 or value.high < math.inf):
            known[batch] = value
            ends = max(value.low, min(trained)), min(value.high, max(trained))
            axes.plot([place(batch)] * 2, [height(batch, end) for end in ends], color=color)
            is_open = value.low < min(trained), value.high > max(trained)
            for end, reaches_further, arrow in zip(ends, is_open, "v^", strict=True):
                marker = arrow if reaches_further else "_"
                axes.plot([place(batch)], [height(batch, end)], color=color, marker=marker)
    for batch, value in known.items():
        axes.plot([place(batch)], [height(batch, value.epochs)], color=color, marker="o")
        following = batches.index(batch) + 1
        if following < len(batches) and (after := batches[following]) in known:
            heights = [height(batch, value.epochs), height(after, known[after].epochs)]
            axes.plot([place(batch), place(after)], heights, color=color)
