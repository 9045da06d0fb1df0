"""Class folders as people have them: divided or not, from scratch and from given weights."""

import re
import shlex
from pathlib import Path

import pytest
import timm

from largebatch.recipes.schema.load import load
from largebatch.recipes.training.trainer import Trainer
from tests.conftest import write_images
from tests.recipes.commands.test_app import run
from tests.recipes.runs import JOB, assert_same, refused

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "own-images.md"
SMALL = ["model.name=test_resnet", "data.image_size=32", "data.eval_resize=32", "device=cpu"]
SMALL += ["batch_size=8", "epochs=2", "precision=fp32", "checkpoint.every=null"]


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """52 images in two class folders, not divided."""
    root = tmp_path_factory.mktemp("own") / "photos"
    write_images(root, {"ant": 24, "bee": 28})
    return root


def trainer(recipe, root, run_dir, *overrides):
    keys = [*SMALL, f"data.path={root}", f"run_dir={run_dir}", *overrides]
    return Trainer.of(load(recipe, keys), JOB, quiet=True)


@pytest.mark.slow("runs five commands")
def test_the_guides_five_commands_lead_from_class_folders_to_an_export(
    classes, tmp_path, monkeypatch
):
    """As printed, but with a small model, few epochs and the smallest budget for tuning."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(classes)
    block = re.search(r"```sh\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert len(block.splitlines()) == 5
    for line in block.splitlines():
        program, *words = shlex.split(line)
        assert program == "largebatch"
        tunes = words[:2] == ["tune", "lr"]
        for minutes in (0.5, 2, 8) if tunes else ("",):  # a budget in which a trial fits, now
            further = ["--minutes", minutes, *SMALL] if tunes else []
            result = run(*words, *further)
            if result.exit_code == 0:
                break
        assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception}"
    model = timm.create_model("local-dir:exported", pretrained=True)
    assert model.num_classes == 2
    assert (tmp_path / "exported" / "classes.txt").read_text().split() == ["ant", "bee"]


@pytest.mark.parametrize("below", ["", "train"])
def test_a_folder_without_images_to_evaluate_is_told_what_to_do(classes, tmp_path, below):
    (tmp_path / below).mkdir(exist_ok=True)
    for folder in classes.iterdir():
        (tmp_path / below / folder.name).symlink_to(folder)
    assert refused(trainer, "folder", tmp_path, tmp_path / "run") == (
        f"data.path: {tmp_path} has no val/ to evaluate on; valid: data.path=NEW after `largebatch "
        f"data prepare folder {tmp_path} --split 0.1 --out NEW`, or data.holdout=5, a tenth of its "
        "images"
    )
    own = trainer("folder", tmp_path, tmp_path / "run", "evaluate_every=null")
    assert len(own.loader.source) == 52


@pytest.mark.slow("trains a small network")
def test_the_head_takes_the_schedules_rate_and_the_body_its_share(classes, tmp_path):
    keys = ["init.from=null", "data.holdout=9", "stop_after=3", "optimizer.name=muon"]
    keys.append("optimizer.args={others: {rule: sgd, lr_scale: 0.5}}")  # which differ already
    own = trainer("folder-finetune", classes, tmp_path / "run", *keys)
    own.run()
    names = {p: name for name, p in own.model.named_parameters()}
    for group in own.optimizer.param_groups:
        share = 1.0 if group.get("orthogonal", True) else 0.5
        heads = {names[p].startswith("fc.") for p in group["params"]}
        assert len(heads) == 1
        share *= 1.0 if heads == {True} else 0.1
        assert group["lr"] == pytest.approx(share * own._built.schedule(3))
    assert own._built.schedule(3) > 0


@pytest.mark.slow("trains a small network")
def test_published_weights_bring_their_mean_and_standard_deviation(hub, classes, tmp_path):
    keys = ["init.from=timm:test_resnet", "data.holdout=9"]
    loaded = load("folder-finetune", [f"data.path={classes}", *SMALL, *keys])
    assert loaded.recipe.data.mean == loaded.recipe.data.std == (0.5, 0.5, 0.5)
    assert "data.mean and data.std of timm:test_resnet" in loaded.notices
    own = load("folder-finetune", [f"data.path={classes}", *keys, "data.std=[1,1,1]"])
    assert (own.recipe.data.mean, own.recipe.data.std) == ((0.5, 0.5, 0.5), (1, 1, 1))
    fine = trainer("folder-finetune", classes, tmp_path / "run", *keys)
    published = timm.create_model("test_resnet", pretrained=True).state_dict()
    body = {name: value for name, value in published.items() if not name.startswith("fc.")}
    state = fine.model.state_dict()
    assert_same({name: state[name] for name in body}, body)
    fine.run()
    stored = load(str(tmp_path / "run" / "recipe.yaml"))
    assert (stored.recipe.data.mean, stored.notices) == ((0.5, 0.5, 0.5), ())
    message = refused(load, "folder-finetune", ["init.from=timm:resnet51"])
    assert message.startswith("init.from: timm ")
    assert " has no weights 'resnet51'; did y" in message
