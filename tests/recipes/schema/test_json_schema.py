"""The JSON schema that editors use, and the table of keys, agree with what is checked."""

import re

import jsonschema
import pytest
import yaml

from largebatch.recipes.schema import keys
from largebatch.recipes.schema.load import dump, load
from largebatch.recipes.schema.names import CONFIGS, recipe_names


class Loader(yaml.SafeLoader):
    """Numbers as YAML 1.2 has them, which editors read: 1e-4 is one."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)


def problems(text):
    content = yaml.load(text, Loader)
    return [error.message for error in VALIDATOR.iter_errors(content)]


VALIDATOR = jsonschema.Draft202012Validator(keys.schema())


@pytest.mark.parametrize("name", recipe_names())
def test_a_packaged_recipe_is_valid_and_described_and_can_be_read_back(name, tmp_path):
    loaded, path = load(name), tmp_path / f"{name}.yaml"
    assert len(loaded.head.partition("\n")[0]) > 20
    path.write_text(dump(loaded.recipe))
    assert load(str(path)).recipe == loaded.recipe
    for written in (CONFIGS / f"{name}.yaml", path):
        assert problems(written.read_text(encoding="utf-8")) == []


MINIMAL = """
model: {name: resnet18}
data: {source: synthetic}
batch_size: 64
epochs: 2
optimizer: {lr: 1.0}
"""


@pytest.mark.parametrize(
    "text",
    [
        MINIMAL,
        "extends: digits\n",
        "extends: mine.yaml\noptimizer: {momentum: 0.5}\nmodel: {args: {drop_rate: 0.1}}\n",
        MINIMAL + "resume: true\n",
        MINIMAL + "resume: {from: latest, reshard: true}\n",
        MINIMAL + "precision: O2\nloss_scale: 1024\n",
        MINIMAL + "track: wandb\ncallbacks: mypkg.module:Mine\n",
        MINIMAL + "track: []\ncallbacks: [a:B, {name: a:B, args: {c: 1}}]\n",
        MINIMAL + "loss_scale: dynamic\nevaluate_every: null\nlog_every: 0.1dur\n",
        MINIMAL + "stages: [{from: 3ep, batch_size: 128, lr: keep}, {from: 500, image_size: 64}]\n",
        MINIMAL + "schedule: {name: step, milestones: [30ep, 500, 0.9dur], warmup: 0}\n",
    ],
)
def test_valid_recipes_are_accepted(text, tmp_path):
    assert problems(text) == []
    (tmp_path / "mine.yaml").write_text(MINIMAL)
    (tmp_path / "other.yaml").write_text(text)
    load(str(tmp_path / "other.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "lr: 3\n", "Additional properties are not allowed ('lr' was unexpected)"),
        (MINIMAL + "ema: {dekay: 0.9}\n", "('dekay' was unexpected)"),
        (MINIMAL + "precision: fp8\n", "'fp8' is not one of ['auto', 'fp32'"),
        (MINIMAL + "seed: true\n", "True is not of type 'integer'"),
        (MINIMAL + "label_smoothing: 1\n", "1 is greater than or equal to the maximum of 1"),
        (MINIMAL + "log_every: 0\n", "0 is not valid under any of the given schemas"),
        (MINIMAL + "log_every: 5epochs\n", "'5epochs' is not valid under any of the given"),
        ("extends: digits\ndata: {crop_area: [0.1]}\n", "[0.1] is too short"),
    ],
)
def test_mistakes_are_found(text, message):
    assert any(message in problem for problem in problems(text))


def keys_in(section, values, prefix=""):
    for name, value in section.items():
        if isinstance(value, dict) and prefix + name not in values:
            yield from keys_in(value, values, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_key_is_in_the_table_with_its_meaning():
    found = [key for key in keys.all_keys() if "[]" not in key.name and key.name != "extends"]
    names = [key.name for key in found]
    assert sorted(names) == sorted(keys_in(load("digits").recipe.model_dump(by_alias=True), names))
    required = [key.name for key in found if key.default is None]
    assert required == ["batch_size", "epochs", "model.name", "optimizer.lr"]
    for key in keys.all_keys():
        assert re.fullmatch(r"[A-Zl].+\.", key.meaning), key
        assert len(key.meaning) < 320, key


def test_defaults_in_the_table_are_those_of_a_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    defaults = [
        f"{key.name}={key.default}"
        for key in keys.all_keys()
        if key.default is not None and "[]" not in key.name and key.name != "extends"
    ]
    defaults.remove("data.source=folder")
    defaults = [d for d in defaults if not d.startswith("data.crop_aspect=")]  # rounded
    assert load(str(path), defaults).recipe == load(str(path)).recipe


def test_types_are_in_words():
    types = {key.name: key.type for key in keys.all_keys()}
    assert types["optimizer.momentum"] == "number >= 0, < 1"
    assert types["micro_batch_size"] == "integer > 0 or null"
    assert types["scale"] == "one of linear, sqrt, null"
    assert types["loss_scale"] == "number > 0, or one of auto, dynamic, none"
    assert types["schedule.milestones"] == "list of lengths"
    assert types["data.std"] == "list of 3 numbers > 0"
    assert types["stages"] == "list of stages"
    assert types["track"].startswith("one of tensorboard, wandb, mlflow, mlperf, or list")
    assert types["callbacks[].name"] == "string"
    assert types["checkpoint.every"] == "length or null"
    assert keys.schema()["$defs"]["Optimizer"]["description"]
    jsonschema.Draft202012Validator.check_schema(keys.schema())
