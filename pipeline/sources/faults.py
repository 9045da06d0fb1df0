"""Faults that a source finds in its files, and what is done about them: the callback ``on_fault``.

A source describes each fault to its callback and goes on, unless the callback raises. So training,
which refuses some and counts others, and ``largebatch data check``, which lists all, see the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import DataError, printable

#: Training refuses the data: labels would be wrong, or images could not be read.
STOPS = "stops training"
#: A file or folder that holds no images of the data set, as far as its name says.
OTHER = "other file"
#: Folders of the system or of tools, with images that are not those of the data set.
HIDDEN = "hidden or system folders"
#: Classes that have a number, and no images: labels may be ids of something else.
UNUSED = "classes without images"
# What is left out of training although it is meant to be in it, by the words it is counted with.
STRAYS = "images beside the class folders"
NESTED = "images in folders inside class folders"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a file or folder."""

    name: str  #: Its path, as it is in the file system.
    what: str  #: What is wrong, in words that follow the name.
    kind: str = STOPS  #: Or the constants above, or the words by which it is counted.
    count: int = 1  #: Number of images or files that it concerns.

    def __str__(self) -> str:
        return f"{printable(self.name)} {printable(self.what)}"

    @property
    def leaves_out(self) -> bool:
        """Whether training goes on without images that are meant to be in it."""
        return self.kind not in (STOPS, OTHER, HIDDEN, UNUSED)


#: Called with each fault that a source finds; what it raises ends the search.
OnFault = Callable[[Fault], None]


def no_class_of(known: tuple[str, ...]) -> str:
    """Say that the training images, which have the classes ``known``, do not have a class."""
    return (
        f"is not a class of the training images ({len(known)} classes, {known[0]} to {known[-1]})"
    )


def refuse(fault: Fault) -> None:
    """Raise :class:`DataError` for a fault that stops training, and pass over all others."""
    if fault.kind == STOPS:
        raise DataError(str(fault))


class LeftOut:
    """Refuses what stops training, and counts what training leaves out: an ``on_fault``."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._example = ""

    def __call__(self, fault: Fault) -> None:
        refuse(fault)
        if fault.kind != OTHER:
            self._example = self._example or printable(fault.name)
            self._counts[fault.kind] += fault.count

    def line(self) -> str:
        """Return one line with all counts; empty if nothing is left out."""
        if not self._counts:
            return ""
        counts = ", ".join(f"{kind}: {count:,}" for kind, count in self._counts.items())
        return (
            f"not in the data: {counts}, such as {self._example}; largebatch data check lists all"
        )
