"""The report of an audit: the contents of a data set and its faults."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import printable
from ..sources.faults import STOPS, UNUSED, Fault


@dataclass(frozen=True)
class Spread:
    """The minimum, the median and the maximum of some numbers."""

    least: float
    median: float
    most: float


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
    """The contents of a split.

    Attributes:
        format: ``folder``, or the format of its shards.
        images: Number of images found, including unreadable ones.
        shards: Number of shards; 0 for folders.
        bytes: Total size of the encoded images in bytes.
        per_class: Number of images per class.
        width, height: Those of images in pixels.
        image_bytes: Size of an encoded image in bytes.
        kinds: Number of images of each format and colour mode, most frequent first.
        turned: Number of images whose EXIF orientation is set.
        damaged: Number of images that are decoded in spite of damage.
    """

    name: str
    format: str
    images: int
    classes: int
    shards: int
    bytes: int = 0
    per_class: Spread | None = None
    width: Spread | None = None
    height: Spread | None = None
    image_bytes: Spread | None = None
    kinds: dict[str, int] = field(default_factory=dict)
    turned: int = 0
    damaged: int = 0


@dataclass
class DataReport:
    """The contents of a data set and its faults.

    Attributes:
        path: The path that was checked.
        splits: Contents of each split.
        corrupt: Images that cannot be read or decoded, shards that disagree with their index, and
            classes that training would refuse. Any of these stops training.
        damaged: Images that are decoded in spite of damage: JPEG files about which libjpeg warns,
            PNG files with wrong checksums. They stop training with ``data.verify=strict`` only;
            otherwise training uses what the backend makes of them, or stops.
        repeated: Images that occur more than once. If in several classes, their labels contradict
            each other; if in both splits, evaluation uses training images.
        misnamed: Images with the file name extension of another format.
        unusual: Images that decoders may decode differently (CMYK, 16 bits, palettes,
            animations); the first thousand of each kind.
        turned: Images whose EXIF orientation is set; the first thousand.
        left_out: Images that training passes over with a line, since they are not in a class folder
            or have an extension that is not read.
        others: Files that are not images and that training does not read.
    """

    path: str
    splits: list[SplitReport] = field(default_factory=list)
    corrupt: list[Finding] = field(default_factory=list)
    damaged: list[Finding] = field(default_factory=list)
    repeated: list[Repeated] = field(default_factory=list)
    misnamed: list[Finding] = field(default_factory=list)
    unusual: list[Finding] = field(default_factory=list)
    turned: list[str] = field(default_factory=list)
    left_out: list[Finding] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

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
