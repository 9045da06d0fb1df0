"""Runs as a page shows them: grouped where they differ in nothing but their seed, with intervals.

Over seeds there are means with 95 % intervals by Student's t, and differences with Welch's.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..files import DamagedFileError, number, object_in, read_text
from ..schema.names import RECIPE
from ..schema.retired import RETIRED
from ..training.folder.names import SUMMARY
from ..training.folder.outcome import (
    Line,
    Metrics,
    NoMetricsError,
    Outcome,
    begun_metrics,
    column,
    images_in,
    outcome_of,
    recipe_of,
)
from ..training.watch.clocks import PHASES
from ..words import count

#: Keys of a recipe that say where a run lies and what is written beside it, and not how it trains:
#: runs that differ in them alone are runs of one recipe.
_BESIDE = (
    *("run_dir", "resume", "track", "profile"),
    *("log_every", "trust_ratios_every", "gradient_noise_every"),
)
#: Facts of a run beside its recipe, by their keys in ``summary.json``.
_FACTS = {
    **{"world_size": "ranks", "device": "device used", "backend": "decoder"},
    "batch_norm_images": "images per batch norm",
}
#: Longest name of a group that is made of what it differs in, in characters.
_LONGEST = 48

#: The axes that a curve can be drawn against.
AXES = ("steps", "epochs", "images", "seconds")

#: A mean or a difference of means, and half of its 95 % interval's width, None of one value.
Estimate = tuple[float, float | None]
#: What runs reach: heading with the unit, and decimals.
QUANTITIES = {
    "top1": ("last top-1, %", 2),
    "best_top1": ("best top-1, %", 2),
    "ema_top1": ("top-1 of EMA, %", 2),
    "val_loss": ("validation loss", 4),
    "train_loss": ("training loss", 4),
    "epoch": ("epochs", 2),
    "seconds": ("training time, s", 1),
    "images_per_second": ("throughput, images/s", 1),
}

#: Parts of the time of training, in the order in which they are shown. What no phase took is the
#: rest; where the clocks of a GPU and its host exceed the time of a line, the rest is 0.
PARTS = {**PHASES, "rest": "rest"}
#: What each line has that records phases; copies need a GPU, and all-reduces several ranks.
_ALWAYS = {"input_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"}


@dataclass(frozen=True)
class Run:
    """A run; ``keys`` are the recipe's, dotted, that training depends on, without the seed."""

    folder: str
    outcome: Outcome
    metrics: Metrics
    keys: dict[str, Any]
    facts: dict[str, Any]
    seed: Any
    recipe_text: str

    def positions(self, lines: Sequence[Line]) -> dict[str, list[float]]:
        """Where lines of its training lie by axis of :data:`AXES`; empty if not recorded."""
        steps = [line["step"] for line in lines]
        found = {"steps": steps, "epochs": [line["epoch"] for line in lines]}
        train = self.metrics.train
        images = [images_in([line]) for line in train]
        seconds = [number(line.get("seconds")) or 0.0 for line in train]
        for axis, sums in (("images", np.cumsum(images)), ("seconds", np.cumsum(seconds))):
            at = [0, *(line["step"] for line in train)]
            known = train and sums[-1] > 0
            found[axis] = np.interp(steps, at, [0, *sums]).round(3).tolist() if known else []
        return found

    @property
    def reached(self) -> dict[str, float]:
        """What of :data:`QUANTITIES` the run has reached so far."""
        train, seconds = self.metrics.train, sum(column(self.metrics.train, "seconds"))
        found = vars(self.outcome) | {
            "val_loss": next(iter(column(self.metrics.val[-1:], "loss")), None),
            "images_per_second": images_in(train) / seconds if seconds else None,
        }
        return {key: found[key] for key in QUANTITIES if found[key] is not None}


@dataclass(frozen=True)
class Group:
    """Runs of one recipe by their names on the page; ``name`` sets it apart from other groups."""

    name: str
    runs: dict[str, Run]

    @property
    def counted(self) -> list[Run]:
        """The runs that finished, the first of each seed: an equal one is no new sample."""
        finished = [run for run in self.runs.values() if run.outcome.state == "finished"]
        seeds = [run.folder if run.seed is None else _text(run.seed) for run in finished]
        return [run for i, run in enumerate(finished) if seeds.index(seeds[i]) == i]

    @property
    def states(self) -> str:
        """How many seeds it has, and how many runs that did not finish."""
        states = (run.outcome.state for run in self.runs.values())
        others = [state for state in states if state != "finished"]
        counts = [f"{others.count(state)} {state}" for state in dict.fromkeys(others)]
        return ", ".join([f"{count(len(self.counted), 'seed')} finished", *counts])

    @property
    def estimates(self) -> dict[str, Estimate]:
        """The means over its seeds, of those quantities that all of them have."""
        values = [run.reached for run in self.counted]
        having = [key for key in QUANTITIES if values and all(key in each for each in values)]
        return {key: estimate([each[key] for each in values]) for key in having}

    def against(self, other: Group) -> Estimate | None:
        """Return its last top-1 minus that of another group; None without one of the two."""
        ours, theirs = (
            [run.outcome.top1 for run in of.counted if run.outcome.top1 is not None]
            for of in (self, other)
        )
        return estimate(ours, theirs) if ours and theirs and self is not other else None

    @property
    def shares(self) -> dict[str, float]:
        """The share in percent of each of :data:`PARTS` in the lines that record all of them."""
        lines = [line for run in self.runs.values() for line in run.metrics.train]
        rows = list(filter(None, map(_parts, lines)))
        sums = {key: math.fsum(row.get(key, 0.0) for row in rows) for key in PARTS}
        return {key: 100 * of / math.fsum(sums.values()) for key, of in sums.items() if of}


def read_runs(folders: Iterable[Path]) -> tuple[list[Group], list[str]]:
    """Read the runs in some folders: in groups, in their order, and with notes on them."""
    alike: dict[str, list[Run]] = {}
    left_out: dict[Path, NoMetricsError] = {}
    for folder in {folder.resolve(): folder for folder in folders}.values():
        try:
            run = _read(folder)
        except NoMetricsError as error:
            left_out[folder] = error
            continue
        # Of runs without a recipe nothing is known to be equal.
        alike.setdefault(_text(run.keys or run.folder), []).append(run)
    if not alike:
        raise next(iter(left_out.values()))
    members = list(alike.values())
    named = zip(_names(members), members, strict=True)
    groups = [Group(name, _named(name, of)) for name, of in named]
    notes = [f"{folder} is left out: it has no metrics yet." for folder in left_out]
    for group in groups:
        for name, run in group.runs.items():
            damage = ([] if run.keys else [f"{RECIPE} cannot be read."]) + run.metrics.notes
            notes += [f"{name}: {note}" for note in damage]
    return groups, notes


def differences(members: Sequence[Iterable[Run]]) -> dict[str, list[str]]:
    """The keys of recipes, and the facts, that differ, with their value or values by group."""
    facts = [[{"recipe": r.outcome.recipe, **r.keys, **r.facts} for r in runs] for runs in members]
    rows = {}
    for key in dict.fromkeys(key for of in facts for each in of for key in each):
        values = [dict.fromkeys(_text(each[key]) for each in of if key in each) for of in facts]
        lacking = {} in values and key not in _FACTS.values()
        if lacking or len({value for each in values for value in each}) > 1:
            rows[key] = [", ".join(each) or "—" for each in values]
    return rows


def estimate(values: Sequence[float], others: Sequence[float] | None = None) -> Estimate:
    """Return the mean of some values, or their mean minus that of others, with its interval."""
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    samples = [values] if others is None else [values, others]
    mean = statistics.fmean(values) - (statistics.fmean(others) if others else 0.0)
    if min(map(len, samples)) < 2:
        return mean, None
    parts = [(statistics.variance(each) / len(each), len(each) - 1) for each in samples]
    total = sum(part for part, _ in parts)
    if not total:
        return mean, 0.0
    freedom = 1 / sum((part / total) ** 2 / free for part, free in parts)
    return mean, float(stdtrit(freedom, 0.975)) * math.sqrt(total)


def _read(folder: Path) -> Run:
    metrics = begun_metrics(folder)
    keys, summary = dict(_flat(recipe_of(folder))), object_in(folder / SUMMARY)
    try:
        recipe = read_text(folder / RECIPE)
    except (OSError, DamagedFileError):
        recipe = ""
    seed = keys.pop("seed", None)
    facts = {name: of for key, name in _FACTS.items() if (of := summary.get(key)) is not None}
    return Run(str(folder), outcome_of(folder), metrics, keys, facts, seed, recipe)


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested keys as dotted keys, without those of :data:`_BESIDE` and retired ones at default."""
    for name, value in ((prefix + key, value) for key, value in content.items()):
        if isinstance(value, dict) and value and name not in _BESIDE:
            yield from _flat(value, f"{name}.")
        elif name not in _BESIDE and (name not in RETIRED or RETIRED[name] not in (value, ...)):
            yield name, value


def _names(members: Sequence[list[Run]]) -> list[str]:
    """For each group what it differs in, if short; else its first folder; of one, the recipe."""
    if len(members) == 1:
        return [members[0][0].outcome.recipe or members[0][0].folder]
    facts = _FACTS.values()
    rows = {k: of for k, of in differences(members).items() if k not in facts and "—" not in of}
    titles = {key: "" if key == "recipe" else key.rpartition(".")[2] + " " for key in rows}
    names = [", ".join(titles[key] + rows[key][i] for key in rows) for i in range(len(members))]
    short = max(map(len, names)) <= _LONGEST and len({*names} - {""}) == len(names)
    return names if short else [runs[0].folder for runs in members]


def _named(name: str, runs: Sequence[Run]) -> dict[str, Run]:
    """The runs of a group by name: the group's with the seed, or the folder where that repeats."""
    if len(runs) == 1:
        return {name: runs[0]}
    seeds = [_text(run.seed) for run in runs]
    ends = [run.folder if seeds.count(_text(run.seed)) > 1 else f"seed {run.seed}" for run in runs]
    return {f"{name}, {end}": run for end, run in zip(ends, runs, strict=True)}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)


def _parts(line: Line) -> dict[str, float]:
    """The seconds of each of :data:`PARTS` in a line; empty if one is missing or damaged."""
    seconds = number(line.get("seconds")) or 0.0
    found = {key: number(line[key]) for key in PHASES if key in line}
    known = {key: value for key, value in found.items() if value is not None and value >= 0}
    if seconds <= 0 or len(known) < len(found) or not known.keys() >= _ALWAYS:
        return {}
    return {**known, "rest": max(0.0, seconds - math.fsum(known.values()))}
