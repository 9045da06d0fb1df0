"""A recipe's learning rate, drawn and told before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ...lars import Span
from ..errors import RecipeError
from ..schema.load import Loaded
from ..schema.recipe import Recipe
from ..training.build import is_url, open_split
from ..training.lr import LearningRates, learning_rates
from ..training.timeline import Timeline, timeline_of

_POINTS = 2000  # of the line: more than there are pixels


@dataclass(frozen=True)
class Outline:
    """What is drawn and told of a recipe's schedule.

    Attributes:
        name: of the recipe.
        images: in an epoch, with where that was taken from.
        notices: how the learning rate was scaled.
        timeline: updates, epochs and images.
        rates: the learning rates.
        points: what happens at a step, by step, ascending.
    """

    name: str
    images: str
    notices: tuple[str, ...]
    timeline: Timeline
    rates: LearningRates
    points: dict[int, str]

    def lr(self, step: int) -> float:
        """The learning rate of the update after ``step`` of them."""
        return self.rates.schedule(step)


def outline(loaded: Loaded) -> Outline:
    """Find out a recipe's schedule; its data need not be there.

    Raises:
        RecipeError, DataError: lengths that do not fit, or a data folder without images.
    """
    recipe = loaded.recipe
    images, where = image_count(recipe)
    run = timeline_of(recipe, images)
    total_steps, last_step = run.total_steps, run.last_step(recipe)
    found = learning_rates(recipe, run)
    points = {total_steps: "end", total_steps - 1: "last update"}
    if last_step < total_steps:
        points[last_step] = "stop_after"
    points |= {step: f"milestone {i}" for i, step in enumerate(found.milestones, 1)}
    for share, name in ((0.25, "1/4 of decay"), (0.5, "1/2 of decay"), (0.75, "3/4 of decay")):
        if found.decay_steps:
            ends = (found.warmup_steps, found.warmup_steps + found.decay_steps)
            from_, to = (run.epoch(step) for step in ends)
            points[run.steps(Span(from_ + share * (to - from_), "ep"))] = name
    if found.decay_steps and found.warmup_steps + found.decay_steps < total_steps:
        points[found.warmup_steps + found.decay_steps] = "end of decay"
    if found.warmup_steps:
        points[found.warmup_steps] = "end of warm-up"
    points[0] = "start"
    for step in run.changes:
        what = f"batch {run.batch_size(step):,}"
        points[step] = f"{points[step]}, {what}" if step in points else what
    return Outline(
        name=loaded.name,
        images=f"{images:,} images ({where})",
        notices=loaded.notices,
        timeline=run,
        rates=found,
        points={step: points[step] for step in sorted(points) if step <= total_steps},
    )


def image_count(recipe: Recipe) -> tuple[int, str]:
    """The training images in an epoch, and where that number was taken from.

    Raises:
        DataError: the data folder is there, but holds no training images.
    """
    data = recipe.data
    if data.source == "synthetic":
        return data.train_images, "data.train_images"
    assert data.path is not None  # checked by the schema
    if is_url(data.path) or Path(data.path).is_dir():
        return len(open_split(data, "train")), f"in {data.path}/train"
    return data.train_images, f"data.train_images, as there is no folder {data.path}"


def tell(outline: Outline) -> None:
    """Print the key points of a schedule."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for column in ("step", "epoch", "lr"):
        table.add_column(column, justify="right")
    timeline = outline.timeline
    for step, name in outline.points.items():
        table.add_row(name, f"{step:,}", f"{timeline.epoch(step):.2f}", f"{outline.lr(step):.6g}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{outline.name}: {outline.images}, batch {_batches(timeline)}, "
        f"{timeline.steps_per_epoch:.2f} steps per epoch{' at first' * timeline.changes_batch}, "
        f"{timeline.total_steps:,} steps",
        *outline.notices,
        sep="\n",
        markup=False,
    )
    console.print(table)


def _batches(timeline: Timeline) -> str:
    return ", then ".join(f"{timeline.batch_size(step):,}" for step in (0, *timeline.changes))


def draw(outline: Outline, out: Path) -> None:
    """Draw learning rate against epoch.

    Args:
        out: the picture, of a kind that matplotlib writes by its ending, such as ``.png``.

    Raises:
        RecipeError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timeline, total = outline.timeline, outline.timeline.total_steps
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    turns = {near for step in outline.points for near in (step - 1, step) if near >= 0}
    line = sorted({*range(0, total, max(1, total // _POINTS)), *turns})
    epochs, lr = [timeline.epoch(s) for s in line], [outline.lr(s) for s in line]
    axes.plot(epochs, lr, color="tab:green")
    for step, name in outline.points.items():
        at = timeline.epoch(step), outline.lr(step)
        axes.plot(*at, color="tab:green", marker="o", markersize=4, clip_on=False)
        if at[1] and name != "last update":  # which is too near the end
            side, shift = ("right", -4) if step == total else ("left", 5)
            axes.annotate(
                f"{at[1]:.5g}", at, (shift, 5), textcoords="offset points", ha=side, fontsize=9
            )
    if outline.rates.warmup_steps:
        end = timeline.epoch(outline.rates.warmup_steps)
        axes.axvspan(0, end, color="tab:orange", alpha=0.12, linewidth=0, label="warm-up")
        axes.legend(loc="best")
    axes.set_title(f"{outline.name}, batch {_batches(timeline)}")
    axes.set_xlabel("epoch")
    axes.set_ylabel("learning rate")
    axes.set_xlim(0, timeline.epoch(total))
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if timeline.changes_batch:  # steps lie unevenly: only those where it changes are marked
        above = axes.secondary_xaxis("top")
        steps = (0, *timeline.changes, total)
        above.set_xticks([timeline.epoch(step) for step in steps], [f"{step:,}" for step in steps])
    else:
        every = timeline.steps_per_epoch
        to_steps, to_epochs = partial(np.multiply, every), partial(np.multiply, 1 / every)
        above = axes.secondary_xaxis("top", functions=(to_steps, to_epochs))
    above.set_xlabel("step")
    try:
        figure.savefig(out, dpi=110)
    except (OSError, ValueError) as error:
        raise RecipeError(f"--out: cannot write {out}: {error}") from None
