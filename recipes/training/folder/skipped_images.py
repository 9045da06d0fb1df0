"""The list of images that a run skipped: ``skipped_images.jsonl`` in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ....pipeline import Loader
from ...files import DamagedFileError, parse_json, read_bytes, write_text
from ...ranks import Job

SKIPPED = "skipped_images.jsonl"
_MOST_BYTES = 2**30


class SkippedImages:
    """Collects the unusable images that the loaders of all ranks have met.

    Args:
        run_dir: The run's folder.
        job: The ranks.
        loaders: The loaders of this rank, by split; None for one that there is not.
    """

    def __init__(self, run_dir: Path, job: Job, loaders: Mapping[str, Loader | None]) -> None:
        self._path = run_dir / SKIPPED
        self._job = job
        self._loaders = {split: loader for split, loader in loaders.items() if loader}
        self._recorded = 0
        self._lines: dict[str, str] = {}
        self._written = 0  # number of lines in the file
        if job.is_main:
            for line in _read(self._path):
                self._lines[str(line["image"])] = json.dumps(line, ensure_ascii=False)

    @property
    def news(self) -> int:
        """Number of images that this rank has found since the last :meth:`record`."""
        return sum(len(loader.skipped) for loader in self._loaders.values()) - self._recorded

    def show(self, warn: Callable[[str], None]) -> None:
        """Warn of what :meth:`record` returns; a collective."""
        for line in self.record():
            warn(line)

    def record(self) -> list[str]:
        """Add the images found on all ranks to the list; a collective.

        Returns:
            One line for each image that is new in the list; empty on other ranks than 0.
        """
        found = [
            {"split": split, "image": image, "what": what}
            for split, loader in self._loaders.items()
            for image, what in loader.skipped.items()
        ]
        self._recorded = len(found)
        everyone = self._job.gather(found)
        if not self._job.is_main:
            return []
        lines = []
        for entry in (entry for entries in everyone for entry in entries):
            if entry["image"] in self._lines:
                continue
            self._lines[entry["image"]] = json.dumps(entry, ensure_ascii=False)
            lines.append(f"skipped {entry['image']}: {entry['what']}")
        if len(self._lines) > self._written:
            try:
                self._write()
            except OSError as error:  # tried again when there are more, and at the end of the run
                lines.append(f"{self._path} cannot be written: {error.strerror}")
        return lines

    def _write(self) -> None:
        """Write the list anew, so that a disk that is full leaves the old one."""
        write_text(self._path, "".join(f"{line}\n" for line in self._lines.values()))
        self._written = len(self._lines)

    @property
    def count(self) -> int:
        """Number of images in the list, on rank 0."""
        return len(self._lines)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run that is resumed; damaged ones are found again with their images."""
    with suppress(OSError, DamagedFileError):
        for content in read_bytes(path, _MOST_BYTES).split(b"\n")[:-1]:
            with suppress(DamagedFileError):
                line = parse_json(content)
                if isinstance(line, dict) and "image" in line:
                    yield line
