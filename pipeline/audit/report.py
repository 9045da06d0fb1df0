"""The report of an audit: the contents of a data set and its faults."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import printable
from ..sources.faults import STOPS, UNUSED, Fault


@dataclass(frozen=True)
class Spread:
    """The minimum, the median and the maximum of some numbers."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: NDArray[np.int64]) -> Spread | None:
        """Return the spread of values; None if there are none."""
        return cls(*map(float, np.quantile(values, (0, 0.5, 1)))) if len(values) else None


@dataclass(frozen=True)
class Finding:
    """A finding about what has the path ``name``; in a shard, its path, a colon and a name."""

    name: str
    what: str


@dataclass(frozen=True)
class Repeated:
    """The names of images that are identical byte by byte, and their classes and splits, sorted."""

    names: list[str]
    classes: list[str]
    splits: list[str]


@dataclass
class SplitReport:
    """The contents of a split."""

    name: str
    format: str  #: ``folder``, or the format of its shards.
    images: int  #: Number of images found, including unreadable ones.
    classes: int
    shards: int  #: Number of shards; 0 for folders.
    bytes: int = 0  #: Total size of the encoded images.
    per_class: Spread | None = None  #: Number of images per class.
    width: Spread | None = None  #: In pixels.
    height: Spread | None = None
    image_bytes: Spread | None = None  #: Size of an encoded image.
    kinds: dict[str, int] = field(default_factory=dict)  #: Images by format and colour mode.
    turned: int = 0  #: Number of images whose EXIF orientation is set.
    damaged: int = 0  #: Number of images that are decoded in spite of damage.


@dataclass
class DataReport:
    """The contents of a data set and its faults; a thousand of unusual and of turned images."""

    path: str
    splits: list[SplitReport] = field(default_factory=list)
    #: Images that cannot be read or decoded, shards that disagree with their index, and classes
    #: that training refuses. Any of these stops training.
    corrupt: list[Finding] = field(default_factory=list)
    #: Images that are decoded in spite of damage, and stop training with ``data.verify=strict``.
    damaged: list[Finding] = field(default_factory=list)
    #: Images that occur more than once. If in several classes, their labels contradict each other;
    #: if in both splits, evaluation uses training images.
    repeated: list[Repeated] = field(default_factory=list)
    misnamed: list[Finding] = field(default_factory=list)  #: With another format's extension.
    #: Images that decoders may decode differently (CMYK, 16 bits, palettes, animations).
    unusual: list[Finding] = field(default_factory=list)
    turned: list[str] = field(default_factory=list)  #: Images whose EXIF orientation is set.
    #: Images that training passes over with a line, since they are not in a class folder or have
    #: an extension that is not read.
    left_out: list[Finding] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  #: Files that are not images.

    def note(self, fault: Fault) -> None:
        """Add a fault that a source has found: an ``on_fault``."""
        finding = Finding(printable(fault.name), printable(fault.what))
        if fault.kind == STOPS:
            self.corrupt.append(finding)
        elif fault.leaves_out:
            self.left_out.append(finding)
        elif fault.kind != UNUSED:  # which the images per class show
            self.others.append(finding.name)

    @property
    def usable(self) -> bool:
        """Whether training with ``data.verify=strict`` would use every image."""
        return not (self.corrupt or self.damaged or self.left_out)

    def as_json(self) -> dict[str, Any]:
        """Return the whole report as JSON-compatible values."""
        return {"usable": self.usable, **asdict(self)}
