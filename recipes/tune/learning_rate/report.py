"""What a search found: a recipe, JSON, a table and a picture."""

from __future__ import annotations

import json
import math
import os
import textwrap
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from ....pipeline import without_secrets
from ...errors import RecipeError
from ...files import write_text
from ...schema.load import find, nested
from ...schema.names import CONFIGS
from ...words import count, duration
from .line import behind, mean_at
from .result import Found, Tried, line_of

PICTURE, NUMBERS, RECIPE = "trials.png", "trials.json", "recipe.yaml"

_NAMES = {
    "lr": "learning rate",
    "warmup": "warm-up",
    "power": "power of the decay",
    "weight_decay": "weight decay",
    "trust_coefficient": "trust coefficient",
}


def name_of(setting: str) -> str:
    """What a setting is called."""
    return _NAMES.get(setting, setting)


def describe(trial: Tried) -> str:
    """One line about a trial that has ended."""
    values = ", ".join(f"{name_of(k)} {v:g}" for k, v in trial.settings.items())
    result = f", {trial.top1:.2f} % top-1, loss {trial.loss:.4f}" if trial.top1 is not None else ""
    return (
        f"{trial.stage} trial {trial.number}: {values}{', second seed' * trial.seed}: "
        f"{trial.state}{result}, {trial.epochs:.3g} epochs, {trial.seconds:.0f} s"
    )


def write(found: Found) -> list[Path]:
    """Write the numbers and the recipe into the study's folder; return their paths.

    Raises:
        RecipeError: A file cannot be written.
    """
    contents = {NUMBERS: json.dumps(numbers(found), indent=1) + "\n", RECIPE: recipe_text(found)}
    try:
        for name, content in contents.items():
            write_text(found.folder / name, content)
    except OSError as error:
        raise RecipeError(f"--out: cannot write into {found.folder}: {error.strerror}") from None
    return [found.folder / name for name in contents]


def numbers(found: Found) -> dict[str, Any]:
    """The result as JSON data; numbers that are not finite are null."""

    def row(trial: Tried) -> dict[str, Any]:
        content = {**vars(trial), "epochs": round(trial.epochs, 4), "seconds": trial.seconds}
        content |= content.pop("settings")
        unfit = [k for k, v in content.items() if isinstance(v, float) and not math.isfinite(v)]
        return {**content, **dict.fromkeys(unfit)}

    return {
        "recipe": found.recipe,
        "overrides": [without_secrets(each) for each in found.overrides],
        "best": row(found.best),
        "best_overrides": list(found.best_overrides),
        "behind": {
            f"{rate:g}": round(points, 3) if math.isfinite(points) else None  # it diverged
            for rate, points in _neighbours(found).items()
        },
        "held_out": found.held_out,
        "epochs_of_a_run": found.epochs,
        "epochs": round(sum(t.epochs for t in found.trials), 4),
        "seconds": round(sum(t.seconds for t in found.trials), 1),
        "ranges": {name: [d.low, d.high] for name, d in found.space.items()},
        "trials": [row(t) for t in _ranked(found)],
    }


def print_summary(found: Found) -> None:
    """Print the trials, the best first, and what is to be known about the best one."""
    table = Table(box=None, pad_edge=False)
    for column in (*map(name_of, found.space), "top-1 %", "loss", "epochs", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("stage")
    table.add_column("")
    for trial in _ranked(found):
        best = trial == found.best
        ended = "second seed" if trial.seed else ""
        cells = [
            *(f"{value:g}" for value in trial.settings.values()),
            "" if trial.top1 is None else f"{trial.top1:.2f}",
            "" if trial.loss is None else f"{trial.loss:.4g}",
            f"{trial.epochs:.3g}",
            f"{trial.seconds:.0f}",
            trial.stage,
            "best" if best else ended if trial.state == "finished" else trial.state,
        ]
        table.add_row(*cells, style="bold" if best else None)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120
    console.print(
        f"{found.recipe}: accuracy on {found.held_out} held-out training images; warm-up as a "
        "share of the run",
        markup=False,
    )
    console.print(table)
    for line in notes(found):
        console.print(line, markup=False)


def notes(found: Found) -> list[str]:
    """What the trials took, how far the neighbours lie behind, and what limits the result."""
    best, epochs = found.best, sum(t.epochs for t in found.trials)
    assert best.top1 is not None
    lines = [
        f"{count(sum(t.counts for t in found.trials), 'trial')}: {epochs:.4g} epochs, "
        f"{epochs / found.epochs:.2f} runs of the recipe, "
        f"{duration(sum(t.seconds for t in found.trials))}"
    ]
    if own := next((t for t in found.trials if t.stage == "coarse" and t.number == 0), None):
        result = f"{own.top1:.2f} %" if own.state == "finished" else own.state
        lines.append(f"the recipe's own rate, {own.settings['lr']:g}, in a coarse trial: {result}")
    losses = {t.settings["lr"]: t.loss for t in found.trials if t.stage == "fine" and not t.seed}
    for rate, points in _neighbours(found).items():
        result = "training diverges"
        if math.isfinite(points):
            result = f"top-1 is {abs(points):.2f} points {'lower' if points >= 0 else 'higher'}"
            result += f", loss {(losses[rate] or 0.0) - (best.loss or 0.0):+.4f}"
        lines.append(f"neighbour: at learning rate {rate:g}, all else the same, {result}")
    if (best.place, 1) in (line := line_of(found.trials)) and best.stage == "fine":
        mean, _ = mean_at(line, best.place)
        lines.append(f"two seeds of the best: {best.top1:.2f} % and {2 * mean - best.top1:.2f} %")
    share = best.top1 / 100
    error = 100 * math.sqrt(2 * max(share * (1 - share), 1 / found.held_out) / found.held_out)
    lines.append(
        f"note: differences below {2 * error:.2g} points are within two standard errors on "
        f"{found.held_out} images"
    )
    if best.epochs < 0.99 * found.epochs:
        lines.append(
            f"note: the best trial had {best.epochs:.3g} of the recipe's {found.epochs:.3g} "
            "epochs, as more did not fit into the budget; short runs may favour other values"
        )
    if best.stage == "coarse":
        lines.append("note: no fine trial has finished, so that rates nearby are not compared")
    for (name, d), value in zip(found.space.items(), best.settings.values(), strict=True):
        low, high, at = map(math.log, (d.low, d.high, value)) if d.log else (d.low, d.high, value)
        if name != "warmup" and not 0.05 < (at - low) / (high - low) < 0.95:
            lines.append(
                f"note: the best {name_of(name)}, {value:g}, is at the end of its range, "
                f"{d.low:g} to {d.high:g}"
            )
    return lines


def recipe_text(found: Found) -> str:
    """The recipe with the best settings: it extends the given one, with the user's overrides."""
    best, path = found.best, find(found.recipe)
    base = path.stem if path.parent == CONFIGS else os.path.relpath(path, found.folder)
    overrides = [*map(without_secrets, found.overrides), *found.best_overrides]
    content = nested(o for o in overrides if not o.startswith("data.holdout="))
    *others, last = (name_of(name) for name in found.space)
    varied = " and ".join(filter(None, (", ".join(others), last)))
    number = {
        stage: sum(t.counts and t.stage == stage for t in found.trials)
        for stage in ("coarse", "fine")
    }
    head = [
        f"{path.stem} with {varied} tuned.",
        "",
        f"Expected: {best.top1:.2f} % top-1 after {best.epochs:.3g} epochs, as one run reached on "
        f"{found.held_out} training images that were held out. It is the best of several runs, "
        "which flatters it; on the validation set it has not been measured yet.",
        f"Tuned: {varied}, in {number['coarse']} coarse and {number['fine']} fine trials, by "
        f"`largebatch tune lr` on {date.today().isoformat()}.",
    ]
    lines = [f"# {line}".rstrip() for text in head for line in textwrap.wrap(text, 98) or [""]]
    body = yaml.safe_dump(
        {"extends": base, **content}, sort_keys=False, default_flow_style=False, allow_unicode=True
    )
    return "\n".join(lines) + "\n" + body


def draw(found: Found) -> Path:
    """Draw accuracy over the learning rate, and return the picture's path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()

    def plot(trials: list[Tried], style: str, label: str, **look: Any) -> None:
        places = [(t.settings["lr"], t.top1) for t in trials if t.top1 is not None]
        axes.plot([x for x, _ in places], [y for _, y in places], style, label=label, **look)

    coarse = [t for t in found.trials if t.stage == "coarse"]
    fine = sorted(
        (t for t in found.trials if t.stage == "fine" and t.state == "finished"),
        key=lambda t: t.settings["lr"],
    )
    plot([t for t in coarse if t.state == "finished"], "o", "coarse trial", color="tab:blue")
    stopped = [t for t in coarse if t.state not in ("finished", "diverged")]
    plot(stopped, "o", "stopped early", mfc="none", color="tab:gray")
    plot([t for t in coarse if t.state == "diverged"], "x", "diverged", color="tab:red")
    plot([t for t in fine if not t.seed], "s-", "fine trial", color="black")
    plot([t for t in fine if t.seed], "s", "second seed", mfc="none", color="black")
    plot([found.best], "o", "best", ms=18, mfc="none", mew=2, color="tab:orange")
    axes.set_xscale("log")
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("top-1 on held-out images (%)")
    axes.set_title(
        f"{Path(found.recipe).stem}: {found.best.top1:.2f} % at {found.best.settings['lr']:g}"
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    path = found.folder / PICTURE
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise RecipeError(f"--out: cannot write {path}: {error}") from None
    return path


def _neighbours(found: Found) -> dict[float, float]:
    """By how many points the rates beside the best one are behind it, with the same seed."""
    if found.best.stage != "fine":
        return {}
    points = behind(line_of(found.trials), found.best.place)
    rates = {t.place: t.settings["lr"] for t in found.trials if t.stage == "fine"}
    return {rates[place]: value for place, value in points.items()}


def _ranked(found: Found) -> list[Tried]:
    """All trials, the best first: finished ones, those of the fine stage before coarse ones."""
    order = sorted(
        found.trials,
        key=lambda t: (t.state == "finished", t.stage == "fine", t.score),
        reverse=True,
    )
    return [found.best, *(t for t in order if t != found.best)]
