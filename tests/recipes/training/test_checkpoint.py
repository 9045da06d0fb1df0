"""Checkpoints that are damaged, incomplete or made to run code; and those that are kept."""

import errno
import hashlib
import json
import os
import pickle
import random
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load as load_recipe
from largebatch.recipes.training.folder import checkpoint
from largebatch.recipes.training.folder.checkpoint import (
    facts_of,
    latest,
    load,
    newest_intact,
    read_state,
)
from largebatch.recipes.training.folder.place import agreed_place
from largebatch.recipes.training.folder.saving import Checkpoints, write_state
from largebatch.recipes.training.folder.tensor_files import read_tensors, write_tensors
from largebatch.recipes.training.folder.weights import read_weights
from tests.ranks import run_ranks
from tests.recipes.runs import JOB, make, refused

STATE = {"loader": {"position": 5}, "precision": {}, "recipe": {}}


@pytest.fixture
def parts():
    model = nn.Linear(20, 20)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.fixture
def saved(tmp_path, parts):
    return Checkpoints(tmp_path, JOB).write(3, *parts, STATE)


@pytest.mark.parametrize("name", ["model.pt", "rank-0.pt", "state.json"])
def test_a_file_that_is_missing_cut_another_or_has_a_flipped_bit_is_named(saved, parts, name):
    path, generator = saved / name, random.Random(0)
    whole = path.read_bytes()

    def flipped():
        content = bytearray(whole)
        place = generator.randrange(8 * len(content))
        content[place // 8] ^= 1 << place % 8
        return content

    for content in (None, whole[:-9], b"{}", *(flipped() for _ in range(40))):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        checkpoint._verified.clear()
        message = refused(load, saved, *parts, JOB)
        assert message.startswith(f"resume.from: {saved} is damaged: ")
        assert name in message
    path.write_bytes(whole)
    read_state(saved)


def test_an_incomplete_checkpoint_is_replaced(saved, parts):
    (saved / "state.json").unlink()
    (saved / "model.pt").unlink()
    assert latest(saved.parent) is None
    assert Checkpoints(saved.parent, JOB).write(3, *parts, STATE) == saved
    load(saved, *parts, JOB)
    assert json.loads((saved / "state.json").read_text())["step"] == 3
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_the_newest_intact_checkpoint_is_found(tmp_path, parts):
    checkpoints = Checkpoints(tmp_path, JOB, keep=3)
    assert newest_intact(tmp_path) == (None, {}, [])
    paths = [checkpoints.write(step, *parts, STATE) for step in (3, 20, 100)]
    assert newest_intact(tmp_path) == (paths[2], {"step": 100, "world_size": 1, **STATE}, [])
    (paths[2] / "model.pt").write_bytes(b"")
    found, _, lines = newest_intact(tmp_path)
    assert found == paths[1]
    problem = "the SHA-256 of model.pt is not that of when it was written"
    assert lines == [f"{paths[2]} is damaged: {problem}"]
    (paths[1] / "state.json").unlink()
    found, _, lines = newest_intact(tmp_path)
    assert (found, len(lines)) == (paths[0], 2)
    assert lines[1] == f"{paths[1]} is damaged: it has no state.json"
    checkpoints.set_aside_after(3)
    assert newest_intact(tmp_path) == (paths[0], read_state(paths[0]), [])
    for step in (20, 100):
        (tmp_path / f".step-{step:08d}.old").rename(tmp_path / f"step-{step:08d}")
    (paths[0] / "state.json").write_text("{")
    message = refused(newest_intact, tmp_path)
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


def test_a_checkpoint_that_cannot_be_read_for_now_is_not_damaged(saved, monkeypatch):
    """It would be passed over, and then removed."""
    checkpoint._verified.clear()

    def failing(file, _):
        raise OSError(errno.EIO, "Input/output error", file.name)

    monkeypatch.setattr(hashlib, "file_digest", failing)
    assert "model.pt cannot be read: Input/output error; val" in refused(
        newest_intact, saved.parent
    )


class Command:
    """What runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


def test_a_hostile_file_is_refused_without_running_it(saved, parts, tmp_path):
    trap = tmp_path / "ran"
    pickle.loads(pickle.dumps(Command(trap)))
    assert trap.exists()  # so that the test shows what it is to show
    trap.unlink()
    content = torch.load(saved / "model.pt", weights_only=True)
    torch.save({**content, "optimizer": Command(trap)}, saved / "model.pt")
    # Whoever makes such a folder makes its digests too.
    state = json.loads((saved / "state.json").read_text())
    del state["sha256"]
    state["files"] = {name: facts_of(saved / name) for name in state["files"]}
    write_state(saved, state)
    problem = f"{saved} is damaged: model.pt holds an object that is not plain data; valid: "
    assert refused(load, saved, *parts, JOB).startswith(f"resume.from: {problem}")
    assert refused(read_weights, saved).startswith(f"init.from: {problem}")
    assert not trap.exists()


@pytest.mark.parametrize("other", [nn.Linear(20, 21), nn.Linear(20, 20, bias=False)])
def test_a_checkpoint_of_another_model_is_refused(saved, other):
    optimizer = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    message = refused(load, saved, other, optimizer, JOB)
    assert "is of another model: the shape of bias is [20] there" in message


class Odd(torch.Tensor):
    """A tensor of a class that a file does not hold, such as one that is spread over ranks."""


ODD = torch.ones(2).as_subclass(Odd)
PLAIN = {"lr": 0.1, "betas": (0.9, 0.99), "name": "a", "none": None, "t": torch.ones(2)}
PLAIN |= {"dtype": torch.half, "device": torch.device("cpu"), 3: [1 + 2j, {b"a"}, torch.Size([2])]}


def test_only_plain_data_can_be_stored(tmp_path, parts):
    model, optimizer = parts
    write_tensors(tmp_path / "a.pt", PLAIN)
    assert str(read_tensors(tmp_path / "a.pt")) == str(PLAIN)
    optimizer.state[model.weight] = PLAIN
    Checkpoints(tmp_path / "plain", JOB).write(1, *parts, STATE)
    for kind, odd in (("Odd", [ODD]), ("float64", np.float64(0.1))):
        optimizer.state[model.weight] = {"lr": 0.1, "rule": odd}
        message = refused(Checkpoints(tmp_path / "run", JOB).write, 1, *parts, STATE)
        assert f"optimizer.name: the optimizer keeps a {kind} in its state" in message
    assert not (tmp_path / "run").exists()


class Collected(torch.optim.SGD):
    """Gives no state before a collective call, as ZeroRedundancyOptimizer."""

    def state_dict(self):
        raise RuntimeError("Optimizer state has not been consolidated on this rank.\nMore.")


class Spread(torch.optim.SGD):
    """Keeps a tensor of another class in its state."""

    def __init__(self, params, lr, **options):
        super().__init__(params, lr, **options)
        self.state[self.param_groups[0]["params"][0]]["part"] = ODD


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Collected, "does not give its state, which a checkpoint holds: Optimizer state has not"),
        (Spread, "keeps a Odd in its parameter groups or its state"),
    ],
)
def test_an_optimizer_that_cannot_be_stored_is_refused_before_training(
    photos, tmp_path, kind, words
):
    name = f"{__name__}:{kind.__name__}"
    message = refused(make, photos, tmp_path / "run", f"optimizer.name={name}")
    assert f": {name} {words}" in message
    assert not (tmp_path / "run").exists()


def on_ranks(folder, new, anywhere):
    """What a rank is told if the other one cannot load, how it verifies, and without run_dir."""
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank)
    job = Job(rank, 2, 2, torch.device("cpu"))
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    unloaded = refused(load, folder.parent / "elsewhere" if rank else folder, model, optimizer, job)
    checkpoint._verified.clear()
    with mock.patch.object(checkpoint, "facts_of", wraps=checkpoint.facts_of) as verified:
        place = agreed_place(new, job)
        load(place.resume_from, model, optimizer, job)
    placeless = refused(agreed_place, anywhere, Job(rank, 2, 1, torch.device("cpu")))
    loaded = place.resume_from == folder, place.saved["step"], verified.call_count
    return unloaded, loaded, placeless


@pytest.mark.slow("two ranks, each a process that imports torch")
def test_ranks_agree_on_a_checkpoint_and_verify_it_once_on_each_machine(saved, tmp_path):
    """Each of its files, by the first of the machine's processes, though it is read twice."""
    new = load_recipe("digits", [f"run_dir={tmp_path / 'new'}", f"resume={saved}"])
    anywhere = load_recipe("digits", ["resume=true"])
    first, second = run_ranks(2, on_ranks, saved, new, anywhere)
    assert first[0] == second[0]
    assert first[0].startswith("rank 1: resume.from: ")
    assert "is not a checkpoint" in first[0]
    assert [first[1], second[1]] == [(True, 3, 2), (True, 3, 0)]
    # Each of two machines would make a folder of its own.
    assert first[2] == second[2]
    assert first[2].startswith("run_dir: not set, and this run has several machines; valid: ")
