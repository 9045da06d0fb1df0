"""Short runs that measure a recipe, and callbacks that stop a run."""

import signal

import pytest
import torch
import torch.distributed as dist

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.callbacks import Callback
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.trainer import Trainer
from largebatch.recipes.tune.trial import held_out, measure
from tests.ranks import run_ranks
from tests.recipes.runs import BASE, JOB


def here(root, *overrides):
    return [*BASE, f"data.path={root}", "data.holdout=13", "evaluate_every=1", *overrides]


class Stops(Callback):
    """Asks to stop at a step, in one of the hooks."""

    def __init__(self, hook, step):
        self.hook, self.step, self.statuses = hook, step, []

    def on_start(self, run):
        self.run = run

    def on_step_end(self, step):
        self._ask("step end", step)

    def on_log(self, metrics):
        self._ask(metrics.split, metrics.step)

    def on_end(self, status, summary):
        self.statuses.append((status, summary))

    def _ask(self, hook, step):
        if (hook, step) == (self.hook, self.step):
            self.run.stop("enough")


def stop(root, folder, job, hook, at, *overrides):
    callback = Stops(hook, at)
    loaded = load("digits", [*here(root, *overrides), f"run_dir={folder}"])
    trainer = Trainer.of(loaded, job, quiet=True, callbacks=[callback])
    return trainer.run(), trainer.step, trainer.last_step, callback.statuses


@pytest.mark.parametrize("hook", ["val", "step end"])
def test_a_callback_stops_a_run_which_then_keeps_nothing(photos, tmp_path, hook):
    summary, step, last, statuses = stop(
        photos, tmp_path, JOB, hook, 3, "checkpoint.every=1dur", "log_every=1"
    )
    assert (summary, step, statuses) == ({}, 3, [("stopped", {})])
    assert step < last
    kept = {path.name for path in tmp_path.iterdir()}
    assert not kept & {"checkpoints", "weights.pt", "summary.json", "report.html"}
    assert read_metrics(tmp_path)[-1]["step"] == 3


def test_a_request_at_the_last_step_changes_nothing(photos, tmp_path):
    summary, step, last, statuses = stop(photos, tmp_path, JOB, "val", 5)
    assert summary["step"] == step == last == 5
    assert [status for status, _ in statuses] == ["finished"]
    assert (tmp_path / "weights.pt").exists()


def test_a_signal_comes_before_a_request_to_stop(photos, tmp_path):
    """The run then ends by the signal, with a checkpoint, as without the request."""

    class Both(Stops):
        def on_step_end(self, step):
            if step == 2:
                signal.raise_signal(signal.SIGTERM)

    loaded = load("digits", [*here(photos), f"run_dir={tmp_path}", "evaluate_every=null"])
    trainer = Trainer.of(loaded, JOB, quiet=True, callbacks=[Both("train", 2)])
    with pytest.raises(SystemExit):
        trainer.run()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def on_two_ranks(root, folder):
    job = Job(dist.get_rank(), 2, 2, torch.device("cpu"))
    stopped = stop(root, folder / "a", job, "val", 2, "micro_batch_size=2")
    watch = lambda reading: "enough" if reading.step == 2 else None  # noqa: E731
    measured = measure("digits", here(root, "micro_batch_size=2"), job, folder / "b", watch)
    return stopped[:3], measured


@pytest.mark.slow("trains on 2 ranks")
def test_ranks_stop_together(photos, tmp_path):
    """Only rank 0 has the callback's hooks; the others learn of its request."""
    (first, measured), (second, same) = run_ranks(2, on_two_ranks, photos, tmp_path)
    assert first == second == ({}, 4, 5)  # two steps later
    assert measured == same
    assert measured.status == "stopped"
    assert [r.step for r in measured.readings] == [1, 2, 3, 4]
    assert not (tmp_path / "a" / "checkpoints").exists()


@pytest.mark.slow("trains")
def test_a_run_is_measured_on_held_out_images(photos, tmp_path):
    found = measure("digits", here(photos), JOB, tmp_path / "a")
    assert found.status == "finished"
    assert [r.step for r in found.readings] == [1, 2, 3, 4, 5]
    assert found.epochs == pytest.approx(2, abs=0.01)
    assert found.readings[-1].epoch == found.epochs
    assert 0 < found.step_seconds < found.seconds
    assert 0 < found.evaluation_seconds < found.seconds
    # One image of 13 is 7.7 points: the validation set has 23 images.
    assert {round(r.top1 * 13 / 100, 6) % 1 for r in found.readings} == {0.0}
    assert not (tmp_path / "a" / "weights.pt").exists()


def test_a_signal_that_comes_too_late_to_stop_a_run_is_passed_on(photos, tmp_path):
    folder = tmp_path / "a: b #1"
    outcome = measure(
        "digits", here(photos), JOB, folder,
        lambda reading: signal.raise_signal(signal.SIGINT) if reading.step == 5 else None,
    )  # fmt: skip
    assert (outcome.status, outcome.signal) == ("finished", signal.SIGINT)
    assert folder.is_dir()


def test_a_run_that_diverges_says_so(photos, tmp_path):
    rate = ["optimizer.name=sgd", "optimizer.lr=1e30", "schedule.warmup=0", "log_every=1"]
    outcome = measure("digits", here(photos, *rate), JOB, tmp_path)
    assert outcome.status == "diverged"
    assert 0 < outcome.epochs < 2
    assert all(r.epoch <= outcome.epochs for r in outcome.readings)


def test_a_tenth_of_the_images_is_held_out_unless_the_recipe_says_how_many(photos):
    plain = ["data.holdout=null"]
    assert held_out(load("digits", [*here(photos), *plain]).recipe) == 5
    assert held_out(load("digits", here(photos)).recipe) == 13
    with pytest.raises(RecipeError, match=r"data.holdout: 1% of 53 training images is less"):
        held_out(load("digits", [*here(photos), *plain]).recipe, 0.009)
    with pytest.raises(RecipeError, match=r"data.source: synthetic"):
        held_out(load("digits", [*here(photos), *plain, "data.source=synthetic"]).recipe)
