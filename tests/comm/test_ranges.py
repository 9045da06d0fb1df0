"""All-reduces are named for profilers, by bucket, size, algorithm, chunk and phase."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from largebatch.comm import Plan, Rule, Topology, register
from tests.ranks import run_ranks


def reduced(plan, shared_memory=True):
    """Train two steps, of which the second is profiled; return the names of its ranges."""
    torch.manual_seed(dist.get_rank())
    layers = [torch.nn.Linear(100, 100, bias=False) for _ in range(3)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers, torch.nn.Linear(100, 1, bias=False)), **plan.ddp_options()
    )
    register(model, plan, Topology(((0, 1), (2, 3)), dist.get_rank(), shared_memory=shared_memory))
    model(torch.ones(1, 100)).sum().backward()
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        model(torch.ones(1, 100)).sum().backward()
    return {event.key for event in profiler.key_averages()}


IN_CHUNKS = Plan(
    (Rule("leader", max_bytes=1000), Rule("hierarchical", chunk_bytes=20_000)),
    segments=(400, 40_000),
)
ON_ITS_THREAD = Plan((Rule("leader", chunk_bytes=20_000),), fusion_threshold_bytes=150_000)
BY_THE_BACK_END = Plan.single("ring", fusion_threshold_bytes=50_000)


def check_names():
    """Buckets of one layer, 40,000 bytes, and the small last one; chunks of half a layer."""
    in_chunks = reduced(IN_CHUNKS)
    buckets = sorted(
        n for n in in_chunks if re.fullmatch(r"all-reduce bucket [^,]*,[^,]*,[^,]*", n)
    )
    sizes = ["400 bytes, leader", *["39.1 KiB, hierarchical"] * 3]
    assert [name.partition(", ")[2] for name in buckets] == sizes
    assert {f"chunk {chunk}, phase {phase}" for chunk in (1, 2) for phase in (1, 2)} <= in_chunks
    on_thread = reduced(ON_ITS_THREAD, shared_memory=False)
    assert any(re.fullmatch(r"all-reduce bucket \d, [\d.]+ KiB, leader", n) for n in on_thread)
    assert {"chunk 1, phase 1", "chunk 2, phase 1", "chunk 1, wait for phase 1"} <= on_thread
    by_the_back_end = reduced(BY_THE_BACK_END)
    plain = [name for name in by_the_back_end if name.startswith("all-reduce bucket")]
    assert len(plain) >= 2
    assert all(name.endswith(", ring") for name in plain)
    assert "gloo:all_reduce" in by_the_back_end


@pytest.mark.slow("runs four ranks")
def test_all_reduces_are_named_with_their_chunks_and_phases():
    run_ranks(4, check_names)
