"""Trained weights are found with their recipe, and score what their run scored."""

import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import RECIPE
from largebatch.recipes.trained.score import check_fit, score, wilson
from largebatch.recipes.trained.source import open_trained
from tests.conftest import write_images
from tests.ranks import run_ranks
from tests.recipes.commands.test_app import run
from tests.recipes.runs import BASE, JOB, NO_BATCH_NORM, assert_same, make
from tests.recipes.trained.conftest import last_evaluation, stopped

pytestmark = pytest.mark.slow("trains small networks, some on two ranks")


# The example of Newcombe 1998, "Two-Sided Confidence Intervals for the Single Proportion", table 1.
def test_the_interval_is_wilsons():
    for right, count, *ends in ((81, 263, 25.53, 36.62), (15, 148, 6.24, 16.05), (0, 20, 0, 16.11)):
        assert wilson(100 * right / count, count) == pytest.approx(ends, abs=0.005)


def scored(path, *overrides, **options):
    return score(open_trained(path, overrides, **options), JOB)


@pytest.mark.parametrize("ema", [False, True])
def test_the_score_is_that_of_the_runs_own_last_evaluation(half, tmp_path, ema):
    last, prefix = last_evaluation(half), "ema_" if ema else ""
    expected = tuple(last[f"{prefix}{name}"] for name in ("top1", "top5", "loss"))
    file = half / ("weights_ema.pt" if ema else "weights.pt")
    before = stopped(half, tmp_path / "stopped")
    checkpoint = next((half / "checkpoints").iterdir())
    for found in (
        scored(half, ema=ema),
        scored(file),
        scored(checkpoint, ema=ema),
        scored(before, ema=ema),
    ):
        assert (found.top1, found.top5, found.loss) == expected
        assert (found.images, found.skipped_images, found.precision) == (23, 0, "fp16-master")
    assert last["ema_loss"] != last["loss"]


def score_on_ranks(*folders):
    job = Job(dist.get_rank(), 2, 2, torch.device("cpu"))
    return [score(open_trained(folder), job) for folder in folders]


def test_two_ranks_score_as_one(half, plain):
    alone = [scored(half), scored(plain)]
    for together in run_ranks(2, score_on_ranks, half, plain):
        for ours, one in zip(together, alone, strict=True):
            assert (ours.top1, ours.top5, ours.images) == (one.top1, one.top5, one.images)
            # The loss of each batch is rounded to FP32, and the ranks had other batches.
            assert ours.loss == pytest.approx(one.loss, rel=1e-6)


def test_keys_are_overridden_and_others_have_no_effect(plain, tmp_path):
    assert scored(plain, "data.eval_size=48", "data.eval_resize=52").loss != scored(plain).loss
    found = json.loads(run("evaluate", plain, "--json", "data.holdout=20").output)
    assert (found["images"], found["image_size"], found["eval_resize"]) == (20, 32, 36)
    assert found["data"].endswith("held out of train")
    write_images(tmp_path / "other" / "val", {"ant": 2, "bee": 3, "cat": 4})  # no train beside it
    other = scored(plain, f"data.path={tmp_path}/other", "micro_batch_size=null")
    assert other.images == 9
    assert scored(plain, "precision=bf16").precision == "bf16"
    whole = json.loads(run("evaluate", plain, "--json").output)
    without_effect = ["batch_size=7", "optimizer.lr=3", "data.classes=3", "micro_batch_size=3"]
    result = run("evaluate", plain, "--json", *without_effect)
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found.pop("loss") == pytest.approx(whole.pop("loss"), rel=1e-6)  # of other batches
    assert found == whole


def test_the_precision_that_auto_chose_is_taken_again(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("largebatch.recipes.training.run.auto_precision", lambda device: "bf16")
    make(photos, tmp_path / "run", "precision=auto").run()
    monkeypatch.setattr("largebatch.recipes.trained.score.auto_precision", lambda device: "fp32")
    assert scored(tmp_path / "run").precision == "bf16"
    assert scored(stopped(tmp_path / "run", tmp_path / "stopped")).precision == "bf16"
    shutil.copy(tmp_path / "run" / "weights.pt", tmp_path)  # away from the run
    bare = scored(tmp_path / "weights.pt", recipe=str(tmp_path / "run" / RECIPE))
    assert bare.precision == "bf16"


def test_a_file_of_timm_is_evaluated_with_a_recipe_unless_it_is_not_finite(photos, tmp_path):
    weights = timm.create_model("test_resnet", num_classes=3).state_dict()
    file, keys = tmp_path / "model.safetensors", [*BASE, f"data.path={photos}"]
    save_file(weights, file)
    assert scored(file, *keys, recipe="digits").images == 23
    assert_same(open_trained(file, keys, recipe="digits").weights, weights)
    name = next(iter(weights))
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, file)
    with pytest.raises(RecipeError, match=f"RUN: .* has values in {name} that are not finite"):
        scored(file, *keys, recipe="digits")


# --- the command -----------------------------------------------------------------------------


def test_the_command_prints_a_table_or_json(half):
    last = last_evaluation(half)
    result = run("evaluate", half, "--ema")
    assert result.exit_code == 0, result.stderr
    low, high = wilson(last["ema_top1"], 23)
    assert result.output.splitlines()[0].startswith(f"{half}/weights_ema.pt: moving average of ")
    assert "recipe digits, fp16-master on cpu" in result.output
    assert f"{last['ema_top1']:.2f} %  (95 % interval {low:.2f} to {high:.2f})" in result.output
    found = json.loads(run("evaluate", half, "--json", "micro_batch_size=2").output)
    assert (found["top1"], found["top5"]) == (last["top1"], last["top5"])
    assert (found["step"], found["ema"], found["recipe"]) == (last["step"], False, "digits")
    assert found["top1_interval"] == list(wilson(last["top1"], 23))


@pytest.fixture
def bad(plain, half, photos, tmp_path):
    """Paths of what cannot be evaluated."""
    torch.save({"a": torch.ones(2)}, tmp_path / "other.pt")
    shutil.copy(plain / "weights.pt", tmp_path / "bare.pt")
    write_images(tmp_path / "classes" / "val", {"ant": 2, "bee": 3})
    write_images(tmp_path / "names" / "val", {"ant": 2, "bee": 3, "dog": 1})
    write_images(tmp_path / "unusable" / "val", {"ant": 2, "bee": 3, "cat": 1})
    for image in (tmp_path / "unusable").glob("val/*/*"):
        image.write_bytes(b"no image")
    vit = timm.create_model("test_vit", num_classes=3, img_size=32)
    torch.save(vit.state_dict(), tmp_path / "vit.pt")
    stopped(plain, tmp_path / "stopped")
    return {"plain": plain, "half": half, "photos": photos, "tmp": tmp_path}


BAD = [
    (["{tmp}/bare.pt"], "--recipe: missing, as there is no recipe.yaml beside "),
    (
        ["{tmp}/other.pt", "--recipe", "digits", "data.path={photos}"],
        "{tmp}/other.pt has a, which is not part of resnet10t; valid: weights of resnet10t, or --",
    ),
    (["{plain}", "--ema"], "RUN: {plain} holds no moving average of the weights; "),
    (["{tmp}/stopped", "--ema"], "holds no moving average of the weights; valid"),
    (["{half}/weights.pt", "--ema"], "--ema: {half}/weights.pt is a file; "),
    (["{plain}", "data.path={tmp}/classes"], "has 2 classes, and the model of {plain}/weights.pt "),
    (["{plain}", "data.path={tmp}/names"], "has class 2 'dog', which is 'cat' in the model of "),
    (
        ["{plain}", "data.path={tmp}/unusable", "data.on_error=skip", "micro_batch_size=2"],
        "data.path: none of 6 images can be used; valid: images that can be decoded",
    ),
    (["{plain}", "device=cuda"], "has no CUDA GPU; valid: device=cpu"),
    (
        ["{tmp}/vit.pt", "--recipe", "digits", *BASE, *NO_BATCH_NORM, "data.path={photos}",
         "data.eval_size=36"],
        "data.eval_size: test_vit does not take images of 36 px: AssertionError: ",
    ),
    (
        ["{plain}", "data.source=synthetic", "data.classes=3"],
        "data.val_images: 0 images to evaluate; valid: at least 1",
    ),
    (
        ["timm:test_efficientnet.r160_in1k", "data.path={photos}"],
        "RUN: timm:test_efficientnet.r160_in1k cannot be read: ",
    ),
    (
        ["timm:eva_giant_patch14_336.clip_ft_in1k", "data.path={photos}"],
        "was measured with the crop mode squash, ",
    ),
    (["timm:vit_small_patch14_dinov2.lvd142m"], "has no classifier, but gives features; valid"),
    (["timm:test_resnet", "--recipe", "digits"], "--recipe: not for timm:test_resnet, which has "),
]  # fmt: skip


def test_bad_input_is_one_line_and_exit_code_2(bad, hub, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for words, message in BAD:
        result = run("evaluate", *(word.format(**bad) for word in words))
        assert result.exit_code == 2, (words, result.exception)
        assert result.stderr.count("\n") == 1, words
        assert result.stderr.startswith("largebatch: error: ")
        assert message.format(**bad) in result.stderr
        assert result.stdout == ""


def test_shards_without_names_are_numbered_as_in_training(plain):
    trained = open_trained(plain, ["data.source=webdataset"])
    fit = partial(check_fit, trained, trained.build(), trained.loaded.recipe)
    fit(SimpleNamespace(classes=("0", "1", "2")))
    with pytest.raises(RecipeError, match=r"has class 0 'bee', which is 'ant' in the model of "):
        fit(SimpleNamespace(classes=("bee", "ant", "cat")))


def test_code_that_a_runs_folder_names_is_imported_only_if_it_is_trusted(
    half, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    called = tmp_path / "called"
    (tmp_path / "foreign_code.py").write_text(f"open({str(called)!r}, 'w')\nnet = 3\n")
    foreign = stopped(half, tmp_path / "foreign")
    recipe = (foreign / RECIPE).read_text()
    named = recipe.replace("name: test_resnet", "name: foreign_code:net")
    assert named != recipe
    (foreign / RECIPE).write_text(named)
    for command in (["evaluate"], ["export", "--to", "onnx", "--out", tmp_path / "out"]):
        result = run(*command, foreign)
        assert result.exit_code == 2
        assert result.stderr.startswith("largebatch: error: --trust-code: not given, and ")
        assert not called.exists()
    assert run("evaluate", foreign, "model.name=test_resnet").exit_code == 0
    assert not called.exists()
    assert "foreign_code:net is of type int" in run("evaluate", foreign, "--trust-code").stderr
    assert called.exists()
