"""The check of the hook with several ranks on one GPU: its dry run, and what it reports."""

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
    found = Report(file, "ranks", ranks_on_one_gpu.TITLE, 170)
    ranks_on_one_gpu.run(found, Place(CPU, dry=True))
    checks = {check["check"]: check["error"] for check in found.content["checks"]}
    assert not any(checks.values()), checks
    for way in ("gloo", "gloo, one rank"):
        for name in ALGORITHMS:
            assert f"gradients are those of DDP on {way}: {name}, bf16" in checks
    assert len(checks) == 2 * 3 * (len(ALGORITHMS) + 3)


def test_gloo_is_asked_for_no_messages_between_cuda_tensors():
    found = ranks_on_one_gpu.cases(Way("gloo", "gloo", 4, 2), torch.device("cuda"), 10_000)
    assert {rule.algorithm for rule in found.values()} == {"ring", "hierarchical", "torus"}
    assert all(10_000 // rule.chunk_bytes >= 12 for rule in found.values() if rule.chunk_bytes)


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


@pytest.mark.slow("starts a process that imports torch")
def test_ranks_that_end_early_are_reported():
    way = Way("unknown", "gloo", 1, 1)
    errors = set(ranks_on_one_gpu.outcomes(way, Place(CPU, dry=True), 60.0).values())
    assert len(errors) == 1
    assert errors.pop().startswith("not done: exit codes [1]")
