"""The learning rate is scaled with the batch size."""

import pytest
import yaml
from typer.testing import CliRunner

from largebatch.recipes.commands.tree import app
from largebatch.recipes.schema.load import load

GOYAL = "resnet50-sgd-b256"


@pytest.mark.parametrize(
    # 0.1 * 3264 / 256 is 1.2750000000000001 in floating point.
    ("batch", "lr"),
    [(256, 0.1), (3264, 1.275), (8192, 3.2)],
)
def test_linear_scaling_gives_the_rates_that_goyal_et_al_published(batch, lr):
    loaded = load(GOYAL, [f"batch_size={batch}", "scale=linear"])
    assert loaded.recipe == load(GOYAL, [f"batch_size={batch}", f"optimizer.lr={lr}"]).recipe
    assert loaded.notices == (f"learning rate {lr:g} = 0.1 x {batch}/256 (linear)",)


def test_only_the_peak_is_scaled():
    loaded = load("resnet50-b8192", ["batch_size=16384", "scale=linear", "schedule.start=0.5"])
    now, before = loaded.recipe.model_dump(), load("resnet50-b8192").recipe.model_dump()
    assert now.pop("optimizer") == {**before.pop("optimizer"), "lr": 34}
    assert now["schedule"]["end"] == 1e-4
    assert now["schedule"]["start"] == 0.5
    for key in ("batch_size", "schedule"):
        del now[key], before[key]
    assert now == before


@pytest.fixture
def extending(tmp_path):
    def write(text, name="mine", extends=GOYAL):
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"extends: {extends}\n{text}")
        return str(path)

    return write


def test_a_recipe_that_extends_another_is_scaled_from_that_one(extending):
    path = extending("batch_size: 1024\nscale: linear\n")
    assert load(path).recipe.optimizer.lr == 0.4
    assert load(path).notices == ("learning rate 0.4 = 0.1 x 1024/256 (linear)",)
    # and further overrides are scaled too, unless they set another rule or rate
    larger = load(path, ["batch_size=2048"])
    assert larger.recipe.optimizer.lr == 0.8
    assert larger.notices[1:] == ("learning rate 0.8 = 0.4 x 2048/1024 (linear)",)
    assert load(path, ["batch_size=2048", "scale=null"]).recipe.optimizer.lr == 0.4
    assert load(path, ["batch_size=4096", "scale=sqrt"]).recipe.optimizer.lr == 0.8
    own = load(path, ["batch_size=2048", "optimizer.lr=0.7"])
    assert (own.recipe.optimizer.lr, own.notices) == (0.7, ())
    again = extending("batch_size: 512\n", "again", "mine.yaml")
    assert load(again).recipe.optimizer.lr == 0.2
    tuned = extending("optimizer: {lr: 0.5}\n", "tuned", "mine.yaml")
    assert load(tuned, ["batch_size=2048"]).recipe.optimizer.lr == 1


def test_commands_show_the_scaled_rate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = [GOYAL, "batch_size=8192", "scale=linear"]
    line = "learning rate 3.2 = 0.1 x 8192/256 (linear)"
    shown = CliRunner().invoke(app, ["recipes", "show", *keys]).output
    assert f"\n# {line}\n" in shown
    assert yaml.safe_load(shown)["optimizer"]["lr"] == 3.2
    # and what was written is not scaled again, but for another batch
    path = tmp_path / "whole.yaml"
    path.write_text(shown)
    assert load(str(path)).recipe == load(*keys[:1], keys[1:]).recipe
    assert load(str(path), ["batch_size=16384", "scale=linear"]).recipe.optimizer.lr == 6.4
