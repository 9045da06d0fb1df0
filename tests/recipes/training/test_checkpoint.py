"""Checkpoints that are damaged, incomplete or made to run code."""

import errno
import json
import os
import pickle
import random
import shutil
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.ranks import Job
from largebatch.recipes.training.folder.checkpoint import (
    digest_of,
    latest,
    load,
    newest_intact,
    read_state,
)
from largebatch.recipes.training.folder.saving import Checkpoints, facts_of, write_state
from largebatch.recipes.training.folder.tensor_files import NotPlainError, check_plain
from largebatch.recipes.training.folder.weights import read_weights
from tests.recipes.runs import make

JOB = Job(0, 1, 1, torch.device("cpu"))
STATE = {"loader": {"position": 5}, "precision": {}, "recipe": {}}


@pytest.fixture
def parts():
    model = nn.Linear(20, 20)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.fixture
def saved(tmp_path, parts):
    return Checkpoints(tmp_path, JOB).write(3, *parts, STATE)


def test_the_state_comes_back(saved):
    assert read_state(saved) == {"step": 3, "world_size": 1, **STATE}


@pytest.mark.parametrize("content", [b"{", b"{}", b"[1]", b"\x80\x00", b'{"step": 3}'])
def test_a_damaged_state_is_named(saved, content):
    (saved / "state.json").write_bytes(content)
    with pytest.raises(RecipeError) as error:
        read_state(saved)
    assert f"resume.from: {saved} is damaged: its state.json is not an object" in str(error.value)


@pytest.mark.parametrize("name", ["model.pt", "rank-0.pt"])
@pytest.mark.parametrize("size", [None, 0, 1000])
def test_missing_and_cut_files_are_named(saved, parts, name, size):
    if size is None:
        (saved / name).unlink()
    else:
        (saved / name).write_bytes((saved / name).read_bytes()[:size])
    with pytest.raises(RecipeError) as error:
        load(saved, *parts, JOB)
    assert str(error.value).startswith(f"resume.from: {saved} is damaged: ")
    assert "\n" not in str(error.value)


def test_an_incomplete_checkpoint_is_replaced(saved, parts):
    (saved / "state.json").unlink()
    (saved / "model.pt").unlink()
    assert latest(saved.parent) is None
    assert Checkpoints(saved.parent, JOB).write(3, *parts, STATE) == saved
    load(saved, *parts, JOB)
    assert json.loads((saved / "state.json").read_text())["step"] == 3
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def flip_a_bit(path, generator):
    content = bytearray(path.read_bytes())
    place = generator.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.pt", "rank-0.pt", "state.json"])
def test_every_flipped_bit_is_found(saved, parts, tmp_path, name):
    whole = tmp_path / "whole"
    shutil.copytree(saved, whole)
    generator = random.Random(0)
    for _ in range(80):
        shutil.copy(whole / name, saved / name)
        flip_a_bit(saved / name, generator)
        with pytest.raises(RecipeError, match=r"resume.from: .* is damaged: ") as error:
            load(saved, *parts, JOB)
        assert "\n" not in str(error.value)


def test_a_checkpoint_of_an_earlier_version_is_refused(saved, parts):
    (saved / "model.pt").rename(saved / "__0_0.distcp")
    sealed(saved)
    with pytest.raises(RecipeError, match="was written by an earlier version of largebatch"):
        newest_intact(saved.parent)


def test_the_newest_intact_checkpoint_is_found(tmp_path, parts):
    checkpoints = Checkpoints(tmp_path, JOB, keep=3)
    assert newest_intact(tmp_path) == (None, {}, [])
    paths = [checkpoints.write(step, *parts, STATE) for step in (3, 20, 100)]
    assert newest_intact(tmp_path) == (paths[2], read_state(paths[2]), [])
    (paths[2] / "model.pt").write_bytes(b"")
    found, _, lines = newest_intact(tmp_path)
    assert found == paths[1]
    size = f"{(paths[1] / 'model.pt').stat().st_size:,}"
    assert lines == [f"{paths[2]} is damaged: model.pt has 0 bytes, not {size}"]
    (paths[1] / "state.json").unlink()
    found, _, lines = newest_intact(tmp_path)
    assert (found, len(lines)) == (paths[0], 2)
    assert lines[1] == f"{paths[1]} is damaged: it has no state.json"
    checkpoints.set_aside_after(3)
    assert newest_intact(tmp_path) == (paths[0], read_state(paths[0]), [])
    for step in (20, 100):
        (tmp_path / f".step-{step:08d}.old").rename(tmp_path / f"step-{step:08d}")
    (paths[0] / "state.json").write_text("{")
    with pytest.raises(RecipeError) as error:
        newest_intact(tmp_path)
    message = str(error.value)
    assert message.startswith(f"resume.from: no checkpoint in {tmp_path} can be used: {paths[2]} ")
    assert message.endswith("valid: another checkpoint, resume=PATH, or another run_dir")
    assert message.count("is damaged") == 3


def test_later_checkpoints_are_set_aside_until_a_new_one_is_written(tmp_path, parts):
    first = Checkpoints(tmp_path, JOB, keep=9)
    for step in (10, 20, 30, 40):
        first.write(step, *parts, STATE)
    (tmp_path / ".step-00000035.partial").mkdir()  # of a crash
    resumed = Checkpoints(tmp_path, JOB, keep=2)
    resumed.set_aside_after(20)
    names = {path.name for path in tmp_path.iterdir()}
    aside = {".step-00000030.old", ".step-00000040.old"}
    assert names == {"step-00000010", "step-00000020", *aside}
    assert latest(tmp_path).name == "step-00000020"
    resumed.write(30, *parts, {**STATE, "loader": {"position": 6}})
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000020", "step-00000030"}
    assert read_state(tmp_path / "step-00000030")["loader"] == {"position": 6}


def test_a_checkpoint_that_cannot_be_read_for_now_is_not_damaged(saved, parts, monkeypatch):
    """It would be passed over, and then removed."""
    opened = Path.open

    def failing(path, *arguments, **options):
        if path.name == "model.pt":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(RecipeError, match=r"model.pt cannot be read: Input/output error; val"):
        newest_intact(saved.parent)


@pytest.mark.parametrize(
    "files", [None, [], {"../x": {"bytes": 1, "sha256": "y"}}, {"x": 3}, {"x": {"bytes": 1}}]
)
def test_facts_of_another_form_are_damage(saved, files):
    content = json.loads((saved / "state.json").read_text())
    del content["files"], content["sha256"]
    if files is not None:
        content["files"] = files
    content["sha256"] = digest_of(content)
    (saved / "state.json").write_text(json.dumps(content))
    with pytest.raises(RecipeError, match=r"is damaged: state.json is not as it was written"):
        read_state(saved)


def test_the_best_is_kept_beside_the_newest(tmp_path, parts):
    checkpoints = Checkpoints(tmp_path, JOB, keep=1)
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 5), (6, None)):
        checkpoints.write(step, *parts, STATE, best=best)
        kept = {int(path.name[5:]) for path in tmp_path.iterdir()}
        assert kept == {step, *([best] if best else [])}


class Command:
    """What runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.fixture
def trap(tmp_path):
    """A path that a command would create; a checkpoint that runs it would."""
    path = tmp_path / "ran"
    pickle.loads(pickle.dumps(Command(path)))
    assert path.exists()  # so that the tests show what they are to show
    path.unlink()
    return path


def sealed(folder):
    """Give a folder that was changed on purpose the digests of what it holds."""
    content = json.loads((folder / "state.json").read_text())
    files = facts_of(path for path in folder.iterdir() if path.name != "state.json")
    del content["files"], content["sha256"]
    write_state(folder, content, files)


def changed(**parts):
    """Return what gives the common part of a checkpoint another content."""

    def change(folder, trap):
        content = torch.load(folder / "model.pt", weights_only=True)
        made = {name: part(trap) if callable(part) else part for name, part in parts.items()}
        torch.save(content | made, folder / "model.pt")

    return change


def no_dictionary(folder, trap):
    torch.save([1], folder / "model.pt")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (changed(optimizer=Command), "model.pt holds an object that is not plain data"),
        (changed(more=Command), "model.pt holds an object that is not plain data"),
        (
            changed(parameters={"weight": torch.empty(20, 20, device="meta")}),
            "model.pt holds a tensor without values, on the device meta",
        ),
        (
            changed(parameters={"weight": torch.zeros(1).expand(2**40)}),
            "model.pt holds a tensor that is larger than the file",
        ),
        (no_dictionary, "model.pt holds a list, not a dictionary"),
    ],
)
def test_what_a_hostile_file_holds_is_refused(saved, parts, trap, harm, words):
    harm(saved, trap)
    sealed(saved)  # whoever makes such a folder makes its digests too
    with pytest.raises(RecipeError) as error:
        load(saved, *parts, JOB)
    assert str(error.value).startswith(f"resume.from: {saved} is damaged: {words}")
    assert "; valid: another" in str(error.value)
    with pytest.raises(RecipeError) as error:
        read_weights(saved)
    assert str(error.value).startswith(f"init.from: {saved} is damaged: {words}")
    assert not trap.exists()


@pytest.mark.parametrize("other", [nn.Linear(20, 21), nn.Linear(20, 20, bias=False)])
def test_a_checkpoint_of_another_model_is_refused(saved, other):
    optimizer = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    with pytest.raises(
        RecipeError, match=r"is of another model: the shape of bias is \[20\] there"
    ):
        load(saved, other, optimizer, JOB)


class Odd:
    pass


def distributed():
    """A tensor that is spread over ranks, without making them."""
    spec = DTensorSpec(
        None, (Replicate(),), tensor_meta=TensorMeta(torch.Size([2]), (1,), torch.float)
    )
    return DTensor(torch.ones(2), spec, requires_grad=False)


@pytest.mark.parametrize(
    ("content", "odd"),
    [
        ([{"lr": 0.1, "betas": (0.9, 0.99), "name": "a", "none": None, "t": torch.ones(2)}], None),
        ([{"lr": 0.1, "rule": [Odd()]}], "Odd"),
        ([{"rule": lambda: 1}], "function"),
        ([{"lr": np.float64(0.1)}], "float64"),
        ([{"rest": deque([1.0])}], "deque"),
        ([{"rest": distributed()}], "DTensor"),
    ],
)
def test_only_plain_data_can_be_stored(content, odd):
    if odd is None:
        check_plain(content)
    else:
        with pytest.raises(NotPlainError, match=odd):
            check_plain(content)


class Deque(torch.optim.SGD):
    """Keeps an object of a class in its state."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = deque([1.0])


def test_a_state_that_could_not_be_read_back_is_not_written(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = Deque(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(RecipeError, match=r"optimizer.name: the optimizer keeps a deque in its st"):
        Checkpoints(tmp_path, JOB).write(1, model, optimizer, STATE)
    assert list(tmp_path.iterdir()) == []


class Collected(torch.optim.SGD):
    """Gives no state before a collective call, as ZeroRedundancyOptimizer."""

    def state_dict(self):
        raise RuntimeError("Optimizer state has not been consolidated on this rank.\nMore.")


class Distributed(torch.optim.SGD):
    """Keeps a tensor in its state that is spread over ranks."""

    def __init__(self, params, lr, **options):
        super().__init__(params, lr, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["part"] = distributed()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Collected, "does not give its state, which a checkpoint holds: Optimizer state has not"),
        (Distributed, "keeps a DTensor in its parameter groups or its state"),
    ],
)
def test_an_optimizer_that_cannot_be_stored_is_refused_before_training(
    photos, tmp_path, kind, words
):
    name = f"{__name__}:{kind.__name__}"
    with pytest.raises(RecipeError, match=words) as error:
        make(photos, tmp_path / "run", f"optimizer.name={name}")
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
