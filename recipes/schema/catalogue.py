"""The packaged recipes, as the site and ``largebatch recipes`` list them.

The accuracy that a recipe should reach is the clause of its head comment that begins with
"Expected" or "Reaches".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .load import load
from .names import recipe_names
from .recipe import Recipe

_REACHES = re.compile(r"^(Expected: |Reaches )(.+?)(?:[.;:,] |[.;,]$)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """A recipe in the table."""

    name: str
    recipe: Recipe
    what: str  # in a few words
    reaches: str  # the accuracy that it should reach, as its head comment says
    is_trained_here: bool  # whether it reached that here, and not as others published it

    @property
    def family(self) -> str:
        """Its name without the batch size."""
        return self.name.rpartition("-b")[0] or self.name

    @property
    def is_imagenet(self) -> bool:
        """Whether it trains on ImageNet."""
        return self.recipe.data.path == "data/imagenet"

    @property
    def top1(self) -> str:
        """Top-1 accuracy that the recipe should reach, with its percent sign; may be empty."""
        return self.reaches.partition(" top-1")[0] if " top-1" in self.reaches else ""


def entries() -> list[Entry]:
    """The packaged recipes, sorted by model and kind of run, then by batch size."""
    found = []
    for name in recipe_names():
        loaded = load(name, asks_timm=False)
        what = loaded.head.partition("\n")[0].rstrip(".").rpartition(": ")[2]
        reached = _REACHES.search(loaded.head)
        reaches = " ".join(reached[2].split()) if reached else ""
        is_trained_here = bool(reached and reached[1] == "Reaches ")
        found.append(Entry(name, loaded.recipe, what, reaches, is_trained_here))

    def place(entry: Entry) -> tuple[bool, str, int, str]:  # MLPerf's reference points first
        return entry.family != "resnet50", entry.family, entry.recipe.batch_size, entry.name

    return sorted(found, key=place)


def families(found: Iterable[Entry]) -> list[tuple[str, str, str]]:
    """Names, what they are and top-1 of recipes that differ in their batch, from small to large."""
    lines = []
    for family, several in itertools.groupby(found, lambda entry: entry.family):
        first, *others = several
        names = [first.name, *(entry.name.removeprefix(family) for entry in others)]
        reached = [e.top1 for e in (first, *others) if e.is_trained_here]
        top1 = reached[-1] if reached else "not measured yet"
        if len(reached) > 1:
            top1 = f"{reached[0].removesuffix(' %')} to {top1}"
        lines.append((", ".join(names), first.what, top1))
    return lines
