"""A checkpoint on several ranks: an error of one ends all, and one of a machine verifies it."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load as load_recipe
from largebatch.recipes.training.folder import checkpoint
from largebatch.recipes.training.folder.checkpoint import load
from largebatch.recipes.training.folder.place import agreed_place
from tests.ranks import run_ranks
from tests.recipes.training.test_checkpoint import parts as parts
from tests.recipes.training.test_checkpoint import saved as saved


def load_while_one_rank_fails(folder):
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    job = Job(dist.get_rank(), 2, 2, torch.device("cpu"))
    if job.rank == 1:
        folder = folder.parent / "elsewhere"
    try:
        load(folder, model, optimizer, job)
    except RecipeError as error:
        return str(error)


@pytest.mark.slow("two ranks, each a process that imports torch")
def test_all_ranks_fail_when_one_cannot_load(saved):
    one, other = run_ranks(2, load_while_one_rank_fails, saved)
    assert one == other
    assert one.startswith("rank 1: resume.from: ")
    assert "is not a checkpoint" in one


def load_while_counting(folder, loaded):
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank)
    job = Job(rank, 2, 2, torch.device("cpu"))
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with mock.patch.object(checkpoint, "facts_of", wraps=checkpoint.facts_of) as verified:
        place = agreed_place(loaded, job)
        load(place.resume_from, model, optimizer, job)
    return place.resume_from == folder, place.saved["step"], verified.call_count


@pytest.mark.slow("two ranks, each a process that imports torch")
def test_a_checkpoint_is_verified_once_on_each_machine(saved, tmp_path):
    """Each of its files, by the first of the machine's processes, though it is read twice."""
    loaded = load_recipe("digits", [f"run_dir={tmp_path / 'new'}", f"resume={saved}"])
    assert run_ranks(2, load_while_counting, saved, loaded) == [(True, 3, 2), (True, 3, 0)]


def place_on_two_machines(loaded):
    try:
        agreed_place(loaded, Job(dist.get_rank(), 2, 1, torch.device("cpu")))
    except RecipeError as error:
        return str(error)


@pytest.mark.slow("two ranks, each a process that imports torch")
def test_a_run_of_two_machines_needs_a_run_dir():
    """Each machine would make a folder of its own."""
    for message in run_ranks(2, place_on_two_machines, load_recipe("digits", ["resume=true"])):
        assert message.startswith("run_dir: not set, and this run has several machines; valid: ")
