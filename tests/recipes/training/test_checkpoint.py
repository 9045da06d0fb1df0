"""Checkpoints that are damaged, incomplete or made to run code."""

import json
import os
import pickle
import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.ranks import Job
from largebatch.recipes.training import plain_data
from largebatch.recipes.training.checkpoint import (
    Checkpoints,
    latest,
    load,
    newest_intact,
    read_state,
)
from largebatch.recipes.training.checkpoint_files import facts_of, write_state
from largebatch.recipes.training.weights import read_weights

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


def flip_a_bit(path, generator):
    content = bytearray(path.read_bytes())
    place = generator.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json"])
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


def test_a_checkpoint_without_digests_is_taken_as_it_is(saved, parts):
    """Earlier versions wrote none."""
    content = json.loads((saved / "state.json").read_text())
    del content["files"], content["sha256"]
    (saved / "state.json").write_text(json.dumps(content))
    load(saved, *parts, JOB)


def test_the_newest_intact_checkpoint_is_found(tmp_path, parts):
    checkpoints = Checkpoints(tmp_path, JOB, keep=3)
    assert newest_intact(tmp_path) == (None, [])
    paths = [checkpoints.save(step, *parts, STATE) for step in (3, 20, 100)]
    assert newest_intact(tmp_path) == (paths[2], [])
    (paths[2] / "__0_0.distcp").write_bytes(b"")
    found, lines = newest_intact(tmp_path)
    assert found == paths[1]
    assert lines == [
        f"{paths[2]} is damaged: __0_0.distcp has 0 bytes, not {lines[0].split('not ')[1]}"
    ]
    assert lines[0].endswith("bytes: resuming from step-00000020 instead") or lines[0].endswith(
        ": resuming from step-00000020 instead"
    )
    for path in paths[:2]:
        (path / "state.json").write_text("{")
    with pytest.raises(RecipeError) as error:
        newest_intact(tmp_path)
    message = str(error.value)
    assert message.startswith(f"resume.from: no checkpoint in {tmp_path} can be used: {paths[2]} ")
    assert message.endswith("valid: another checkpoint, resume=PATH, or another run_dir")
    assert message.count("is damaged") == 3


def test_a_run_from_an_earlier_checkpoint_replaces_the_later_ones(tmp_path, parts):
    first = Checkpoints(tmp_path, JOB, keep=9)
    for step in (10, 20, 30, 40):
        first.save(step, *parts, STATE)
    resumed = Checkpoints(tmp_path, JOB, keep=2)
    resumed.save(20, *parts, {**STATE, "loader": {"position": 6}})
    steps = [path.name for path in sorted(tmp_path.iterdir())]
    assert steps == ["step-00000010", "step-00000020"]
    assert read_state(tmp_path / "step-00000020")["loader"] == {"position": 6}


def test_the_best_is_kept_beside_the_newest(tmp_path, parts):
    checkpoints = Checkpoints(tmp_path, JOB, keep=1)
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 5), (6, None)):
        checkpoints.save(step, *parts, STATE, best=best)
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


def index_that_runs(folder, trap):
    (folder / ".metadata").write_bytes(pickle.dumps(Command(trap)))


def index_that_leaves_the_folder(folder, trap):
    index = dcp.FileSystemReader(folder).read_metadata()
    for stored in index.storage_data.values():
        stored.relative_path = f"../{folder.name}/{stored.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def options_that_run(folder, trap):
    """Replace the optimizer's options, which are no tensors."""
    tensors = {"optimizer": {"param_groups": [{"lr": Command(trap)}]}}
    rewrite(folder, tensors)


def tensor_that_runs(folder, trap):
    """Put a pickle where the data of a tensor are."""
    index = dcp.FileSystemReader(folder).read_metadata()
    (key,) = (key for key in index.storage_data if key.fqn == "model.weight")
    stored = index.storage_data[key]
    hostile = folder / "__0_9.distcp"
    torch.save(Command(trap), hostile)
    stored.relative_path, stored.offset, stored.length = hostile.name, 0, hostile.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def rewrite(folder, tensors):
    state = (folder / "state.json").read_bytes()
    shutil.rmtree(folder)
    dcp.save(tensors, checkpoint_id=folder)
    (folder / "state.json").write_bytes(state)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (index_that_runs, ".metadata names posix.system, which is no part of an index"),
        (index_that_leaves_the_folder, ".metadata names the file '../step-00000003/__0_0.distcp'"),
        (tensor_that_runs, "a tensor is stored with something that is not plain data"),
    ],
)
def test_no_code_of_a_checkpoint_is_run(saved, parts, trap, harm, words):
    harm(saved, trap)
    sealed(saved)  # whoever makes such a folder makes its digests too
    with pytest.raises(RecipeError) as error:
        load(saved, *parts, JOB)
    assert f"resume.from: {saved} is damaged: {words}; valid: another" in str(error.value)
    with pytest.raises(RecipeError) as error:
        read_weights(saved)
    assert f"init.from: {saved} is damaged: {words}; valid: " in str(error.value)
    assert not trap.exists()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_code_of_an_optimizers_options_is_run(saved, parts, trap):
    options_that_run(saved, trap)
    sealed(saved)
    target = {"optimizer": {"param_groups": [{"lr": 0.5}]}}
    with pytest.raises(dcp.api.CheckpointException) as error:
        plain_data.load(target, saved)
    reason = plain_data.reason(error.value)
    assert reason == "optimizer.param_groups.0.lr holds an object that is not plain data" or (
        reason.endswith("holds an object that is not plain data")
    )
    assert not trap.exists()
    assert "weights_only" not in reason


class Odd:
    pass


@pytest.mark.parametrize(
    ("content", "odd"),
    [
        ([{"lr": 0.1, "betas": (0.9, 0.99), "name": "a", "none": None, "t": torch.ones(2)}], None),
        ([{"lr": 0.1, "rule": [Odd()]}], "Odd"),
        ([{"rule": lambda: 1}], "function"),
    ],
)
def test_only_plain_data_can_be_stored(content, odd):
    if odd is None:
        plain_data.check_plain(content)
    else:
        with pytest.raises(plain_data.NotPlainError, match=odd):
            plain_data.check_plain(content)
