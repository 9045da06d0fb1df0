"""The check of the hook with several ranks on one GPU: its dry run, and what it reports."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import ranks_on_one_gpu, report
from benchmarks.gpu.place import Place
from benchmarks.gpu.ranks_on_one_gpu import Way
from benchmarks.gpu.report import Report, Skipped
from largebatch.comm import ALGORITHMS, Rule
from tests.ranks import run_ranks

CPU = torch.device("cpu")
ONE_RANK = Way("gloo, one rank", "gloo", 1, 1)


@pytest.mark.slow("starts three processes that import torch")
def test_a_dry_run_checks_every_algorithm_on_several_ranks_and_on_one(tmp_path):
    file = tmp_path / "results.json"
    report.write(file, {"parts": {}})
    found = Report(file, "ranks", ranks_on_one_gpu.TITLE, 600)
    ranks_on_one_gpu.run(found, Place(CPU, dry=True))
    checks = {check["check"]: check["error"] for check in found.content["checks"]}
    assert not any(checks.values()), checks
    for way in ("gloo", "gloo, one rank"):
        for name in ALGORITHMS:
            assert f"gradients are those of DDP on {way}: {name}, bf16" in checks
    summed_in_fp32 = 2 * 2  # two algorithms, two dtypes
    assert len(checks) == 2 * (3 * (len(ALGORITHMS) + 3) + summed_in_fp32)


def test_gloo_is_asked_for_no_messages_between_cuda_tensors():
    found = ranks_on_one_gpu.cases(Way("gloo", "gloo", 4, 2), torch.device("cuda"), 10_000)
    assert {rule.algorithm for rule in found.values()} == {"ring", "hierarchical", "torus"}
    assert all(10_000 // rule.chunk_bytes >= 12 for rule in found.values() if rule.chunk_bytes)


@pytest.fixture
def results(tmp_path):
    """Return the section of a run on a GPU that has a number of seconds left."""

    def run(seconds):
        file = tmp_path / "results.json"
        report.write(file, {"parts": {}})
        found = Report(file, "ranks", ranks_on_one_gpu.TITLE, seconds)
        ranks_on_one_gpu.run(found, Place(torch.device("cuda")))
        found.finish("ok")
        return found.content

    return run


def test_without_time_no_rank_is_started_and_nothing_fails(results, monkeypatch):
    monkeypatch.setattr(ranks_on_one_gpu, "outcomes", lambda *_: pytest.fail("started"))
    content = results(40.0)
    assert (content["state"], content["checks"]) == ("ok", [])
    late = [s["what"] for s in content["skipped"] if s["reason"].startswith("no time")]
    assert [what.rpartition(" on ")[2] for what in late] == ["gloo", "nccl", "nccl, one rank"]
    assert content["reason"] == "no time for 3 more"


def test_cases_that_ranks_have_no_time_for_are_skipped_and_so_are_messages_on_gloo(
    results, monkeypatch
):
    given = []

    def outcomes(way, place, seconds):
        given.append(seconds)
        return {"ring": ""}

    monkeypatch.setattr(ranks_on_one_gpu, "outcomes", outcomes)
    content = results(100.0)
    assert given == [pytest.approx(50.0, abs=1)] * 3
    assert [check["state"] for check in content["checks"]] == ["ok"] * 3
    reasons = [skip["reason"] for skip in content["skipped"]]
    no_messages = reasons.count("gloo sends no messages between CUDA tensors")
    assert no_messages == 3
    assert reasons.count("no time: the ranks had 50 s") == len(reasons) - no_messages > 30
    assert results(1000.0)["reason"] != ""
    assert given[3:] == [120.0] * 3


@pytest.mark.parametrize(("version", "refused"), [((2, 27, 5), True), ((2, 30, 3), False)])
def test_nccl_that_refuses_several_ranks_is_skipped(monkeypatch, version, refused):
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    Way("nccl, one rank", "nccl", 1, 1).check()
    several = Way("nccl", "nccl", 4, 2)
    if refused:
        with pytest.raises(Skipped, match=r"NCCL 2.27.5 refuses several ranks on one GPU"):
            several.check()
    else:
        several.check()


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
@pytest.mark.parametrize("way", ["gloo", "nccl", "nccl, one rank"])
def test_the_hook_on_collectives_of_a_gpu_computes_the_gradients_of_plain_ddp(way):
    cuda = torch.device("cuda", 0)
    way = next(one for one in ranks_on_one_gpu.ways(cuda) if one.name == way)
    try:
        found = ranks_on_one_gpu.outcomes(way, Place(cuda), 120.0)
    except Skipped as reason:
        pytest.skip(str(reason))
    assert not any(found.values()), found


@pytest.mark.slow("starts a rank")
def test_wrong_gradients_are_reported():
    run_ranks(1, wrong_gradients)


@pytest.mark.parametrize(("limit", "late"), [(120.0, True), (0.5, False)])
def test_ranks_that_are_stopped_early_had_no_time_and_others_hang(monkeypatch, limit, late):
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    popen, paths = subprocess.Popen, []

    def start(command, env):
        paths.append(env["PYTHONPATH"].split(os.pathsep))
        return popen(sleeps, env=env)

    monkeypatch.setenv("PYTHONPATH", "packages")
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(ranks_on_one_gpu, "LIMIT_SECONDS", limit)
    found = ranks_on_one_gpu.outcomes(ONE_RANK, Place(CPU, dry=True), 0.5)
    assert (paths[0][0].endswith("src"), paths[0][-1]) == (True, "packages")
    assert (found == {}) == late
    assert all("killed after 0 s" in error for error in found.values())


@pytest.mark.slow("starts a process that imports torch")
def test_ranks_that_end_early_are_reported():
    way = Way("unknown", "gloo", 1, 1)
    errors = set(ranks_on_one_gpu.outcomes(way, Place(CPU, dry=True), 60.0).values())
    assert len(errors) == 1
    assert errors.pop().startswith("not done: exit codes [1]")
