"""Print and plot a recipe's learning-rate schedule without training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...lars import Span
from ...pipeline import without_query
from ..output import console, table, writing
from ..schema.load import Loaded
from ..schema.recipe import Recipe
from ..training.data import is_url, open_split
from ..training.timeline import LearningRates, Timeline, learning_rates, timeline_of

_POINTS = 2000  # of the plotted line, more than the pixels of its width


@dataclass(frozen=True)
class Outline:
    """A recipe's schedule; ``points`` are the labels of its key steps, ascending."""

    name: str
    images: str
    notices: tuple[str, ...]
    timeline: Timeline
    rates: LearningRates
    points: dict[int, str]

    def lr(self, step: int) -> float:
        """Return the learning rate of the update that follows ``step`` updates."""
        return self.rates.schedule(step)


def outline(loaded: Loaded) -> Outline:
    """Work out a recipe's schedule; its data set may be absent."""
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
    """Return the number of training images per epoch, and the source of that number."""
    data = recipe.data
    if data.source == "synthetic":
        return data.train_images, "data.train_images"
    assert data.path is not None  # checked by the schema
    if is_url(data.path) or Path(data.path).is_dir():
        return len(open_split(data, "train")), f"in {without_query(data.path)}/train"
    return data.train_images, f"data.train_images, as there is no folder {data.path}"


def print_summary(outline: Outline) -> None:
    """Print the lengths of the run and a table of the schedule's key points."""
    rows = table("", "step", "epoch", "learning rate")
    timeline = outline.timeline
    for step, name in outline.points.items():
        rows.add_row(name, f"{step:,}", f"{timeline.epoch(step):.2f}", f"{outline.lr(step):.6g}")
    out = console()
    out.print(
        f"{outline.name}: {outline.images}, batch {_batches(timeline)}, "
        f"{timeline.steps_per_epoch:.2f} steps per epoch{' at first' if timeline.changes else ''}, "
        f"{timeline.total_steps:,} steps",
        *outline.notices,
        sep="\n",
        markup=False,
    )
    out.print(rows)


def _batches(timeline: Timeline) -> str:
    return ", then ".join(f"{timeline.batch_size(step):,}" for step in (0, *timeline.changes))


def draw(outline: Outline, out: Path) -> None:
    """Plot the learning rate over epochs into a .png, .svg or .pdf."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timeline, total = outline.timeline, outline.timeline.total_steps
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    # A key step and the one before it keep jumps of the rate sharp.
    jumps = {near for step in outline.points for near in (step - 1, step) if near >= 0}
    line = sorted({*range(0, total, max(1, total // _POINTS)), *jumps})
    axes.plot([timeline.epoch(step) for step in line], [outline.lr(step) for step in line])
    axes.set_xlim(0, timeline.epoch(total))
    axes.set_ylim(bottom=0)
    axes.set_title(f"Learning-rate schedule of {outline.name}, global batch {_batches(timeline)}")
    axes.set_xlabel("epoch")
    axes.set_ylabel("learning rate")
    axes.grid(alpha=0.3)
    with writing(out):
        figure.savefig(out, dpi=110)
