"""Searches whose runs are computed in place of trained, in milliseconds."""

import math
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from largebatch.recipes.schema.load import load
from largebatch.recipes.tune.learning_rate import search as module
from largebatch.recipes.tune.learning_rate.search import Search
from largebatch.recipes.tune.trial import Outcome, Reading
from tests.recipes.runs import BASE, JOB

EVALUATIONS = 4


class FakeRuns:
    """Runs whose accuracy has its peak at a rate and a warm-up, and that diverge at ten times it.

    A start takes ``start`` seconds of a clock of their own, and an epoch one. ``fail`` is called
    with the numbers of the run and of the evaluation that comes.
    """

    def __init__(self, best_lr=4.0, best_warmup=0.2, start=0.0, fail=None, loss=None, slow=1.0):
        self.best_lr, self.best_warmup, self.start, self.fail = best_lr, best_warmup, start, fail
        self.loss, self.slow = loss or (lambda top1: 1 - top1 / 100), slow
        self.made, self.now = [], 100.0

    def top1(self, recipe):
        off = math.log10(recipe.optimizer.lr / self.best_lr)
        warmup = abs(recipe.schedule.warmup.value - self.best_warmup)
        length = 2 / (1 + recipe.epochs)
        return max(5, 95 - 25 * abs(off) - 40 * warmup - length)

    def __call__(self, name, overrides, job, run_dir, watch=None):
        recipe = load(name, overrides).recipe
        timed = Path(run_dir).name == "timed"
        if not timed:
            self.made.append(recipe)
        if job.is_main:
            (Path(run_dir) / "checkpoints").mkdir(parents=True)
        began, readings, status = self.now, [], "finished"
        self.now += self.start
        if recipe.optimizer.lr > 10 * self.best_lr:
            return Outcome("diverged", (), 0.1 * recipe.epochs, self.start)
        for part in range(1, EVALUATIONS + 1):
            self.now += self.slow * recipe.epochs / EVALUATIONS
            top1 = self.top1(recipe) * (0.5 + part / EVALUATIONS / 2)
            epoch = recipe.epochs * part / EVALUATIONS
            readings.append(Reading(part, epoch, self.loss(top1), top1))
            if self.fail and not timed:
                self.fail(len(self.made), part)
            if watch and watch(readings[-1]) and part < EVALUATIONS:
                status = "stopped"
                break
        step = recipe.epochs / EVALUATIONS  # of the run that is timed: one of its "steps"
        seconds = self.now - began
        outcome = Outcome(status, tuple(readings), readings[-1].epoch, seconds, step)
        return job.gather(outcome)[0]  # rank 0 alone has the watch


def run(photos, out, *overrides, fakes=None, recipe="digits", say=None, job=JOB, **options):
    """Search on the photos, with computed runs; return what was found and the runs."""
    fakes = fakes or FakeRuns()
    here = [*BASE, "epochs=40", f"data.path={photos}", "data.holdout=13", *overrides]
    if "minutes" not in options:
        options.setdefault("runs", 8.0)
    clock = SimpleNamespace(monotonic=lambda: fakes.now)
    with mock.patch.object(module, "measure", fakes), mock.patch.object(module, "time", clock):
        options["say"] = say or (lambda _: None)
        found = Search(recipe, here, job, Path(out), **options).run()
    return found, fakes
