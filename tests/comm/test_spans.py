"""All-reduces are named for profilers, by bucket, size, algorithm, chunk and phase."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from largebatch.comm import Plan, Rule, Topology, register, start_spans, stop_spans
from largebatch.comm.spans import add_span, all_reduce_name, begin_span, ranged
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("size", "named"),
    [(25 * 2**20, "25.0 MiB"), (2**20, "1.0 MiB"), (2**20 - 1, "1024.0 KiB"), (12, "12 bytes")],
)
def test_a_name_has_bucket_size_and_algorithm(size, named):
    assert all_reduce_name(3, size, "hierarchical") == f"all-reduce bucket 3, {named}, hierarchical"


def test_nothing_is_kept_while_nothing_records():
    assert begin_span("a", "b") is None
    add_span("a", "b", 1, 2)
    assert stop_spans() == []
    assert isinstance(ranged("a"), nullcontext)
    with profile(activities=[ProfilerActivity.CPU]):
        assert not isinstance(ranged("a"), nullcontext)


def test_spans_that_end_while_they_are_recorded_are_returned_once():
    before = begin_span("before", "lane")
    start_spans()
    one, late = begin_span("one", "lane"), begin_span("late", "lane")
    add_span("two", "other", 5, 7)
    one.end()
    found = stop_spans()
    late.end()
    assert before is None
    assert [(span.name, span.lane) for span in found] == [("two", "other"), ("one", "lane")]
    assert found[1].start_ns <= found[1].end_ns
    assert stop_spans() == []


def reduced(plan, nodes, shared_memory):
    """Train two steps, of which the second is recorded; return names of ranges and spans."""
    torch.manual_seed(dist.get_rank())
    layers = [torch.nn.Linear(100, 100, bias=False) for _ in range(3)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers, torch.nn.Linear(100, 1, bias=False)), **plan.ddp_options()
    )
    register(model, plan, Topology(nodes, dist.get_rank(), shared_memory=shared_memory))
    model(torch.ones(1, 100)).sum().backward()
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        start_spans()
        model(torch.ones(1, 100)).sum().backward()
        spans = stop_spans()
    return {event.key for event in profiler.key_averages()}, spans


def by_rank(plan, nodes, shared_memory):
    return run_ranks(sum(map(len, nodes)), reduced, plan, nodes, shared_memory)


@pytest.mark.slow("runs four ranks")
def test_a_plan_of_two_algorithms_shows_both_with_chunks_and_phases():
    """Buckets of one layer, 40,000 bytes, and the small last one; chunks of half a layer."""
    plan = Plan(
        (Rule("leader", max_bytes=1000), Rule("hierarchical", chunk_bytes=20_000)),
        segments=(400, 40_000),
    )
    for ranges, spans in by_rank(plan, ((0, 1), (2, 3)), True):
        buckets = {s.name: s for s in spans if s.lane == "all-reduce"}
        assert [name.partition(", ")[2] for name in sorted(buckets)] == [
            "400 bytes, leader",
            *["39.1 KiB, hierarchical"] * 3,
        ]
        assert buckets.keys() <= ranges
        for name, bucket in buckets.items():
            phases = [s for s in spans if s.name.startswith(f"{name}, chunk")]
            count = 1 if "leader" in name else 2
            wanted = {f"{name}, chunk {c + 1} of {count}" for c in range(count)}
            assert {s.name.rpartition(", ")[0] for s in phases} == wanted
            assert wanted <= ranges
            for one in wanted:
                in_turn = [s for s in phases if s.name.startswith(f"{one}, ")]
                in_turn.sort(key=lambda span: span.name)
                assert [s.name.rpartition(", ")[2] for s in in_turn] == [
                    f"phase {number}" for number in (1, 2, 3)
                ]
                assert [s.lane for s in in_turn] == [
                    f"all-reduce, phase {number}" for number in (1, 2, 3)
                ]
                starts = [s.start_ns for s in in_turn]
                assert starts == sorted(starts)
                assert all(
                    bucket.start_ns <= s.start_ns <= s.end_ns <= bucket.end_ns for s in in_turn
                )


@pytest.mark.slow("runs four ranks")
def test_chunks_without_shared_memory_are_named_on_their_thread():
    plan = Plan((Rule("leader", chunk_bytes=20_000),), fusion_threshold_bytes=150_000)
    for ranges, spans in by_rank(plan, ((0, 1), (2, 3)), False):
        assert all(re.fullmatch(r"all-reduce bucket \d, [\d.]+ KiB, leader", s.name) for s in spans)
        assert {span.name for span in spans} <= ranges
        chunks = {name for name in ranges if name.startswith("chunk ")}
        assert {"chunk 1, phase 1", "chunk 2, phase 1", "chunk 1, wait for phase 1"} <= chunks


@pytest.mark.slow("runs two ranks")
def test_the_all_reduce_of_the_back_end_is_named():
    plan = Plan.single("ring", fusion_threshold_bytes=50_000)
    for ranges, spans in by_rank(plan, ((0, 1),), True):
        assert len(spans) >= 2
        assert all(span.name.endswith(", ring") for span in spans)
        assert {span.name for span in spans} <= ranges
        assert "gloo:all_reduce" in ranges
