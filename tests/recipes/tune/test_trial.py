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
from tests.conftest import write_images
from tests.ranks import run_ranks
from tests.recipes.runs import BASE, JOB


def here(root, *overrides):
    return [*BASE, f"data.path={root}", "data.holdout=13", "evaluate_every=1", *overrides]


class Stops(Callback):
    """Asks to stop after a step, and may have a signal come then as well."""

    def __init__(self, at, number=None):
        self.at, self.number = at, number

    def on_start(self, run):
        self.run = run

    def on_step_end(self, step):
        if step == self.at:
            self.run.stop("enough")
            if self.number:
                signal.raise_signal(self.number)

    def on_end(self, status, summary):
        self.ended = status, summary


def stop(root, folder, callback, *overrides):
    """Train with a callback; return the trainer and its summary."""
    loaded = load("digits", [*here(root, *overrides), f"run_dir={folder}", "log_every=1"])
    trainer = Trainer.of(loaded, JOB, quiet=True, callbacks=[callback])
    return trainer, trainer.run()


@pytest.mark.parametrize("at", [3, 5])
def test_a_callback_stops_a_run_which_then_keeps_nothing_unless_it_ended(photos, tmp_path, at):
    trainer, summary = stop(photos, tmp_path, callback := Stops(at), "checkpoint.every=1dur")
    assert trainer.step == at <= trainer.last_step == 5
    assert read_metrics(tmp_path)[-1]["step"] == at
    assert summary.get("step") == (5 if at == 5 else None)
    assert callback.ended[0] == ("finished" if at == 5 else "stopped")
    results = {"checkpoints", "weights.pt", "summary.json", "report.html"}
    kept = results & {path.name for path in tmp_path.iterdir()}
    assert kept >= {"weights.pt", "summary.json"} if at == 5 else not kept


def test_a_signal_comes_before_a_request_to_stop(photos, tmp_path):
    """The run then ends by the signal, with a checkpoint, as without the request."""
    with pytest.raises(SystemExit):
        stop(photos, tmp_path, Stops(2, signal.SIGTERM), "evaluate_every=null")
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def on_two_ranks(root, folder):
    job = Job(dist.get_rank(), 2, 2, torch.device("cpu"))
    watch = lambda reading: "enough" if reading.step == 2 else None  # noqa: E731
    return measure("digits", here(root, "micro_batch_size=2"), job, folder, watch)


@pytest.mark.slow("trains on 2 ranks")
def test_ranks_stop_together(photos, tmp_path):
    """Only rank 0 has the callback's hooks; the others learn of its request two steps later."""
    ours, theirs = run_ranks(2, on_two_ranks, photos, tmp_path)
    assert ours == theirs
    assert ours.status == "stopped"
    assert [r.step for r in ours.readings] == [1, 2, 3, 4]


@pytest.mark.slow("trains")
def test_a_run_is_measured_on_held_out_images_and_passes_a_late_signal_on(photos, tmp_path):
    folder = tmp_path / "a: b #1"
    late = lambda reading: signal.raise_signal(signal.SIGINT) if reading.step == 5 else None  # noqa: E731
    found = measure("digits", here(photos), JOB, folder, late)
    assert (found.status, found.signal) == ("finished", signal.SIGINT)
    assert [r.step for r in found.readings] == [1, 2, 3, 4, 5]
    assert found.epochs == pytest.approx(2, abs=0.01)
    assert found.readings[-1].epoch == found.epochs
    assert 0 < found.step_seconds < found.seconds
    assert 0 < found.evaluation_seconds < found.seconds
    # One image of 13 is 7.7 points: the validation set has 23 images.
    assert {round(r.top1 * 13 / 100, 6) % 1 for r in found.readings} == {0.0}
    assert not (folder / "weights.pt").exists()


def test_a_tenth_of_the_images_is_held_out_unless_the_recipe_says_how_many(photos, tmp_path):
    write_images(tmp_path / "train", {"ant": 2, "bee": 2})
    plain = ["data.holdout=null"]
    assert held_out(load("digits", [*here(photos), *plain]).recipe) == 5
    assert held_out(load("digits", here(photos)).recipe) == 13
    with pytest.raises(RecipeError, match=r"data.holdout: 10% of 4 training images is less"):
        held_out(load("digits", [*here(tmp_path), *plain]).recipe)
    with pytest.raises(RecipeError, match=r"data.source: synthetic"):
        held_out(load("digits", [*here(photos), *plain, "data.source=synthetic"]).recipe)
