"""Exported weights load where they are meant to, and score what the run scored."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

from largebatch.pipeline import ImageFolder
from largebatch.recipes.models.build import build_model
from largebatch.recipes.schema.load import RECIPE, load
from largebatch.recipes.trained.card import accuracy_of
from largebatch.recipes.trained.export import crop_share
from largebatch.recipes.trained.onnx_file import write_onnx
from largebatch.recipes.trained.score import score, wilson
from largebatch.recipes.trained.source import open_trained
from tests.recipes.commands.test_app import run
from tests.recipes.runs import BASE, JOB, assert_same, make, refused
from tests.recipes.trained.conftest import last_evaluation, stopped

pytestmark = pytest.mark.slow("trains small networks and exports them")

RESULTS = ("weights.pt", "summary.json", "classes.txt")
#: Names of a model of ours and of a user's, with their arguments.
OWN = {"resnet9": "model.args.width=4", f"{__name__}:Tied.make": "model.args={}"}


def exported(folder, target, out, *options):
    result = run("export", folder, "--to", target, "--out", out, *options)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.output


def right_in_plain_timm(model, photos):
    """Number of validation images that a model gets right, with timm's own transform."""
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    classes = ImageFolder(photos, "train").classes
    right = 0
    for number, name in enumerate(classes):
        for path in sorted((photos / "val" / name).iterdir()):
            image = transform(Image.open(path).convert("RGB"))
            assert image.shape == (3, 32, 32)
            with torch.no_grad():
                right += model(image[None]).argmax().item() == number
    return right


def test_an_export_for_timm_scores_the_same_in_plain_timm(half, photos, tmp_path):
    out = tmp_path / "out"
    output = exported(half, "timm", out)
    assert "timm.create_model gives the same outputs for 2 random images" in output
    top1, file = last_evaluation(half)["top1"], out / "model.safetensors"
    by_file = timm.create_model("test_resnet", num_classes=3, checkpoint_path=str(file))
    by_folder = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    for model in (by_file, by_folder):  # with batch norm's statistics
        assert_same(dict(model.state_dict()), torch.load(half / "weights.pt"))
    assert by_folder.drop_rate == 0.1  # of model.args
    assert 100 * right_in_plain_timm(by_folder, photos) / 23 == pytest.approx(top1, abs=1e-9)
    assert by_folder.pretrained_cfg["label_names"] == ["ant", "bee", "cat"]
    # The exported file is evaluated with the recipe beside it, here in the run's precision.
    assert score(open_trained(file), JOB).top1 == top1


def card_of(out):
    """The card's metadata and text, read as the Hub reads it."""
    card = ModelCard.load(out / "README.md")
    return card.data, card.text


def code_of(text):
    return re.search(r"```python\n(.*?)```", text, re.S)[1]


def test_the_card_tells_recipe_data_accuracy_versions_and_use(half, photos, tmp_path, monkeypatch):
    exported(half, "timm", tmp_path / "out", "--ema")
    about, text = card_of(tmp_path / "out")
    last, val = last_evaluation(half), f"{photos.name}/val"
    first, fifth, loss = (last[f"ema_{key}"] for key in ("top1", "top5", "loss"))
    low, high = wilson(first, 23)
    assert (about.library_name, about.pipeline_tag) == ("timm", "image-classification")
    measured = [(result.metric_value, result.dataset_name) for result in about.eval_results]
    assert measured == [(round(first, 4), val), (round(fifth, 4), val)]
    flat = " ".join(text.split())
    for words in (
        f"the moving average of the weights at step {last['step']} in FP32",
        f"| {first:.2f} % | {fifth:.2f} % | {loss:.4f} |",
        f"on 23 images of {val}: the central 32 px of images whose shorter side",
        f"The 95 % interval of top-1 for that many images is {low:.2f} to {high:.2f} %",
        *("| training images | 53 |", f"timm {timm.__version__}", "precision: fp16-master"),
    ):
        assert words in flat
    assert str(photos.parent) not in text + str(about)  # paths of this machine
    written = load(str(tmp_path / "out" / RECIPE)).recipe
    assert (written.run_dir, written.data.path) == (None, str(photos))
    monkeypatch.chdir(tmp_path / "out")
    found = {}
    exec(code_of(text), found)
    assert_same(dict(found["model"].state_dict()), torch.load(half / "weights_ema.pt"))


def test_the_card_says_what_was_not_recorded(plain, tmp_path):
    about = json.loads((plain / "summary.json").read_text())
    for number, facts in enumerate(({"skipped_images": 2}, {"val_images": None})):
        run_dir, out = tmp_path / f"run{number}", tmp_path / f"out{number}"
        shutil.copytree(plain, run_dir)
        (run_dir / "summary.json").write_text(json.dumps(about | facts))
        exported(run_dir, "safetensors", out)
        flat = " ".join(card_of(out)[1].split())
        assert "that could be used (their number is not recorded): the central 32 px" in flat
        assert "95 % interval" not in flat
    (tmp_path / "bare.pt").write_bytes((plain / "weights.pt").read_bytes())
    exported(tmp_path / "bare.pt", "safetensors", tmp_path / "out", "--recipe", plain / RECIPE)
    about, text = card_of(tmp_path / "out")
    assert about.eval_results is None
    assert "Not measured by the run at these weights." in text


def test_weights_of_before_a_run_went_back_keep_their_own_recipe_and_accuracy(
    photos, tmp_path, monkeypatch
):
    folder, previous = tmp_path / "run", tmp_path / "run" / "previous"
    keys = ["checkpoint.every=2", "checkpoint.keep=9", "evaluate_every=4"]
    make(photos, folder, *keys, "optimizer.lr=0.5").run()
    first = last_evaluation(folder)
    for step, measured in ((6, False), (7, True)):
        found = accuracy_of(open_trained(folder / "checkpoints" / f"step-0000000{step}"))
        assert (found is not None) == measured
    results = {name: (folder / name).read_bytes() for name in RESULTS}
    back = f"resume={folder}/checkpoints/step-00000002"
    again = make(photos, folder, back, *keys, "optimizer.lr=0.05")
    monkeypatch.setattr(again, "_finish", lambda: 1 / 0)  # it ends before it has results
    with pytest.raises(ZeroDivisionError):
        again.run()
    second = last_evaluation(folder)
    assert (second["step"], second["loss"] != first["loss"]) == (first["step"], True)
    assert [name for name in RESULTS if (folder / name).exists()] == []
    assert {name: (previous / name).read_bytes() for name in RESULTS} == results
    assert open_trained(folder).source.name == "step-00000007"
    kept = open_trained(previous / "weights.pt")
    assert kept.loaded.recipe.optimizer.lr == 0.5
    assert accuracy_of(kept).loss == first["loss"]
    assert accuracy_of(open_trained(folder)).loss == second["loss"]
    for name, content in results.items():  # as a version that did not move them left them
        (folder / name).write_bytes(content)
    assert accuracy_of(open_trained(folder)).loss == first["loss"]


class Tied(torch.nn.Module):
    """A model two of whose layers are one."""

    def __init__(self, num_classes):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 3, 3, padding=1)
        self.second = self.first
        self.fc = torch.nn.Linear(3, num_classes)

    @staticmethod
    def make(num_classes):
        return Tied(num_classes)

    def forward(self, images):
        return self.fc(self.second(self.first(images)).mean((2, 3)))


@pytest.mark.parametrize("name", OWN)
def test_a_model_of_our_own_or_a_users_goes_to_safetensors(name, photos, tmp_path, monkeypatch):
    first, folder, out = tmp_path / "first.pt", tmp_path / "run", tmp_path / "safetensors"
    keys = [f"model.name={name}", OWN[name], "stop_after=1", "evaluate_every=null"]
    torch.save(build_model(load("digits", [*BASE, *keys]).recipe.model, 3).state_dict(), first)
    make(photos, folder, *keys, f"init.from={first}").run()
    both = folder, stopped(folder, tmp_path / "stopped")  # weights that are shared, too
    ours, theirs = (score(open_trained(one, trust_code=True), JOB).loss for one in both)
    assert ours == theirs
    result = run("export", folder, "--trust-code", "--to", "timm", "--out", tmp_path / "timm")
    assert result.exit_code == 2
    assert f"--to: {name} is not a model of timm; valid for {name}: saf" in result.stderr
    out.mkdir()
    monkeypatch.chdir(out)
    files = ["README.md", "classes.txt", "model.safetensors", "recipe.yaml"]
    assert exported(folder, "safetensors", ".", "--trust-code").splitlines()[1:] == files
    assert {*out.parent.iterdir()} == {out, *both, first}
    assert_same(load_file(out / "model.safetensors"), torch.load(folder / "weights.pt"))
    text = card_of(out)[1]
    assert "| initial weights | first.pt |" in text
    assert str(tmp_path) not in text
    assert load(str(out / RECIPE)).recipe.init.from_ is None
    found = {"classes": 3}
    exec(code_of(text), found)
    assert_same(dict(found["model"].state_dict()), torch.load(folder / "weights.pt"))


def test_a_model_goes_to_onnx_for_batches_of_any_size(half, tmp_path, monkeypatch):
    out, model = tmp_path / "onnx", open_trained(half).build()
    assert "checked: outputs in ONNX Runtime" in exported(half, "onnx", out)
    monkeypatch.chdir(out)
    code = code_of(card_of(out)[1])
    for count in (1, 2, 5):
        found = {"images": torch.rand(count, 3, 32, 32).numpy()}
        exec(code, found)
        with torch.no_grad():
            expected = model(torch.from_numpy(found["images"])).numpy()
        close = {"rtol": 1e-4, "atol": 1e-5 * np.abs(expected).max()}
        np.testing.assert_allclose(found["logits"], expected, **close)
    [images] = found["session"].get_inputs()
    assert (images.name, images.type, images.shape[1:]) == ("images", "tensor(float)", [3, 32, 32])


class Odd(torch.nn.Module):
    """A model that ONNX cannot hold: its way depends on the values of the images."""

    def forward(self, images):
        means = images.mean((2, 3))
        return means if means.sum() > 0 else -means


def test_what_onnx_cannot_hold_or_computes_wrongly_is_refused_in_one_line(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    message = refused(write_onnx, Odd(), 32, path)
    assert message.startswith("--to: onnx cannot hold the model: GuardOnDataDependentSymNode: ")
    # A difference of one in a thousand is a wrong layer.
    wrong = SimpleNamespace(run=lambda names, given: [1.01 * given["images"].mean((2, 3))])
    monkeypatch.setattr("torch.onnx.export", lambda *_, **__: None)
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda path, providers: wrong)
    message = refused(write_onnx, Odd(), 32, path)
    assert message.startswith("--to: outputs in ONNX Runtime differ by at most ")


def test_timm_resizes_to_the_length_of_the_recipe():
    for size in (24, 32, 160, 176, 224, 288, 299):
        for resize in range(size, size + 100):
            assert int(size / crop_share(size, resize)) == resize


def test_bad_input_is_one_line_and_leaves_nothing(plain, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "bare.pt").write_bytes((plain / "weights.pt").read_bytes())
    before = sorted(tmp_path.iterdir())
    out = tmp_path / "out"
    monkeypatch.setattr(
        "largebatch.recipes.trained.onnx_file.find_spec", lambda name: name != "onnxscript" or None
    )
    bare = [tmp_path / "bare.pt", "--out", out, "--to", "timm", "--recipe"]
    for words, message in (
        ([plain, "--to", "onx", "--out", out], "--to: unknown 'onx'; valid for test_resnet: "),
        ([plain, "--to", "onnx", "--out", out], "--to: onnx needs onnxscript, which is not ins"),
        ([plain, "--to", "timm", "--out", tmp_path / "full"], "is not empty; valid: a new folder"),
        ([plain, "--to", "timm", "--out", tmp_path / "bare.pt"], "is not empty; valid: a new f"),
        ([plain, "--to", "timm", "--out", tmp_path / "bare.pt" / "a"], "cannot be written: File e"),
        ([*bare, "cifar10-b256"], "--to: resnet9 is not a model of timm; valid for resnet9: "),
        ([*bare, "digits"], "[24, 3, 3, 3]); valid: weights of resnet10t, or --recipe with the "),
    ):
        result = run("export", *words)
        assert result.exit_code == 2, (words, result.exception)
        assert result.stderr.count("\n") == 1
        assert message in result.stderr
        assert result.stdout == ""
        assert sorted(tmp_path.iterdir()) == before
