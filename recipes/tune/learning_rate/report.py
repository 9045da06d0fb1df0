"""What a search found: a recipe, the trials as JSON, a picture and some lines."""

from __future__ import annotations

import json
import math
import os
import textwrap
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from ....pipeline import without_secrets
from ...files import write_text
from ...output import writing
from ...schema.load import find, nested
from ...schema.names import CONFIGS
from ...words import count, duration
from .line import WORST
from .result import Found, Tried

PICTURE, NUMBERS, RECIPE = "trials.png", "trials.json", "recipe.yaml"


def describe(trial: Tried) -> str:
    """One line about a trial that has ended."""
    result = "" if trial.top1 is None else f", {trial.top1:.2f} % top-1"
    result += "" if trial.loss is None else f", loss {trial.loss:.4f}"
    return (
        f"{trial.stage} trial {trial.number}: learning rate {trial.lr:g}, warm-up "
        f"{trial.warmup:.1%} of the run{', second seed' * trial.seed}: {trial.state}{result}, "
        f"{trial.epochs:.3g} epochs, {trial.seconds:.0f} s"
    )


def write(found: Found) -> list[Path]:
    """Write the numbers and the recipe into the study's folder; return their paths."""
    contents = {NUMBERS: json.dumps(numbers(found), indent=1) + "\n", RECIPE: recipe_text(found)}
    with writing(found.folder):
        for name, content in contents.items():
            write_text(found.folder / name, content)
    return [found.folder / name for name in contents]


def numbers(found: Found) -> dict[str, Any]:
    """The result as JSON data; a neighbour that diverged is null points behind."""
    return {
        "recipe": found.recipe,
        "overrides": [without_secrets(each) for each in found.overrides],
        "best": asdict(found.best),
        "behind": {
            f"{t.lr:g}": round(found.behind(t), 3) if t.score > WORST else None
            for t in found.neighbours
        },
        "held_out": found.held_out,
        "epochs_of_a_run": found.epochs,
        "epochs": round(sum(t.epochs for t in found.trials), 4),
        "seconds": round(sum(t.seconds for t in found.trials), 1),
        "ranges": {name: [d.low, d.high] for name, d in found.space.items()},
        "trials": [asdict(t) for t in found.trials],
    }


def summary(found: Found) -> list[str]:
    """The best trial, how far its neighbours lie behind, and what limits the result."""
    best, epochs = found.best, sum(t.epochs for t in found.trials)
    assert best.top1 is not None
    lines = [
        f"{found.recipe}: {count(sum(t.counts for t in found.trials), 'trial')}, {epochs:.4g} "
        f"epochs, {epochs / found.epochs:.2f} runs of the recipe, "
        f"{duration(sum(t.seconds for t in found.trials))}",
        f"best: learning rate {best.lr:g}, warm-up {best.warmup:.1%} of the run: {best.top1:.2f} % "
        f"on {found.held_out} held-out training images",
    ]
    if own := next((t for t in found.trials if t.stage == "coarse" and t.number == 0), None):
        result = f"{own.top1:.2f} %" if own.state == "finished" else own.state
        lines.append(f"the recipe's own rate, {own.lr:g}, in a coarse trial: {result}")
    for near in found.neighbours:
        result = "training diverges"
        if near.score > WORST:
            points = found.behind(near)
            result = f"top-1 is {abs(points):.2f} points {'lower' if points >= 0 else 'higher'}"
            result += f", loss {(near.loss or 0.0) - (best.loss or 0.0):+.4f}"
        lines.append(f"neighbour: at learning rate {near.lr:g}, all else the same, {result}")
    if best in found.line.values() and (again := found.line.get((best.place, 1))):
        second = "diverged" if again.score == WORST else f"{again.top1:.2f} %"
        lines.append(f"two seeds of the best: {best.top1:.2f} % and {second}")
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
    if best not in found.line.values():
        lines.append("note: no fine trial has finished, so that rates nearby are not compared")
    low, high, at = map(math.log, (found.space["lr"].low, found.space["lr"].high, best.lr))
    if not 0.05 < (at - low) / (high - low) < 0.95:
        lines.append(
            f"note: the best learning rate, {best.lr:g}, is at the end of its range, "
            f"{found.space['lr'].low:g} to {found.space['lr'].high:g}"
        )
    return lines


def recipe_text(found: Found) -> str:
    """The recipe with the best settings: it extends the given one, with the user's overrides."""
    best, path = found.best, find(found.recipe)
    base = path.stem if path.parent == CONFIGS else os.path.relpath(path, found.folder)
    overrides = [*map(without_secrets, found.overrides), *found.best_overrides]
    content = nested(o for o in overrides if not o.startswith("data.holdout="))
    coarse, fine = (
        sum(t.counts and t.stage == stage for t in found.trials) for stage in ("coarse", "fine")
    )
    head = [
        f"{path.stem} with learning rate and warm-up tuned.",
        "",
        f"Expected: {best.top1:.2f} % top-1 after {best.epochs:.3g} epochs, as one run reached on "
        f"{found.held_out} training images that were held out. It is the best of several runs, "
        "which flatters it; on the validation set it has not been measured yet.",
        f"Tuned: learning rate and warm-up, in {coarse} coarse and {fine} fine trials, by "
        f"`largebatch tune lr` on {date.today().isoformat()}.",
    ]
    lines = [f"# {line}".rstrip() for text in head for line in textwrap.wrap(text, 98) or [""]]
    body = yaml.safe_dump(
        {"extends": base, **content}, sort_keys=False, default_flow_style=False, allow_unicode=True
    )
    return "\n".join(lines) + "\n" + body


def draw(found: Found) -> Path:
    """Draw accuracy over the learning rate with the best one marked; return the picture's path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    best = found.best
    ended = [t for t in found.trials if t.state != "diverged"]
    fine = [t for t in ended if t.stage == "fine" and t.state == "finished"]
    length = f"long trial, with the chosen warm-up, {best.warmup:.0%} of the run"
    shown = (
        ("tab:gray", "o", "short trial, each with its own warm-up",
         [t for t in ended if t.stage == "coarse"]),
        ("tab:red", "x", "diverged", [t for t in found.trials if t.state == "diverged"]),
        ("tab:blue", "s-", length, [t for t in fine if not t.seed]),
        ("tab:cyan", "D", "second seed", [t for t in fine if t.seed]),
        ("tab:orange", "*", f"chosen: {best.lr:g}, {best.top1:.2f} %", [best]),
        ("black", "|", "the recipe's own rate, in a short trial", found.trials[:1]),
    )  # fmt: skip
    for color, style, label, trials in shown:
        points = sorted((t.lr, t.top1 or 0.0) for t in trials)
        if points:
            size = 18 if style in "*|" else 6
            axes.plot(*zip(*points, strict=True), style, color=color, label=label, ms=size)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("accuracy on held-out images (%)")
    axes.set_title(f"tune lr {Path(found.recipe).stem}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    path = found.folder / PICTURE
    with writing(path):
        figure.savefig(path, dpi=110)
    return path
