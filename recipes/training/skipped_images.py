"""The images that a run left out, in its folder: ``skipped_images.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path

from ...pipeline import Loader
from ..ranks import Job

SKIPPED = "skipped_images.jsonl"


class SkippedImages:
    """Gathers what the loaders of all ranks could not use.

    Args:
        run_dir: the run's folder.
        job: the ranks.
        loaders: of this rank, by split.
    """

    def __init__(self, run_dir: Path, job: Job, loaders: dict[str, Loader]) -> None:
        self._path = run_dir / SKIPPED
        self._job = job
        self._loaders = loaders
        self._told = 0
        self._listed: set[str] = set()
        if job.is_main and self._path.exists():
            # of the run that is resumed; a last line that a crash cut short is written again
            lines = self._path.read_text().split("\n")[:-1]
            self._path.write_text("".join(f"{line}\n" for line in lines))
            self._listed = {json.loads(line)["image"] for line in lines}

    @property
    def news(self) -> int:
        """How many images this rank has found since :meth:`record`."""
        return sum(len(loader.skipped) for loader in self._loaders.values()) - self._told

    def record(self) -> list[str]:
        """Write down what all ranks found: a collective.

        Returns:
            On the rank that leads: a line for each image that was not known.
        """
        found = [
            {"split": split, "image": image, "what": what}
            for split, loader in self._loaders.items()
            for image, what in loader.skipped.items()
        ]
        self._told = len(found)
        everyone = self._job.gather(found)
        if not self._job.is_main:
            return []
        lines = []
        for entry in (entry for entries in everyone for entry in entries):
            if entry["image"] in self._listed:
                continue
            self._listed.add(entry["image"])
            with self._path.open("a") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            lines.append(f"skipped {entry['image']}: it {entry['what']}")
        return lines

    @property
    def count(self) -> int:
        """On the rank that leads: how many images are listed."""
        return len(self._listed)
