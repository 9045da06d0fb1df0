"""Precisions in a recipe: training, checkpoints, export, and stopping on divergence."""

import json

import pytest
import torch

from largebatch.amp import PRECISIONS
from largebatch.recipes.errors import TrainingError
from largebatch.recipes.training.folder.metrics import read_metrics
from tests.ranks import run_ranks
from tests.recipes.runs import assert_same, largest_difference, make, refused, train

pytestmark = pytest.mark.slow("trains and compiles small networks in every precision")

SHORT = ["epochs=1", "evaluate_every=null", "log_every=1"]


def test_every_precision_trains_and_exports_fp32(photos, tmp_path):
    losses = {}
    for name, form in PRECISIONS.items():
        trainer = make(photos, tmp_path / name, *SHORT, f"precision={name}")
        trainer.run()
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name)]
        assert losses[name] == pytest.approx(losses["fp32"], rel=0.05)
        held = {p.dtype for p in trainer.model.parameters()}
        assert held == {torch.float32, form.parameters}
        exported = torch.load(tmp_path / name / "weights.pt")
        assert exported.keys() == trainer.model.state_dict().keys()
        assert {v.dtype for v in exported.values()} == {torch.float32, torch.int64}
        if form.masters:
            master = trainer.optimizer.state[trainer.model.fc.weight]["master"]
            assert torch.equal(exported["fc.weight"], master)


def ranks_run(root, run_dir, *keys):
    trainer = make(root, run_dir, *keys)
    trainer.run()
    state = trainer.optimizer.state
    momenta = {n: state[p]["momentum_buffer"] for n, p in trainer.model.named_parameters()}
    return learned(trainer), momenta


def learned(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_ranks_make_the_same_updates_with_half_gradients_on_the_wire(photos, tmp_path):
    keys = ["precision=fp16-master", "comm.ranks_per_node=1"]
    alone = make(photos, tmp_path / "alone", *keys[:1])
    start = learned(alone)
    alone.run()
    (ours, momenta), others = run_ranks(2, ranks_run, photos, tmp_path / "ranks", *keys)
    assert_same(ours, others[0])
    assert_same(momenta, others[1])
    end = learned(alone)
    assert largest_difference(ours, end) < 0.1 * largest_difference(end, start)


@pytest.mark.parametrize(
    ("key", "logged"), [("128", (128, 0)), ("auto", (65536, 0)), ("none", (None, None))]
)
def test_the_loss_scale_of_the_recipe_is_used_and_logged(photos, tmp_path, key, logged):
    train(photos, tmp_path, *SHORT, "precision=O2", f"loss_scale={key}", "stop_after=1")
    first = read_metrics(tmp_path)[0]
    assert (first.get("loss_scale"), first.get("skipped_steps")) == logged


DIVERGES = ["optimizer.name=sgd", "optimizer.lr=1e30", "schedule.warmup=0", "schedule.end=1e30"]


def diverge(photos, run_dir, *keys):
    trainer = make(photos, run_dir, *keys)
    return trainer, refused(trainer.run, kind=TrainingError)


def test_a_loss_that_is_not_finite_stops_the_run_within_one_logging_interval(photos, tmp_path):
    trainer, message = diverge(photos, tmp_path, *DIVERGES, "log_every=3")
    assert trainer.step <= 2 + 3
    assert f"training diverged: the loss is nan at step {trainer.step} of 7" in message
    assert "learning rate 1e+30; there is no checkpoint yet" in message
    last = read_metrics(tmp_path)[-1]
    assert (last["step"], last["loss"]) == (trainer.step, None)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_the_last_good_checkpoint_is_named_and_can_be_resumed(photos, tmp_path):
    good = ["optimizer.name=sgd", "optimizer.lr=0.1", "log_every=1", "evaluate_every=null"]
    train(photos, tmp_path, *good, "stop_after=3")
    keys = [*good, "optimizer.lr=1e30", "checkpoint.every=1", "resume=true"]
    _, message = diverge(photos, tmp_path, *keys)
    path = tmp_path / "checkpoints" / "step-00000003"
    assert f"the last good checkpoint is {path}" in message
    assert message.endswith(f"and continue from there with resume={path}")
    again = train(photos, tmp_path / "again", *good, f"resume={path}")
    assert all(v.isfinite().all() for v in again.values())


def test_weights_that_are_not_finite_are_not_saved_though_the_loss_was_finite(photos, tmp_path):
    keys = [*DIVERGES, "checkpoint.every=1", "log_every=7", "evaluate_every=null"]
    _, message = diverge(photos, tmp_path, *keys, "optimizer.lr=3e38")
    assert "weights or batch statistics are not finite at step" in message
    for path in (tmp_path / "checkpoints").iterdir():
        saved = torch.load(path / "model.pt", weights_only=True)["parameters"]
        assert all(v.isfinite().all() for v in saved.values())


@pytest.mark.parametrize("waits", [True, False])
def test_a_run_whose_gradients_always_overflow_stops_and_names_their_layers(
    photos, tmp_path, monkeypatch, waits
):
    """At once, or, where the host does not wait for the device, when the meters are read."""
    keys = ["precision=fp16-master", "loss_scale=1e12", "log_every=1", "max_skipped_steps=4"]
    if not waits:
        monkeypatch.setattr("largebatch.amp.skips.is_free_to_read", lambda tensor: False)
        keys += ["log_every=4", "max_skipped_steps=3"]
    trainer, message = diverge(photos, tmp_path, *keys)
    assert trainer.step == 3
    assert "training diverged: 4 steps in a row were skipped" in message
    assert "at loss scale 1e+12; affected, from the loss backwards: fc." in message
    assert "at step 4 of 7" in message
