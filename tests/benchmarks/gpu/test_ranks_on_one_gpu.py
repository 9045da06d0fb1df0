"""The check of the hook with several ranks on one GPU: its dry run, and what it reports."""

import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import ranks_on_one_gpu, report
from benchmarks.gpu.place import Place
from benchmarks.gpu.ranks_on_one_gpu import Way
from benchmarks.gpu.report import Report, Skipped
from benchmarks.gpu.ways import cases
from largebatch.comm import ALGORITHMS, Rule
from tests.ranks import run_ranks

CPU = torch.device("cpu")
ONE_RANK = ranks_on_one_gpu.ways(CPU)[1]


@pytest.mark.slow("starts a process that imports torch")
def test_a_dry_run_in_a_process(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks_on_one_gpu, "ways", lambda device: [ONE_RANK])
    file = tmp_path / "results.json"
    report.write(file, {"parts": {}})
    found = Report(file, "ranks", ranks_on_one_gpu.TITLE, 600)
    ranks_on_one_gpu.run(found, Place(CPU, dry=True))
    checks = {check["check"]: check["error"] for check in found.content["checks"]}
    assert not any(checks.values()), checks
    for name in ALGORITHMS:
        assert f"gradients are those of DDP on gloo, one rank: {name}, bf16" in checks


def wrong_gradients():
    class Wrong(type(ALGORITHMS["leader"])):
        def phases(self, tensor, topology):
            yield from super().phases(tensor, topology)
            tensor[-1] += 1

    ALGORITHMS["leader"] = Wrong()
    rule = Rule("leader", wire_dtype="bf16")
    with ranks_on_one_gpu.groups_of_one_rank():
        ranks_on_one_gpu.equal_those_of_ddp(Rule("torus"), ONE_RANK, CPU, True)
        with pytest.raises(AssertionError, match=r"step 0, layer \d: 1 of 20\d\d differ"):
            ranks_on_one_gpu.equal_those_of_ddp(rule, ONE_RANK, CPU, True)


@pytest.mark.slow("starts a rank")
def test_wrong_gradients_are_reported():
    run_ranks(1, wrong_gradients)


def test_gloo_is_asked_for_no_messages_between_cuda_tensors():
    found = cases(Way("gloo", "gloo", 4, 2), torch.device("cuda"), 10_000)
    assert {rule.algorithm for rule in found.values()} == {"ring", "hierarchical", "torus"}
    assert all(10_000 // rule.chunk_bytes >= 12 for rule in found.values() if rule.chunk_bytes)


def test_nccl_that_refuses_several_ranks_is_skipped(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    Way("nccl, one rank", "nccl", 1, 1).check()
    with pytest.raises(Skipped, match=r"NCCL 2.27.5 refuses several ranks on one GPU"):
        Way("nccl", "nccl", 4, 2).check()
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 3))
    Way("nccl", "nccl", 4, 2).check()


@pytest.mark.parametrize(("limit", "late"), [(120.0, True), (0.5, False)])
def test_ranks_that_are_stopped_early_had_no_time_and_others_hang(monkeypatch, limit, late):
    sleeps, popen = [sys.executable, "-c", "import time; time.sleep(600)"], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, env: popen(sleeps, env=env))
    monkeypatch.setattr(ranks_on_one_gpu, "LIMIT_SECONDS", limit)
    found = ranks_on_one_gpu.outcomes(ONE_RANK, Place(CPU, dry=True), 0.5)
    assert (found == {}) == late
    assert all("killed after 0 s" in error for error in found.values())
