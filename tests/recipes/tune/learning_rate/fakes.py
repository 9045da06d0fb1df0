"""Searches whose runs are computed in place of trained, in milliseconds."""

import math
import os
import signal
import time
from pathlib import Path
from unittest import mock

from largebatch.recipes.schema.load import load
from largebatch.recipes.tune.learning_rate import choose
from largebatch.recipes.tune.learning_rate import search as module
from largebatch.recipes.tune.learning_rate.search import Options, search
from largebatch.recipes.tune.learning_rate.space import evenly
from largebatch.recipes.tune.runs import Outcome, Reading
from tests.recipes.runs import BASE, JOB

READINGS = 8


class FakeRuns:
    """Runs whose accuracy has its peak at a rate and a warm-up, and that diverge above a rate.

    Args:
        best_lr: The best rate; above ten times that, runs diverge.
        pause: Seconds of each run.
        fail: Called with the number of the run, and that of the evaluation that comes.
        late: Number of the run in which the time is over.
        rise: Share of its final accuracy that a run of some rate has at some part of it.
    """

    def __init__(self, best_lr=4.0, best_warmup=0.2, pause=0.0, fail=None, late=None, rise=None):
        self.best_lr, self.best_warmup = best_lr, best_warmup
        self.rise = rise or (lambda lr, part: 0.5 + part / 2)
        self.pause, self.fail, self.late, self.made = pause, fail, late, []

    def top1(self, recipe):
        warmup = recipe.schedule.warmup.value / recipe.epochs
        off = math.log10(recipe.optimizer.lr / self.best_lr)
        return 95 - 15 * abs(off) ** 1.5 - 40 * abs(warmup - self.best_warmup) - 2 / recipe.epochs

    def __call__(self, name, overrides, job, run_dir, watch=None):
        recipe = load(name, overrides).recipe
        self.made.append(recipe)
        (Path(run_dir) / "checkpoints").mkdir(parents=True)
        top1, readings, status = self.top1(recipe), [], "finished"
        if recipe.optimizer.lr > 10 * self.best_lr:
            return Outcome("diverged", (), (), 0.1 * recipe.epochs, 1.0)
        for part in range(1, READINGS + 1):
            time.sleep(self.pause / READINGS)
            now = top1 * self.rise(recipe.optimizer.lr, part / READINGS)
            reading = Reading(part, recipe.epochs * part / READINGS, 1 - now / 100, now)
            readings.append(reading)
            if len(self.made) == self.late:
                watch._deadline = -math.inf
            if self.fail:
                self.fail(len(self.made), part)
            if watch and watch(reading) and part < READINGS:
                status = "stopped"
                break
        chosen = "bf16" if recipe.precision == "auto" else recipe.precision
        return Outcome(status, tuple(readings), (), readings[-1].epoch, recipe.epochs, chosen)


def any_settings(space, known, metric, seed):
    """In place of the sampler, which takes half a second."""
    return evenly(space, 1, seed)[0]


def run(photos, out, *overrides, runs=None, job=JOB, say=None, sampler=any_settings, **options):
    """Search on the photos, with computed runs; return what was found and the runs."""
    runs = runs or FakeRuns()
    here = [*BASE, f"data.path={photos}", "data.holdout=13", *overrides]
    with (
        mock.patch.object(module, "measure", runs),
        mock.patch.object(choose, "_suggested", sampler),
    ):
        found = search("digits", here, job, Path(out), Options(**options), say or (lambda _: None))
    return found, runs


def killed(number, part):
    """Kill this process in the middle of its second run."""
    if number == 2 and part == READINGS // 2:
        os.kill(os.getpid(), signal.SIGKILL)


def worker(photos, out, pause, options, kill=False):
    """One worker in a process of its own; return the settings of the trials that it made."""
    runs = FakeRuns(pause=pause, fail=killed if kill else None)
    run(photos, out, runs=runs, **options)
    return [(r.epochs, r.optimizer.lr, str(r.schedule.warmup)) for r in runs.made]
