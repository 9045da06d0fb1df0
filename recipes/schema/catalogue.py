"""The packaged recipes, as the site and ``largebatch recipes`` list them.

The accuracy that a recipe should reach is the clause of its head comment that begins with
"Expected" or "Reaches".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .load import load
from .names import recipe_names
from .recipe import Recipe

_REACHES = re.compile(r"^(?:Expected:|Reaches) (.+?)(?:[.;:,] |[.;,]$)", re.DOTALL | re.MULTILINE)
_IS_TRAINED_HERE = re.compile(r"^Reaches ", re.MULTILINE)

#: Keys that decide which accuracy a recipe reaches, beside the images and how they are cropped.
_DECIDES = (
    *("model", "batch_size", "batch_norm", "stages", "epochs", "optimizer", "schedule"),
    *("label_smoothing", "init", "ema", "target_accuracy", "stop_after"),
)


class Images(NamedTuple):
    """The images of a data set: how many to train on, how many to evaluate, and their classes."""

    train: int
    val: int
    classes: int


#: The data sets of the packaged recipes, by ``data.path``.
DATA_SETS = {
    "data/cifar10": Images(50_000, 10_000, 10),
    "data/digits": Images(1437, 360, 10),
    "data/images": Images(2_160, 240, 5),  # an example of your own images
    "data/imagenet": Images(1_281_167, 50_000, 1000),
}

#: Keys of ``data`` that do not: where the same images lie, and how fast they are read.
_SAME_IMAGES = {
    *("source", "path", "train_shards", "val_shards", "label_offset"),
    *("train_images", "val_images", "classes"),  # of synthetic images
    *("backend", "threads", "prefetch", "hw_decoder_load", "on_error", "verify"),
}


@dataclass(frozen=True)
class Entry:
    """A recipe in the table.

    Attributes:
        name: Name of the recipe.
        recipe: The validated recipe.
        what: Description in a few words.
        reaches: Accuracy that it should reach, as its head comment says.
        is_trained_here: Whether that is what it reached here, and not what others published.
    """

    name: str
    recipe: Recipe
    what: str
    reaches: str
    is_trained_here: bool

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
        loaded = load(name)
        first = loaded.head.partition("\n")[0].rstrip(".")
        found.append(
            Entry(
                name=name,
                recipe=loaded.recipe,
                what=first.rpartition(": ")[2],
                reaches=promised(loaded.head),
                is_trained_here=bool(_IS_TRAINED_HERE.search(loaded.head)),
            )
        )
    return sorted(found, key=_place)


def _place(entry: Entry) -> tuple[bool, str, int, str]:
    """By which recipes are sorted: MLPerf's reference points first."""
    family = _family(entry.name)
    return family != "resnet50", family, entry.recipe.batch_size, entry.name


class Family(NamedTuple):
    """Recipes that differ in their batch sizes: their names, what they are, and their top-1."""

    names: str
    what: str
    top1: str


def families(found: Iterable[Entry]) -> list[Family]:
    """One line for the recipes of each name but for the batch size, from small to large."""
    lines = []
    for family, several in itertools.groupby(found, lambda entry: _family(entry.name)):
        first, *others = several
        names = [first.name, *(entry.name.removeprefix(family) for entry in others)]
        reached = [e.top1 for e in (first, *others) if e.is_trained_here]
        top1 = reached[-1] if reached else "not measured yet"
        if len(reached) > 1:
            top1 = f"{reached[0].removesuffix(' %')} to {top1}"
        lines.append(Family(", ".join(names), first.what, top1))
    return lines


def _family(name: str) -> str:
    """The name of a recipe without its batch size."""
    return name.rpartition("-b")[0] or name


def promised(head: str) -> str:
    """The accuracy that a head comment says a recipe should reach; empty if it says none."""
    found = _REACHES.search(head)
    return " ".join(found[1].split()) if found else ""


def promised_as_it_is(name: str, recipe: Recipe, images: Images) -> str:
    """What a packaged recipe promises; empty for a run on other images, or with other keys.

    Args:
        name: Name of the recipe.
        recipe: The recipe of the run. Only what decides which accuracy it reaches is compared.
        images: The images of the run, wherever they lie and in whatever form.
    """
    if name not in recipe_names():
        return ""
    loaded = load(name)
    measured_on = DATA_SETS.get(loaded.recipe.data.path or "")
    is_same = images == measured_on and _decisive(loaded.recipe) == _decisive(recipe)
    return promised(loaded.head) if is_same else ""


def _decisive(recipe: Recipe) -> list[Any]:
    """What decides which accuracy a recipe reaches."""
    images = recipe.data.source != "synthetic", recipe.data.model_dump(exclude=_SAME_IMAGES)
    return [*images, *(getattr(recipe, key) for key in _DECIDES)]
