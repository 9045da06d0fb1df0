"""Stopping and resuming: at any step, on any number of ranks, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import load
from largebatch.recipes.training import trainer as trainer_module
from largebatch.recipes.training.folder.checkpoint import latest
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.folder.resume import _check_same_run
from largebatch.recipes.training.folder.saving import write_state
from tests.ranks import run_ranks
from tests.recipes.runs import (
    BASE,
    ROUNDING,
    assert_same,
    double_precision,
    largest_difference,
    make,
    train,
    weights,
)
from tests.recipes.training.test_init_from_images import AIRBENCH

pytestmark = pytest.mark.slow("trains, stops and resumes small networks, some on ranks")


#: What a checkpoint has to give back, and the keys of a run that has it. Convolutions in half
#: precision are slow on a CPU; FP32 shows accumulation, and dropout the random numbers.
KEPT = {
    "momentum": ["micro_batch_size=4", "model.args.drop_rate=0.5"],
    "group-rates": ["precision=bf16", "optimizer.name=sgd", "optimizer.bias_lr_scale=0.25"],
    "scale-and-rate": ["precision=fp16", "optimizer.dialect=mlperf-corrected"],
    "masters": ["precision=bf16-master", "optimizer.name=sgd", "model.args.drop_rate=0.5"],
    "muon": ["precision=bf16-master", "optimizer.name=muon"],
    "average-and-mixing": [
        *("ema.decay=0.6", "precision=bf16-master", "stages=[{from: 1ep, image_size: 24}]"),
        *("mixing.mixup=0.2", "mixing.cutmix=1", "mixing.group=4"),
        *("loss.name=binary-cross-entropy", "loss.threshold=0.2", "loss.sum_classes=true"),
    ],
    "fixed-layer": [*AIRBENCH, "optimizer.weight_decay=0.1"],
}


@pytest.mark.parametrize("keys", KEPT.values(), ids=KEPT)
def test_a_resumed_run_equals_an_uninterrupted_one(photos, tmp_path, keys):
    options = ("optimizer.lr=0.1", "micro_batch_size=16", "checkpoint.every=2", *keys)
    whole = train(photos, tmp_path / "whole", *options, "checkpoint.keep=99")
    for step in (2, 4):  # in the first epoch, and in the second after an evaluation
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        resumed = tmp_path / f"resumed-{step}"
        assert_same(train(photos, resumed, *options, f"resume={checkpoint}"), whole)
        for path in resumed.glob("weights*.pt"):
            assert_same(torch.load(path), torch.load(tmp_path / "whole" / path.name))
    expected = [line for line in read_metrics(tmp_path / "whole") if line["step"] > 4]
    actual = read_metrics(tmp_path / "resumed-4")
    assert [timeless(line) for line in actual] == [timeless(line) for line in expected]


def test_biases_keep_their_factor_in_a_resumed_run(photos, tmp_path):
    options = ("optimizer.lr=0.1", "micro_batch_size=16", "optimizer.bias_lr_scale=0.25")
    train(photos, tmp_path / "part", *options, "stop_after=3")
    resumed = make(photos, tmp_path / "part", *options, "resume=true")

    def check_rates(step, factor):
        rate = resumed._built.schedule(step)
        rates = [group["lr"] for group in resumed.optimizer.param_groups]
        assert rates == pytest.approx([rate, factor * rate], rel=1e-15)
        assert rate > 0

    check_rates(3, 0.25)
    # The recipe's rates count, as for every option that may change on resume.
    changes = ("optimizer.bias_lr_scale=0.5", "optimizer.lr=0.2", "epochs=3", "resume=true")
    resumed = make(photos, tmp_path / "part", *options, *changes)
    check_rates(3, 0.5)


def timeless(line):
    return {k: v for k, v in line.items() if "second" not in k and k != "memory_bytes"}


def resume_on_ranks(root, folder, *comm):
    batch = 4 * dist.get_world_size()
    options = ("checkpoint.every=3", "checkpoint.keep=99", f"batch_size={batch}", *comm)
    whole = train(root, folder / "whole", *options)
    checkpoint = folder / "whole" / "checkpoints" / "step-00000003"
    assert_same(train(root, folder / "resumed", *options, f"resume={checkpoint}"), whole)
    # An evaluation that happens only because a run stops must not make it differ.
    train(root, folder / "part", *options, "stop_after=2")
    assert_same(train(root, folder / "part", *options, "resume=true"), whole)


@pytest.mark.parametrize(
    ("world_size", "comm"), [(2, ["comm.ranks_per_node=1"]), (3, ["comm.algorithm=ring"])]
)
def test_a_resumed_run_on_ranks_equals_an_uninterrupted_one(photos, tmp_path, world_size, comm):
    """Each rank gets its batch norm statistics back, and sums over ranks keep their order."""
    run_ranks(world_size, resume_on_ranks, photos, tmp_path, *comm)


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    """The folder of a run that has finished, with only its last checkpoint."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(photos, folder)
    return folder


def test_with_nothing_left_to_train_nothing_is_written(photos, finished, tmp_path):
    checkpoint = next((finished / "checkpoints").iterdir())
    with pytest.raises(RecipeError, match=r"nothing is left to train: .* is at step 7, .* 7"):
        make(photos, tmp_path / "new", f"resume={checkpoint}")
    assert not (tmp_path / "new").exists()
    assert make(photos, finished, "resume=true").run()["step"] == 7


def test_a_run_that_reached_its_target_resumes_only_for_a_higher_one(photos, tmp_path):
    def resume(*keys):
        return make(photos, tmp_path / "run", "epochs=9", "evaluate_every=1", *keys)

    resume("target_accuracy=1").run()
    again = resume("target_accuracy=1", "resume=true")
    assert again.run()["step"] == 1
    checkpoint = next((tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(RecipeError, match=r"is at step 1, and it reached target_accuracy"):
        make(photos, tmp_path / "new", "epochs=9", "target_accuracy=1", f"resume={checkpoint}")
    assert resume("target_accuracy=100", "resume=true", "stop_after=2").run()["step"] == 2


def resume_expecting_refusal(root, run_dir):
    with double_precision():
        with pytest.raises(RecipeError, match=r"world_size 1, now it is 2; resume.reshard=true"):
            make(root, run_dir, "resume=true")
        return train(root, run_dir, "resume=true", "resume.reshard=true")


def test_another_number_of_ranks_is_refused_or_resharded(photos, exact, tmp_path):
    _, whole = exact
    parameters = [k for k in whole if "running" not in k and "tracked" not in k]
    with double_precision():
        train(photos, tmp_path / "part", "stop_after=3")
    for trained in run_ranks(2, resume_expecting_refusal, photos, tmp_path / "part"):
        ours, theirs = ({k: w[k] for k in parameters} for w in (trained, whole))
        assert largest_difference(ours, theirs) < ROUNDING


JOINED = ["optimizer.decay_bias_and_norm=true", "optimizer.adapt_bias_and_norm=true"]
MUON = ["optimizer.name=muon"]


@pytest.mark.parametrize(
    ("before", "override", "message"),
    [
        ([], "model.args.drop_rate=0.5", "model.args={}, not {'drop_rate': 0.5}; valid on resume"),
        ([], "optimizer.dialect=torch", "optimizer.dialect=mlperf, not torch; valid on"),
        ([], "optimizer.adapt_bias_and_norm=true", "adapt_bias_and_norm=False, not True; valid on"),
        ([], "optimizer.momentum=0", "optimizer.momentum=0.9, not 0.0; valid on resume: momentum"),
        ([], "precision=fp16-master", "precision=fp32, not fp16-master; valid on resume: precisio"),
        ([], "optimizer.bias_lr_scale=0.5", None),  # they have a group of their own
        ([], "optimizer.body_lr_scale=0.5", "body_lr_scale=1.0, not 0.5; valid on resume: 1 in bo"),
        (["precision=bf16-master"], "precision=fp16-master", "=bf16-master, not fp16-master; val"),
        (
            JOINED,
            "optimizer.bias_lr_scale=0.5",
            "bias_lr_scale=1.0, not 0.5; valid on resume: 1 in",
        ),
        ([*JOINED, "optimizer.bias_lr_scale=0.2"], "optimizer.bias_lr_scale=0.5", None),
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
        with pytest.raises(RecipeError) as error:
            _check_same_run(saved, now)
        assert str(error.value).startswith("resume.from: the checkpoint was written with ")
        assert message in str(error.value)


def test_options_may_change_on_resume_and_the_change_is_reported(photos, tmp_path, capsys):
    train(photos, tmp_path, "stop_after=2")
    with pytest.raises(RecipeError, match="the input was saved with seed 0, now it is 1"):
        make(photos, tmp_path, "resume=true", "seed=1")
    path = latest(tmp_path / "checkpoints")
    state = json.loads((path / "state.json").read_text())
    del state["recipe"]["data"]["verify"], state["sha256"]  # as an earlier version wrote it
    write_state(path, state)
    capsys.readouterr()
    options = ("optimizer.momentum=0.5", "precision=fp16", "epochs=3")
    resumed = make(photos, tmp_path, "resume=true", *options)
    output = capsys.readouterr().out
    assert "optimizer.momentum is now 0.5, was 0.9" in output
    assert 'precision is now "fp16", was "fp32"' in output
    assert "verify" not in output
    assert {group["momentum"] for group in resumed.optimizer.param_groups} == {0.5}
    assert resumed.run()["step"] == round(3 * 53 / 16)


def test_a_checkpoint_is_complete_or_absent(photos, tmp_path, monkeypatch):
    trainer = make(photos, tmp_path, "checkpoint.every=2")

    rename = Path.rename

    def crash(path, target):
        if path.name == ".step-00000002.partial":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    found = list((tmp_path / "checkpoints").glob("step-*"))
    assert found == []
    assert list((tmp_path / "checkpoints").glob(".step-00000002.partial/*.pt"))
    # resume=true finds no complete checkpoint and starts at step 0, despite the partial one
    again = make(photos, tmp_path, "checkpoint.every=2", "resume=true")
    assert again.step == 0
    again.run()
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == ["step-00000006", "step-00000007"]  # the newest two


EVERY_STEP = ("optimizer.lr=0.1", "micro_batch_size=16", "checkpoint.every=2", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def every_step(photos, tmp_path_factory):
    """A finished run with many checkpoints, and its weights."""
    folder = tmp_path_factory.mktemp("every step") / "run"
    return folder, train(photos, folder, *EVERY_STEP)


def checkpoints(run_dir):
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir())


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(
    photos, every_step, tmp_path, capsys
):
    folder, whole = every_step
    shutil.copytree(folder, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000007"
    data = bytearray((newest / "model.pt").read_bytes())
    data[len(data) // 2] ^= 4
    (newest / "model.pt").write_bytes(data)
    resumed = make(photos, tmp_path / "run", *EVERY_STEP, "resume=true")
    assert resumed.step == 6
    assert (
        f"{newest} is damaged: the SHA-256 of model.pt is not that of when it was written: "
        "resuming from step-00000006 instead"
    ) in capsys.readouterr().err
    resumed.run()
    assert_same(weights(resumed), whole)
    make(photos, tmp_path / "run", *EVERY_STEP, "resume=true", "epochs=3")  # it is whole again


def test_a_run_goes_back_to_an_earlier_checkpoint_of_its_own_folder(photos, every_step, tmp_path):
    folder, whole = every_step
    shutil.copytree(folder, tmp_path / "run")
    lines = [timeless(line) for line in read_metrics(tmp_path / "run")]
    assert checkpoints(tmp_path / "run") == [2, 4, 6, 7]
    path = tmp_path / "run" / "checkpoints" / "step-00000002"
    back = make(photos, tmp_path / "run", *EVERY_STEP, f"resume={path}")
    assert checkpoints(tmp_path / "run") == [2, 4, 6, 7]  # nothing is lost before the first step
    back.run()
    assert_same(weights(back), whole)
    assert [timeless(line) for line in read_metrics(tmp_path / "run")] == lines
    assert checkpoints(tmp_path / "run") == [2, 4, 6, 7]
    other = tmp_path / "other"
    train(photos, other, *EVERY_STEP, "stop_after=2")
    with pytest.raises(RecipeError, match=r"already holds a run; valid: resume=true to continue"):
        make(photos, other, *EVERY_STEP, f"resume={path}")


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
