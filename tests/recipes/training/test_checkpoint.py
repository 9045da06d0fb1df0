"""Checkpoints that are damaged or incomplete."""

import json

import pytest
import torch
from torch import nn

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.ranks import Job
from largebatch.recipes.training.checkpoint import Checkpoints, latest, load, read_state

JOB = Job(0, 1, 1, torch.device("cpu"))
STATE = {"loader": {"position": 5}, "precision": {}, "recipe": {}}


@pytest.fixture
def parts():
    model = nn.Linear(20, 20)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.fixture
def saved(tmp_path, parts):
    return Checkpoints(tmp_path, JOB).save(3, *parts, STATE)


def test_the_state_comes_back(saved):
    assert read_state(saved) == {"step": 3, "world_size": 1, **STATE}


@pytest.mark.parametrize("content", [b"{", b"{}", b"[1]", b"\x80\x00", b'{"step": 3}'])
def test_a_damaged_state_is_named(saved, content):
    (saved / "state.json").write_bytes(content)
    with pytest.raises(RecipeError) as error:
        read_state(saved)
    assert f"resume.from: {saved} is damaged: its state.json is not an object" in str(error.value)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("size", [None, 0, 1000])
def test_missing_and_cut_files_are_named(saved, parts, caplog, name, size):
    if size is None:
        (saved / name).unlink()
    else:
        (saved / name).write_bytes((saved / name).read_bytes()[:size])
    with pytest.raises(RecipeError) as error:
        load(saved, *parts, JOB)
    assert str(error.value).startswith(f"resume.from: {saved} is damaged: ")
    assert "\n" not in str(error.value)
    # torch logs tracebacks to the root
    assert [record for record in caplog.records if record.name == "root"] == []


def test_an_incomplete_checkpoint_is_replaced(saved, parts):
    (saved / "state.json").unlink()
    (saved / "__0_0.distcp").unlink()
    assert latest(saved.parent) is None
    assert Checkpoints(saved.parent, JOB).save(3, *parts, STATE) == saved
    load(saved, *parts, JOB)
    assert json.loads((saved / "state.json").read_text())["step"] == 3
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
