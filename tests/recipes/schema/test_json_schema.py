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


VALID = """
resume: true
resume: {from: latest, reshard: true}
precision: O2
loss_scale: 1024
loss_scale: dynamic
track: wandb
track: []
callbacks: mypkg.module:Mine
callbacks: [a:B, {name: a:B, args: {c: 1}}]
evaluate_every: null
log_every: 0.1dur
stages: [{from: 3ep, batch_size: 128, lr: keep}, {from: 500, image_size: 64}]
schedule: {name: step, milestones: [30ep, 500, 0.9dur], warmup: 0}
"""
MISTAKES = {
    "lr: 3": "Additional properties are not allowed ('lr' was unexpected)",
    "ema: {dekay: 0.9}": "('dekay' was unexpected)",
    "precision: fp8": "'fp8' is not one of ['auto', 'fp32'",
    "seed: true": "True is not of type 'integer'",
    "label_smoothing: 1": "1 is greater than or equal to the maximum of 1",
    "log_every: 0": "0 is not valid under any of the given schemas",
    "log_every: 5epochs": "'5epochs' is not valid under any of the given",
    "data: {crop_area: [0.1]}": "[0.1] is too short",
}


def test_valid_recipes_are_accepted_and_mistakes_are_found(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINIMAL)
    other = "extends: mine.yaml\noptimizer: {momentum: 0.5}\nmodel: {args: {drop_rate: 0.1}}\n"
    for text in (other, "extends: digits", *(MINIMAL + line for line in VALID.splitlines())):
        assert problems(text) == [], text
        (tmp_path / "other.yaml").write_text(text)
        load(str(tmp_path / "other.yaml"))
    for line, message in MISTAKES.items():
        assert any(message in problem for problem in problems(f"extends: digits\n{line}\n")), line


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
    for name, words in {
        **{"optimizer.momentum": "number >= 0, < 1", "micro_batch_size": "integer > 0 or null"},
        **{"scale": "one of linear, sqrt, null", "schedule.milestones": "list of lengths"},
        **{"loss_scale": "number > 0, or one of auto, dynamic, none", "stages": "list of stages"},
        **{"data.std": "list of 3 numbers > 0", "callbacks[].name": "string"},
        **{"checkpoint.every": "length or null", "profile.ranks": "one of all or list of integers"},
        "track": "one of tensorboard, wandb, mlflow, mlperf, or list",
    }.items():
        assert types[name].startswith(words), name
    assert keys.schema()["$defs"]["Optimizer"]["description"]
    jsonschema.Draft202012Validator.check_schema(keys.schema())
