"""Runs that obey a law, in place of training: what an estimate should find is then known."""

import json
import math
from pathlib import Path

from largebatch.recipes.schema.load import load
from largebatch.recipes.training.folder.metrics import METRICS
from largebatch.recipes.tune.critical_batch import one_run
from largebatch.recipes.tune.trial import Outcome, Reading
from tests.recipes.runs import BASE

SECONDS_PER_EPOCH = 2.0
IMAGES = 40  # of the photos, without 13 that are held out

#: A recipe on the photos, whose batches are small so that they make many updates.
SMALL = [*BASE, "data.holdout=13", "batch_size=4", "micro_batch_size=4", "epochs=50"]
SMALL += ["label_smoothing=0"]


class Law:
    """Takes the place of ``measure``: losses of ``2 / effective epochs``, times noise.

    Attributes:
        critical: The critical batch.
        noise: Factor on the loss by run, as a function of batch size, seed and epochs.
        ends: Batch sizes whose runs diverge.
        made: Pairs of batch size and epochs of the runs that were made.
        stop_at: Number of runs after which the process is told to end.
        noise_scale: Gradient noise scale of a run that measures it, by epoch and length.
        seconds_per_epoch: Time of training steps.
    """

    seconds_per_epoch = SECONDS_PER_EPOCH
    noise_scale = None

    def __init__(self, critical, noise=lambda batch, seed, epochs: 1.0, ends=(), stop_at=math.inf):
        self.critical, self.noise, self.ends, self.stop_at = critical, noise, ends, stop_at
        self.made = []

    def __call__(self, recipe, overrides, job, run_dir, watch=None):
        if len(self.made) >= self.stop_at:
            raise SystemExit(143)
        given = dict(override.split("=", 1) for override in overrides)
        batch, wanted = int(given["batch_size"]), float(given["epochs"])
        epochs = round(wanted * IMAGES / batch) * batch / IMAGES
        self.made.append((batch, wanted))
        seconds = self.seconds_per_epoch * epochs
        run_dir.mkdir()
        with (run_dir / METRICS).open("w") as file:
            for part in (1, 2, 3, 4):
                line = {"split": "train", "step": part, "epoch": epochs * part / 4}
                line["seconds"] = seconds / 4
                if self.noise_scale and given["gradient_noise_every"] != "null":
                    line["noise_scale"] = self.noise_scale(line["epoch"], epochs + 1e-6)
                    line["noise_scale_error"] = 1.0
                file.write(json.dumps(line) + "\n")
        if batch in self.ends:
            return Outcome("diverged", (), (), epochs / 2, seconds)
        noise = self.noise(batch, int(given["seed"]), epochs)
        loss = 2 * (1 + batch / self.critical) / epochs * noise
        reading = Reading(round(epochs * IMAGES / batch), epochs, loss, 50.0)
        return Outcome("finished", (reading,), ((epochs, loss),), epochs, seconds)

    def install(self, monkeypatch):
        monkeypatch.setattr(one_run, "measure", self)
        return self


def loaded(photos: Path, *overrides):
    return load("digits", [*SMALL, f"data.path={photos}", *overrides])
