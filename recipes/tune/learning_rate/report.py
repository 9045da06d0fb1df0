"""What a search found: a table, a picture, JSON and a recipe file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from ....pipeline import without_secrets
from ...errors import RecipeError
from ...schema.load import find, load, nested
from ...schema.names import CONFIGS
from .trials import Found, Tried, ranked

PICTURE, NUMBERS, RECIPE = "trials.png", "trials.json", "recipe.yaml"

_NAMES = {
    "lr": "learning rate",
    "warmup": "warm-up",
    "power": "power of the decay",
    "weight_decay": "weight decay",
    "trust_coefficient": "trust coefficient",
}
_MARKERS = {"coarse": "o", "fine": "s"}


def name_of(dimension: str) -> str:
    """What a dimension is called."""
    return _NAMES.get(dimension, dimension)


def describe(trial: Tried) -> str:
    """One line about a trial that has ended."""
    values = ", ".join(f"{name_of(k)} {v:g}" for k, v in trial.settings.items())
    result = f", {trial.top1:.2f} % top-1, loss {trial.loss:.4f}" if trial.top1 is not None else ""
    return (
        f"{title(trial)}: {values}: {trial.state}{result}, {trial.epochs:.3g} epochs, "
        f"{trial.seconds:.0f} s"
    )


def title(trial: Tried) -> str:
    """What a trial is called: ``coarse trial 3``."""
    return f"{trial.stage} trial {trial.number}"


def write(found: Found, out: Path) -> list[Path]:
    """Write the picture, the numbers and the recipe into a folder; return their paths.

    Raises:
        RecipeError: A file cannot be written.
    """
    try:
        (out / NUMBERS).write_text(json.dumps(numbers(found), indent=1) + "\n", encoding="utf-8")
        (out / RECIPE).write_text(recipe_text(found, out), encoding="utf-8")
        draw(found, out / PICTURE)
    except OSError as error:
        raise RecipeError(f"--out: cannot write into {out}: {error.strerror}") from None
    return [out / name for name in (PICTURE, NUMBERS, RECIPE)]


def numbers(found: Found) -> dict[str, Any]:
    """The result as JSON data; numbers that are not finite are null."""

    def row(trial: Tried) -> dict[str, Any]:
        def finite(value: float | None) -> float | None:
            return value if value is not None and math.isfinite(value) else None

        return {
            "stage": trial.stage,
            "number": trial.number,
            **trial.settings,
            "status": trial.state,
            "top1": finite(trial.top1),
            "loss": finite(trial.loss),
            "epochs": round(trial.epochs, 4),
            "seconds": round(trial.seconds, 1),
        }

    return {
        "recipe": found.recipe,
        "overrides": [without_secrets(each) for each in found.overrides],
        "best": row(found.best),
        "best_overrides": list(found.best_overrides),
        "held_out": found.held_out,
        "metric": found.metric,
        "coarse": found.coarse,
        "epochs_of_a_run": found.epochs,
        "epochs": round(sum(t.epochs for t in found.trials), 4),
        "seconds": round(sum(t.seconds for t in found.trials), 1),
        "ranges": {d.name: [d.low, d.high] for d in found.space},
        "trials": [row(t) for t in ranked(found.trials, found.metric)],
    }


def print_summary(found: Found) -> None:
    """Print the trials, the best first, and what the search took."""
    table = Table(box=None, pad_edge=False)
    names = [d.name for d in found.space]
    for name in names:
        table.add_column(name_of(name), justify="right")
    for column in ("top-1 %", "loss", "epochs", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("stage")
    table.add_column("")
    for trial in ranked(found.trials, found.metric):
        best = trial == found.best
        cells = [
            *(f"{trial.settings[name]:g}" for name in names),
            "" if trial.top1 is None else f"{trial.top1:.2f}",
            "" if trial.loss is None else f"{trial.loss:.4g}",
            f"{trial.epochs:.3g}",
            f"{trial.seconds:.0f}",
            trial.stage,
            "best" if best else "" if trial.state == "finished" else trial.state,
        ]
        table.add_row(*cells, style="bold" if best else None)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(
        f"{found.recipe}: accuracy on {found.held_out} held-out training images; warm-up as a "
        "fraction of the run",
        markup=False,
        soft_wrap=True,
    )
    console.print(table)
    for line in notes(found):
        console.print(line, markup=False, soft_wrap=True)


def notes(found: Found) -> list[str]:
    """What the trials took, and what is to be known about the best one."""
    epochs = sum(t.epochs for t in found.trials)
    lines = [
        f"{sum(t.counts for t in found.trials)} trials: {epochs:.4g} epochs, "
        f"{epochs / found.epochs:.2f} runs of the recipe"
    ]
    best = found.best
    if best.stage == "coarse":
        lines.append(
            "note: no trial of full length fitted into the budget; short runs may favour other "
            "values"
        )
    elif top_of_one := _margin(found):
        lines.append(top_of_one)
    for d in found.space:
        place = d.unit(best.settings[d.name])
        if d.name != "warmup" and not 0.05 < place < 0.95:
            lines.append(
                f"note: the best {name_of(d.name)}, {best.settings[d.name]:g}, is at the end of "
                f"its range, {d.low:g} to {d.high:g}"
            )
    return lines


def _margin(found: Found) -> str:
    """A note where the held-out images cannot tell the best settings from others, else empty."""
    best = found.best
    assert best.top1 is not None
    share = best.top1 / 100
    # The standard deviation of the difference of two accuracies on the same n images is at most
    # that of independent ones.
    error = 100 * math.sqrt(2 * max(share * (1 - share), 1 / found.held_out) / found.held_out)
    near = [
        t
        for t in found.trials
        if t.stage == "fine" and t.state == "finished" and t != best
        if t.top1 is not None and best.top1 - t.top1 < 2 * error
    ]
    if not near:
        return ""
    return (
        f"note: {len(near)} other setting{'s' * (len(near) > 1)} of full length "
        f"{'are' if len(near) > 1 else 'is'} within {2 * error:.2g} points, two standard errors "
        f"of a difference on {found.held_out} images"
    )


def recipe_text(found: Found, out: Path) -> str:
    """The recipe with the best settings: it extends the given one, with the user's overrides."""
    best, path = found.best, find(found.recipe)
    base = path.stem if path.parent == CONFIGS else os.path.relpath(path, out)
    overrides = [*map(without_secrets, found.overrides), *found.best_overrides]
    content = nested(o for o in overrides if not o.startswith("data.holdout="))
    counts = [
        f"{sum(t.counts for t in found.trials if t.stage == s)} {s}" for s in ("coarse", "fine")
    ]
    coarse = f"coarse of {found.coarse * found.epochs:.3g} epochs, fine of {found.epochs:.3g}"
    varied = _listed(name_of(d.name) for d in found.space)
    length = found.epochs if best.stage == "fine" else found.coarse * found.epochs
    head = [
        f"{path.stem} with {_listed(name_of(d.name) for d in found.space)} tuned.",
        "",
        f"Expected: {best.top1:.2f} % top-1 after {length:.3g} epochs, as one run reached on "
        f"{found.held_out} training images that were held out. It is the best of several runs, "
        "which flatters it; on the validation set it has not been measured yet.",
        f"Tuned: {varied}, in {' and '.join(counts)} trials ({coarse}), by `largebatch tune lr` on "
        f"{date.today().isoformat()}.",
    ]
    lines = [line for text in head for line in _wrapped(text)]
    body = yaml.safe_dump(
        {"extends": base, **content}, sort_keys=False, default_flow_style=False, allow_unicode=True
    )
    return "\n".join(lines) + "\n" + body


def _listed(names: Iterable[str]) -> str:
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last


def _wrapped(text: str, width: int = 98) -> list[str]:
    import textwrap

    return [f"# {line}" for line in textwrap.wrap(text, width)] or ["#"]


def check_recipe(path: Path) -> None:
    """Load the recipe that was written.

    Raises:
        RecipeError: It does not load.
    """
    load(str(path))


def draw(found: Found, path: Path) -> None:
    """Draw accuracy over rate and each other dimension; diverged trials are crosses."""
    from matplotlib import colors
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rate, *others = found.space
    trials = [t for t in found.trials if t.state not in ("running", "interrupted")]
    best_of = {
        stage: max(t.top1 or 0.0 for t in trials if t.state == "finished" and t.stage == stage)
        for stage in {t.stage for t in trials if t.state == "finished"}
    }
    below = {
        (t.stage, t.number): (t.top1 or 0.0) - best_of[t.stage]
        for t in trials
        if t.state == "finished"
    }
    # The colours tell the upper half apart; what is below the lower quarter has the lowest one.
    low = sorted(below.values())[len(below) // 4]
    norm = colors.Normalize(min(low, -0.1), 0.0)
    figure = Figure(figsize=(1.5 + 5.5 * len(others), 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{Path(found.recipe).stem}: {found.best.top1:.2f} % top-1 at best, on {found.held_out} "
        "held-out training images"
    )
    panels = figure.subplots(1, len(others), squeeze=False)[0]
    drawn = None
    for axes, other in zip(panels, others, strict=True):
        for trial in trials:
            at = trial.settings[rate.name], trial.settings[other.name]
            marker = _MARKERS[trial.stage]
            if trial.state == "diverged":
                axes.plot(*at, "x", color="tab:red", markersize=7, markeredgewidth=1.6)
            elif trial.state == "pruned":
                axes.plot(*at, marker, mfc="none", mec="tab:gray", markersize=7)
            else:
                size = 130 if trial.stage == "coarse" else 45
                drawn = axes.scatter(
                    *([v] for v in at), c=[below[trial.stage, trial.number]], norm=norm,
                    marker=marker, s=size, cmap="viridis", edgecolors="black", linewidths=0.6,
                    zorder=3 + (trial.stage == "fine"),
                )  # fmt: skip
        best = found.best.settings
        axes.plot(best[rate.name], best[other.name], "o", ms=19, mfc="none", mec="tab:orange",
                  mew=2, zorder=5)  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlim(rate.low / 1.2, rate.high * 1.2)
        if other.scale == "log":
            axes.set_yscale("log")
            axes.set_ylim(other.low / 1.2, other.high * 1.2)
        else:
            room = 0.05 * (other.high - other.low)
            axes.set_ylim(other.low - room, other.high + room)
        axes.set_xlabel("peak learning rate")
        unit = " (fraction of the run)" if other.name == "warmup" else ""
        axes.set_ylabel(name_of(other.name) + unit)
        axes.grid(alpha=0.3, which="major")
    if drawn is not None:
        figure.colorbar(
            drawn, ax=list(panels), label="top-1 less the best of its stage (points)", extend="min"
        )
    coarse, fine = (
        f"{length:.3g} epochs" for length in (found.coarse * found.epochs, found.epochs)
    )
    black: dict[str, Any] = {"color": "none", "markeredgecolor": "black"}
    entries = {
        f"coarse: {coarse}": Line2D([], [], marker="o", **black),
        f"fine: {fine}": Line2D([], [], marker="s", **black),
        "pruned (open)": Line2D([], [], marker="o", color="none", markeredgecolor="tab:gray"),
        "diverged": Line2D([], [], marker="x", color="none", markeredgecolor="tab:red"),
        "best": Line2D([], [], marker="o", color="none", markeredgecolor="tab:orange", ms=12),
    }
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=5, fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise RecipeError(f"--out: cannot write {path}: {error}") from None
