"""Ranks that run other code, or another model, are told apart before they train."""

import importlib
import shutil
import sys

from torch import nn

from largebatch.recipes.training.build import code_facts


def changed(recipe, before, model):
    after = code_facts(recipe, model)
    return {name for name in before | after if before.get(name) != after.get(name)}


def test_models_of_other_names_shapes_or_dtypes_are_told_apart():
    before = code_facts({}, nn.Linear(3, 4))
    assert changed({}, before, nn.Linear(3, 4)) == set()  # whatever its values
    others = nn.Linear(3, 5), nn.Linear(3, 4).half(), nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)
    for other in others:
        assert changed({}, before, other) == {"the parameters and buffers of the model"}, other


def test_the_sources_of_largebatch_and_of_dotted_paths_are_compared(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_model.py").write_text("def build(): ...\n")
    importlib.import_module("own_model")
    recipe = {"model": {"name": "own_model:build"}, "callbacks": ["own_model:build"]}
    before = code_facts(recipe, nn.Linear(3, 4))
    (tmp_path / "own_model.py").write_text("def build(): return 1\n")
    assert changed(recipe, before, nn.Linear(3, 4)) == {"the source of own_model"}
    del sys.modules["own_model"]
    before = code_facts({}, nn.Linear(3, 4))
    copy = shutil.copytree(
        importlib.import_module("largebatch.lars").__path__[0], tmp_path / "lars"
    )
    (copy / "span.py").write_text((copy / "span.py").read_text() + "#")
    monkeypatch.setattr(importlib.import_module("largebatch.lars"), "__path__", [str(copy)])
    assert changed({}, before, nn.Linear(3, 4)) == {"the source of largebatch"}
