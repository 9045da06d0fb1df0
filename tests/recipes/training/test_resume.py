"""Stopping and resuming: at any step, on any number of ranks, bit for bit."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from largebatch.recipes.schema.load import load
from largebatch.recipes.training import trainer as trainer_module
from largebatch.recipes.training.folder.checkpoint import latest
from largebatch.recipes.training.folder.resume import _check_same_run
from largebatch.recipes.training.folder.saving import write_state
from tests.ranks import run_ranks
from tests.recipes.runs import (
    BASE,
    assert_same,
    checkpoints,
    make,
    refused,
    timeless,
    train,
    weights,
)
from tests.recipes.training.test_init_from_images import AIRBENCH

pytestmark = pytest.mark.slow("trains, stops and resumes small networks, some on ranks")


#: What a checkpoint has to give back, and the keys of a run that has it. Convolutions in half
#: precision are slow on a CPU; FP32 shows accumulation, and dropout the random numbers.
KEPT = {
    "momentum": ["micro_batch_size=4", "model.args.drop_rate=0.5"],
    "scale-and-rate": ["precision=fp16", "optimizer.dialect=mlperf-corrected"],
    "masters-and-group-rates": [
        *("precision=bf16-master", "optimizer.name=sgd", "optimizer.bias_lr_scale=0.25")
    ],
    "average-and-mixing": [
        *("ema.decay=0.6", "precision=bf16-master", "stages=[{from: 1ep, image_size: 24}]"),
        *("mixing.mixup=0.2", "mixing.cutmix=1", "mixing.group=4"),
        *("loss.name=binary-cross-entropy", "loss.threshold=0.2", "loss.sum_classes=true"),
    ],
    "fixed-layer": [*AIRBENCH, "optimizer.weight_decay=0.1"],
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_resumed_run_equals_an_uninterrupted_one(photos, tmp_path, kept):
    options = ("optimizer.lr=0.1", "micro_batch_size=16", "checkpoint.every=2", *KEPT[kept])
    whole = train(photos, tmp_path / "whole", *options, "checkpoint.keep=99")
    # In the first epoch, and in the second after an evaluation.
    for step in (2, 4) if kept == "momentum" else (2,):
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        resumed = tmp_path / f"resumed-{step}"
        assert_same(train(photos, resumed, *options, f"resume={checkpoint}"), whole)
        for path in resumed.glob("weights*.pt"):
            assert_same(torch.load(path), torch.load(tmp_path / "whole" / path.name))
        after = [line for line in timeless(tmp_path / "whole") if line["step"] > step]
        assert timeless(resumed) == after


def resume_on_ranks(root, folder):
    """Each rank gets its batch norm statistics back, and sums over ranks keep their order.

    An evaluation that happens only because a run stops does not make it differ. The ranks share
    the work and the state of Muon.
    """
    for name, precision in (("lars", "fp32"), ("muon", "bf16-master")):
        options = ("batch_size=12", "comm.algorithm=ring", "evaluate_every=1ep", "stop_after=6")
        options += (f"optimizer.name={name}", f"precision={precision}")
        trainer = make(root, folder / f"whole-{name}", *options)
        trainer.run()
        train(root, folder / name, *options, "stop_after=3")
        assert_same(train(root, folder / name, *options, "resume=true"), weights(trainer))
    assert trainer.optimizer.process_group is not None
    assert dist.get_world_size(trainer.optimizer.process_group) == 3


def test_a_resumed_run_on_ranks_equals_an_uninterrupted_one(photos, tmp_path):
    run_ranks(3, resume_on_ranks, photos, tmp_path)


def test_a_run_that_reached_its_target_resumes_only_for_a_higher_one(photos, tmp_path):
    def resume(*keys, folder="run"):
        return make(photos, tmp_path / folder, "epochs=9", "evaluate_every=1", *keys)

    resume("target_accuracy=1").run()
    again = resume("target_accuracy=1", "resume=true")
    assert again.run()["step"] == 1
    key = f"resume={tmp_path}/run/checkpoints/step-00000001"
    message = refused(resume, "target_accuracy=1", key, folder="new")
    assert "is at step 1, and it reached target_accuracy" in message
    assert resume("target_accuracy=100", "resume=true", "stop_after=2").run()["step"] == 2


ADAPT, BF16 = "optimizer.adapt_bias_and_norm", "precision=bf16-master"
OF_BIASES, OF_BODY = "optimizer.bias_lr_scale", "optimizer.body_lr_scale"
JOINED = ["optimizer.decay_bias_and_norm=true", f"{ADAPT}=true"]
MUON = ["optimizer.name=muon"]


@pytest.mark.parametrize(
    ("before", "override", "message"),
    [
        ([], "model.args.drop_rate=0.5", "model.args={}, not {'drop_rate': 0.5}; valid on resume"),
        ([], "optimizer.dialect=torch", "optimizer.dialect=mlperf, not torch; valid on"),
        ([], f"{ADAPT}=true", f"{ADAPT}=False, not True; valid on"),
        ([], "optimizer.momentum=0", "optimizer.momentum=0.9, not 0.0; valid on resume: momentum"),
        ([], f"{OF_BIASES}=0.5", None),  # they have a group of their own
        ([], f"{OF_BODY}=0.5", f"{OF_BODY}=1.0, not 0.5; valid on resume: 1 in both"),
        ([BF16], "precision=fp16-master", f"{BF16}, not fp16-master; valid on"),
        (JOINED, f"{OF_BIASES}=0.5", f"{OF_BIASES}=1.0, not 0.5; valid on resume: 1 in"),
        ([*JOINED, f"{OF_BIASES}=0.2"], f"{OF_BIASES}=0.5", None),
        ([*MUON, "optimizer.args.share=false"], "optimizer.args.share=true", None),
        (MUON, "optimizer.args.ns_steps=3", "optimizer.args={}, not {'ns_steps': 3}; valid on"),
    ],
)
def test_what_would_give_the_tensors_another_meaning_is_refused(before, override, message):
    saved = load("digits", [*BASE, *before]).recipe.model_dump(mode="json", by_alias=True)
    now = load("digits", [*BASE, *before, override]).recipe
    if message is None:
        _check_same_run(saved, now)
    else:
        start = "resume.from: the checkpoint was written with "
        assert f"{start}{message}" in refused(_check_same_run, saved, now)


def test_options_may_change_on_resume_and_the_change_is_reported(photos, tmp_path, capsys):
    train(photos, tmp_path, "stop_after=2", "optimizer.bias_lr_scale=0.25")
    message = refused(make, photos, tmp_path, "resume=true", "seed=1")
    assert "the input was saved with seed 0, now it is 1" in message
    path = latest(tmp_path / "checkpoints")
    state = json.loads((path / "state.json").read_text())
    del state["recipe"]["data"]["verify"], state["sha256"]  # as an earlier version wrote it
    write_state(path, state)
    capsys.readouterr()
    changes = ("momentum=0.5", "lr=0.2", "bias_lr_scale=0.5")
    options = ("precision=fp16", "epochs=3", *(f"optimizer.{change}" for change in changes))
    resumed = make(photos, tmp_path, "resume=true", *options)
    output = capsys.readouterr().out
    assert "optimizer.momentum is now 0.5, was 0.9" in output
    assert 'precision is now "fp16", was "fp32"' in output
    assert "verify" not in output
    groups, rate = resumed.optimizer.param_groups, resumed._built.schedule(2)
    assert {group["momentum"] for group in groups} == {0.5}
    assert [group["lr"] for group in groups] == pytest.approx([rate, 0.5 * rate], rel=1e-15)
    assert 0 < rate < 0.2
    assert resumed.run()["step"] == round(3 * 53 / 16)


def test_a_checkpoint_is_complete_or_absent(photos, tmp_path, monkeypatch):
    trainer = make(photos, tmp_path, "checkpoint.every=2")
    monkeypatch.setattr(Path, "rename", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    monkeypatch.undo()
    assert {path.parent.name for path in tmp_path.rglob("*.pt")} == {".step-00000002.partial"}
    # resume=true finds no complete checkpoint and starts at step 0, despite the partial one
    again = make(photos, tmp_path, "checkpoint.every=2", "resume=true")
    assert again.step == 0
    again.run()
    assert checkpoints(tmp_path) == [6, 7]  # the newest two


def test_a_run_goes_back_in_its_own_folder(photos, tmp_path, capsys):
    """As its user asks, or past a damaged checkpoint with a warning."""
    keys = ("optimizer.lr=0.1", "micro_batch_size=16", "checkpoint.every=2", "checkpoint.keep=9")
    folder, other = tmp_path / "run", tmp_path / "step-00000002"
    newest, second = (folder / "checkpoints" / f"step-0000000{step}" for step in (7, 2))

    def resumed(key, *more):
        return make(photos, folder, *keys, f"resume={key}", *more)

    def check(run):
        run.run()
        assert_same(weights(run), whole)
        assert timeless(folder) == lines
        assert checkpoints(folder) == [2, 4, 6, 7]

    whole = train(photos, folder, *keys)
    lines = timeless(folder)
    check(resumed("true"))  # nothing is left to train
    new = refused(make, photos, tmp_path / "new", *keys, f"resume={newest}")
    assert f"resume.from: nothing is left to train: {newest} is at step 7, and the run e" in new
    assert not (tmp_path / "new").exists()
    shutil.copytree(second, other)
    assert "already holds a run; valid: resume=true to continue" in refused(resumed, other)
    back = resumed(second)
    assert (back.step, checkpoints(folder)) == (2, [2, 4, 6, 7])  # until the first step
    check(back)
    data = bytearray((newest / "model.pt").read_bytes())
    data[len(data) // 2] ^= 4
    (newest / "model.pt").write_bytes(data)
    capsys.readouterr()
    past = resumed("true")
    assert past.step == 6
    problem = "is damaged: the SHA-256 of model.pt is not that of when it was written: "
    warning = f"{newest} {problem}resuming from step-00000006 instead"
    assert warning in capsys.readouterr().err
    check(past)
    resumed("true", "epochs=3")  # it is whole again


def test_the_checkpoint_of_the_best_evaluation_is_kept(photos, tmp_path, monkeypatch):
    found = iter([30.0, 80.0, 80.0, 40.0, 50.0, 60.0, 70.0])

    def evaluated(*_):
        return {"loss": 1.0, "top1": next(found), "top5": 90.0}

    monkeypatch.setattr(trainer_module, "evaluate", evaluated)
    keys = ["optimizer.lr=0.1", "micro_batch_size=16", "evaluate_every=1", "checkpoint.every=3"]
    keys += ["checkpoint.keep=1", "checkpoint.keep_best=true"]
    train(photos, tmp_path / "run", *keys, "stop_after=4")
    assert checkpoints(tmp_path / "run") == [2, 4]
    # A resumed run knows what was best.
    train(photos, tmp_path / "run", *keys, "resume=true")
    assert checkpoints(tmp_path / "run") == [2, 7]
    best = json.loads((tmp_path / "run/checkpoints/step-00000007/state.json").read_text())["best"]
    assert best == {"top1": 80.0, "step": 2}
