"""Runs by name, and groups of those that differ in nothing but their seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RecipeError
from ..training.folder.outcome import NoMetricsError
from .run import Run, read_run

#: Longest name of a group that is made of what it differs in, in characters.
_LONGEST = 48

#: Facts of a run beside its recipe, as ``summary.json`` has them.
_FACTS = ("world_size", "device", "backend", "batch_norm_images")


@dataclass(frozen=True)
class Group:
    """Runs of one recipe.

    Attributes:
        name: What sets it apart from the other groups.
        runs: The runs, each by the one name that it has on a page: the group's, and where the
            group has several, the seed.
    """

    name: str
    runs: dict[str, Run]


def read_runs(folders: Sequence[Path]) -> tuple[dict[str, Run], list[str]]:
    """Read the runs in some folders, of which those without metrics are left out.

    Returns:
        The runs, by the end of a folder's path, as long as it takes to tell them apart; and a
        sentence about each that is left out.

    Raises:
        RecipeError: A folder holds no run or is named twice, or no run has metrics.
    """
    paths = [folder.resolve() for folder in folders]
    if twice := [f for f, path in zip(folders, paths, strict=True) if paths.count(path) > 1]:
        raise RecipeError(f"RUN: {twice[0]} is named twice; valid: each run once")
    runs: dict[str, Run] = {}
    left_out: dict[str, NoMetricsError] = {}
    for folder, path in zip(folders, paths, strict=True):
        ends = ("/".join(path.parts[-count:]) for count in range(1, len(path.parts)))
        alone = (end for end in ends if sum(f"/{p}".endswith(f"/{end}") for p in paths) == 1)
        name = next(alone, str(path))
        try:
            runs[name] = read_run(folder)
        except NoMetricsError as error:
            left_out[name] = error
    if not runs:
        raise next(iter(left_out.values()))
    return runs, [f"{name} is left out: it has no metrics yet." for name in left_out]


def groups(runs: dict[str, Run]) -> list[Group]:
    """Group the runs whose recipes are equal but for the seed, in the order in which they come."""
    found: dict[str, dict[str, Run]] = {}
    for name, run in runs.items():
        # Of runs without a recipe nothing is known to be equal.
        keys = {key: value for key, value in run.keys.items() if key != "seed"} or {"run": name}
        found.setdefault(json.dumps(keys, sort_keys=True, default=str), {})[name] = run
    names = _names(list(found.values()))
    return [Group(name, _by_seed(name, of)) for name, of in zip(names, found.values(), strict=True)]


def differences(found: Sequence[Group]) -> dict[str, list[str]]:
    """Return the keys of the recipe, and the facts, that differ, each with its value in each group.

    A fact in which the runs of one group differ has all their values.
    """
    runs = [list(group.runs.values()) for group in found]
    rows = _different_keys([of[0] for of in runs])
    for fact in _FACTS:
        values = [
            dict.fromkeys(_text(v) for run in of if (v := run.summary.get(fact)) is not None)
            for of in runs
        ]
        if len({value for each in values for value in each}) > 1:
            rows.setdefault(fact, [", ".join(each) or "—" for each in values])
    return rows


def notes(found: Sequence[Group]) -> list[str]:
    """Return what a reader has to know about the runs, a sentence each."""
    runs = [(name, run) for group in found for name, run in group.runs.items()]
    several = len(runs) > 1
    return [f"{name}: {note}" if several else note for name, run in runs for note in run.notes]


def _names(members: Sequence[dict[str, Run]]) -> list[str]:
    """A name for each group: what it differs in, if that is short; else its folder, or a number.

    The only group has the name of its recipe.
    """
    firsts = [next(iter(runs.values())) for runs in members]
    if len(members) == 1:
        return [firsts[0].recipe_name or next(iter(members[0]))]
    rows = [(key.rpartition(".")[2], of) for key, of in _different_keys(firsts).items()]
    rows = [("" if key == "recipe" else f"{key} ", of) for key, of in rows if "—" not in of]
    for row in (rows, *([each] for each in rows)):  # all of them, or one that suffices
        names = [", ".join(key + of[i] for key, of in row) for i in range(len(firsts))]
        if max(map(len, names)) <= _LONGEST and len({*names} - {""}) == len(names):
            return names
    return [
        next(iter(runs)) if len(runs) == 1 else f"setting {i}" for i, runs in enumerate(members, 1)
    ]


def _by_seed(name: str, runs: dict[str, Run]) -> dict[str, Run]:
    """The runs of a group by name: the group's with the seed, or the folder where that repeats."""
    if len(runs) == 1:
        return dict.fromkeys([name], *runs.values())
    seeds = [run.seed for run in runs.values()]
    return {
        f"{name}, " + (folder if seeds.count(run.seed) > 1 else f"seed {run.seed}"): run
        for folder, run in runs.items()
    }


def _different_keys(runs: Sequence[Run]) -> dict[str, list[str]]:
    recipes = [{"recipe": run.recipe_name or "—"} | run.keys for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key != "seed")
    rows = {key: [_text(recipe.get(key, "—")) for recipe in recipes] for key in keys}
    return {key: values for key, values in rows.items() if len({*values}) > 1}


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, list | dict):
        return json.dumps(value, default=str)
    return f"{value:g}" if isinstance(value, float) else str(value)
