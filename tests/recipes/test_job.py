"""A process among those of a job."""

import os

import pytest
import torch

from largebatch.recipes import job
from largebatch.recipes.load import load


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 4),
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"OMP_NUM_THREADS": "3"}, None),
    ],
    ids=str,
)
def test_a_process_computes_on_its_share_of_the_cores_unless_told(
    monkeypatch, environment, threads
):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    for name in ("OMP_NUM_THREADS", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with job.joined(load("digits", ["device=cpu"]).recipe):
        assert chosen == ([] if threads is None else [threads])


@pytest.mark.parametrize(("number", "threads"), [("1", 2), ("3", None)])
def test_the_1_that_torchrun_sets_is_not_a_choice(monkeypatch, number, threads):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    for name, value in {
        "OMP_NUM_THREADS": number, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with job.joined(load("digits", ["device=cpu"]).recipe):
        assert chosen == ([] if threads is None else [threads])
