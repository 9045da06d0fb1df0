"""Runs which differ only in their seed, grouped, and what the groups differ in."""

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
_FACTS = ("world_size", "device", "precision", "backend", "batch_norm_images")


@dataclass(frozen=True)
class Group:
    """Runs of one recipe.

    Attributes:
        name: What sets it apart from the other groups.
        runs: The runs, by name.
    """

    name: str
    runs: dict[str, Run]


@dataclass(frozen=True)
class Difference:
    """A key in which groups differ.

    Attributes:
        key: The key of the recipe, or a fact of the run.
        values: The value in each group, as text; ``—`` where a group has none.
    """

    key: str
    values: list[str]


def read_runs(folders: Sequence[Path]) -> dict[str, Run]:
    """Read the runs in some folders.

    Returns:
        The runs by name: the end of a folder's path, as long as it takes to tell them apart.

    Raises:
        RecipeError: A folder holds no run or no metrics yet, or is named twice.
    """
    return {name: read_run(folder) for name, folder in _named(folders).items()}


def read_begun_runs(folders: Sequence[Path]) -> tuple[dict[str, Run], list[str]]:
    """As :func:`read_runs`, without the runs that have no metrics yet if another one has some.

    Returns:
        The runs by name, and a sentence about each that is left out.

    Raises:
        RecipeError: A folder holds no run or is named twice, or no run has metrics.
    """
    runs, left_out = {}, []
    first: NoMetricsError | None = None
    for name, folder in _named(folders).items():
        try:
            runs[name] = read_run(folder)
        except NoMetricsError as error:
            first = first or error
            left_out.append(f"{name} is left out: it has no metrics yet.")
    if first and not runs:
        raise first
    return runs, left_out


def groups(runs: dict[str, Run]) -> list[Group]:
    """Group the runs whose recipes are equal but for the seed, in the order in which they come."""
    found: dict[str, dict[str, Run]] = {}
    for name, run in runs.items():
        keys = {key: value for key, value in run.keys.items() if key != "seed"}
        # Of runs without a recipe nothing is known to be equal.
        identity = json.dumps(keys, sort_keys=True, default=str) if keys else f"run {name}"
        found.setdefault(identity, {})[name] = run
    members = list(found.values())
    names = _names(members)
    return [Group(name, of) for name, of in zip(names, members, strict=True)]


def differences(found: Sequence[Group]) -> list[Difference]:
    """Return the keys of the recipe and the facts of the runs in which groups differ."""
    firsts = [next(iter(group.runs.values())) for group in found]
    rows = [Difference(key, values) for key, values in _different_keys(firsts).items()]
    recipes = [run.recipe_name or "—" for run in firsts]
    if len(set(recipes)) > 1:
        rows.insert(0, Difference("recipe", recipes))
    for fact in _FACTS:
        values = [_facts(group, fact) for group in found]
        known = {value for value in values if value != "—"}
        if len(known) > 1 and fact not in {row.key for row in rows}:
            rows.append(Difference(fact, values))
    return rows


def mixed(group: Group) -> list[str]:
    """Return what the runs of a group differ in beside the seed, a sentence each."""
    found = []
    for fact in _FACTS:
        values = _facts(group, fact)
        if ", " in values:
            found.append(f"{group.name}: its runs differ in {fact} ({values}).")
    finished = [run for run in group.runs.values() if run.status == "finished"]
    seeds = [run.seed for run in finished if run.seed is not None]
    if repeated := len(seeds) - len({*seeds}):
        runs = "1 finished run repeats" if repeated == 1 else f"{repeated} finished runs repeat"
        found.append(
            f"{group.name}: {runs} the seed of another; the first finished run of each seed counts."
        )
    return found


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    paths = [folder.resolve() for folder in folders]
    for path, folder in zip(paths, folders, strict=True):
        if paths.count(path) > 1:
            raise RecipeError(f"RUN: {folder} is named twice; valid: each run once")
    return {_name(path, paths): folder for path, folder in zip(paths, folders, strict=True)}


def _name(path: Path, others: Sequence[Path]) -> str:
    parts = path.parts
    for count in range(1, len(parts)):
        if sum(other.parts[-count:] == parts[-count:] for other in others) == 1:
            return "/".join(parts[-count:])
    return str(path)


def _names(members: Sequence[dict[str, Run]]) -> list[str]:
    """A name for each group: its keys that others have otherwise, if few, else that of a run."""
    firsts = [next(iter(runs.values())) for runs in members]
    if len(members) == 1:
        return [firsts[0].recipe_name or next(iter(members[0]))]
    different = _different_keys(firsts)
    short = [key.rpartition(".")[2] for key in different]
    names = []
    for i in range(len(members)):
        told = zip(short, different, strict=True)
        name = ", ".join(f"{word} {different[key][i]}" for word, key in told)
        if len({run.recipe_name for run in firsts}) > 1:
            name = ", ".join(filter(None, (firsts[i].recipe_name, name)))
        names.append(name)
    if max(map(len, names)) <= _LONGEST and len({*names}) == len(names) == len({*names} - {""}):
        return names
    return [_of_run(runs) for runs in members]


def _of_run(runs: dict[str, Run]) -> str:
    first, more = next(iter(runs)), len(runs) - 1
    return first + (f" and {more} more" if more else "")


def _different_keys(runs: Sequence[Run]) -> dict[str, list[str]]:
    keys = dict.fromkeys(key for run in runs for key in run.keys if key != "seed")
    rows = {key: [_text(run.keys.get(key, "—")) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len({*values}) > 1}


def _facts(group: Group, fact: str) -> str:
    values = (run.summary.get(fact) for run in group.runs.values())
    known = dict.fromkeys(_text(value) for value in values if value is not None)
    return ", ".join(known) or "—"


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, list | dict):
        return json.dumps(value, default=str)
    return f"{value:g}" if isinstance(value, float) else str(value)
