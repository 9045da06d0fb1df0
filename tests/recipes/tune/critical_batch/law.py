"""Runs that obey a law, in place of training: what an estimate should find is then known."""

import math
from pathlib import Path
from types import SimpleNamespace

from largebatch.recipes.schema.load import load
from largebatch.recipes.tune.critical_batch import estimate
from largebatch.recipes.tune.critical_batch.runs import Record
from tests.recipes.runs import BASE

SECONDS_PER_EPOCH = 2.0
IMAGES = 40  # of the photos, without 13 that are held out

#: A recipe on the photos, whose batches are small so that they make many updates.
SMALL = [*BASE, "data.holdout=13", "batch_size=4", "micro_batch_size=4", "epochs=50"]
SMALL += ["label_smoothing=0"]


class Law:
    """Takes the place of training: losses of ``2 / effective epochs``, times noise by run.

    Runs of the batches in ``ends`` diverge; after ``stop_at`` runs the process is told to end.
    ``kept`` are records by folder; those of another law continue its runs.
    """

    def __init__(
        self, critical, noise=lambda batch, seed, epochs: 1.0, ends=(), stop_at=math.inf, kept=None
    ):
        self.critical, self.noise, self.ends, self.stop_at = critical, noise, ends, stop_at
        self.made, self.seconds, self.kept = [], 0.0, {} if kept is None else kept

    def make(self, base, run, job, folder):
        if len(self.made) >= self.stop_at:
            raise SystemExit(143)
        epochs = round(run.epochs * IMAGES / run.batch_size) * run.batch_size / IMAGES
        loss = 2 * (1 + run.batch_size / self.critical) / epochs
        loss *= self.noise(run.batch_size, run.seed, epochs)
        found = ("finished", loss, 50.0)
        if run.batch_size in self.ends:
            found = ("diverged", math.inf, 0.0)
        self.made.append((run.batch_size, run.epochs))
        self.seconds += SECONDS_PER_EPOCH * epochs
        folder.mkdir()
        self.kept[folder] = Record(run, *found, epochs, SECONDS_PER_EPOCH * epochs)
        return self.kept[folder]

    def install(self, monkeypatch):
        monkeypatch.setattr(estimate, "make", self.make)
        monkeypatch.setattr(estimate, "record_of", lambda *given: self.kept.get(given[-1]))
        monkeypatch.setattr(estimate, "time", SimpleNamespace(monotonic=lambda: self.seconds))
        return self


def loaded(photos: Path, *overrides):
    return load("digits", [*SMALL, f"data.path={photos}", *overrides])
