"""The check of the hook: that it finds wrong gradients, and what it makes of ranks that end."""

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import hook
from benchmarks.gpu.place import Place
from largebatch.comm import ALGORITHMS, Rule
from tests.ranks import run_ranks

CPU = Place(torch.device("cpu"), dry=True)
RULES = {"ring": Rule("ring"), "torus": Rule("torus")}


def wrong_gradients():
    class Wrong(type(ALGORITHMS["leader"])):
        def phases(self, tensor, topology):
            yield from super().phases(tensor, topology)
            tensor[-1] += 1

    ALGORITHMS["leader"] = Wrong()
    with hook.groups_of_one_rank():
        hook.equal_those_of_ddp(Rule("torus"), CPU.device, True)
        with pytest.raises(AssertionError, match=r"step 0, layer \d: 1 of 20\d\d differ"):
            hook.equal_those_of_ddp(Rule("leader", wire_dtype="bf16"), CPU.device, True)


@pytest.mark.slow("starts a rank")
def test_wrong_gradients_are_found():
    run_ranks(1, wrong_gradients)


def test_rules_have_every_algorithm_in_every_dtype_and_enough_chunks():
    found = hook.rules_of("nccl", 4, torch.device("cuda"), 10_000)
    for name in ALGORITHMS:
        assert {name, f"{name}, bf16", f"{name}, fp16"} <= found.keys()
    assert all(10_000 // rule.chunk_bytes >= 12 for rule in found.values() if rule.chunk_bytes)
    found = hook.rules_of("gloo", 4, torch.device("cuda"), 10_000)
    assert {rule.algorithm for rule in found.values()} == {"ring", "hierarchical", "torus"}


def one_dies(tell, rules, place):
    dist.barrier()  # else a fast rank could end while the other still connects
    tell("ring", "")
    if dist.get_rank() == 1:
        raise SystemExit(3)
    tell("torus", "")


def one_is_wrong(tell, rules, place):
    dist.barrier()
    tell("ring", "AssertionError: step 0" if dist.get_rank() else "")
    tell("torus", "RuntimeError: timeout" if dist.get_rank() else "")


def none_ends(tell, rules, place):
    tell("ring", "")
    while True:  # in short sleeps: one that begins after a signal is not interrupted
        time.sleep(0.05)


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize(
    ("work", "limit", "states"),
    [
        (one_dies, 90.0, ["ok", "failed"]),
        (one_is_wrong, 90.0, ["wrong", "failed"]),
        (none_ends, 90.0, ["late", "late"]),
        (none_ends, 0.0, ["failed", "failed"]),
    ],
)
def test_ranks_that_are_stopped_early_are_late_and_others_hang(
    report_of, monkeypatch, work, limit, states
):
    monkeypatch.setattr(hook, "_work", work)
    monkeypatch.setattr(hook, "rules_of", lambda *arguments: RULES)
    monkeypatch.setattr(hook, "LIMIT_SECONDS", limit)
    found = report_of("hook")
    hook.measure(found, CPU, "gloo", 2, 0.0 if work is none_ends else 60.0)
    assert [check["state"] for check in found.content["checks"]] == states
