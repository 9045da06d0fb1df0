"""Buckets go through one pipeline, whose order on each rank does not depend on when they come."""

import threading
import time
from dataclasses import replace
from random import Random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from largebatch.comm import Rule, Topology, all_reduce
from largebatch.comm import bucket_pipeline as module
from largebatch.comm.bucket_pipeline import BucketPipeline
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("runs up to six ranks")

RULES = (
    Rule("leader", chunk_bytes=20_000),
    Rule("leader", chunk_bytes=30_000, wire_dtype="fp16"),
    Rule("leader"),
    Rule("ring"),
    Rule("ring", wire_dtype="bf16"),
    Rule("parameter-server"),  # cannot be pipelined
    Rule("halving-doubling"),
)
EQUAL_NODES = (Rule("hierarchical", chunk_bytes=25_000), Rule("torus"))


def sums_in_any_timing(nodes, shared_memory):
    """Submit buckets with pauses that differ from rank to rank, and compare the sums."""
    rank = dist.get_rank()
    topology = Topology(nodes, rank, shared_memory=shared_memory)
    rules = RULES + (EQUAL_NODES if len({len(ranks) for ranks in nodes}) == 1 else ())
    pipeline, pauses = BucketPipeline(topology), Random(rank)
    order = Random(0)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        buckets, waiting = [], []
        for _ in range(25):
            # Integers whose sums are exact in half precision, in any order.
            bucket = torch.randint(-4, 5, (order.randint(1, 40_000),), generator=generator).float()
            expected = bucket.clone()
            dist.all_reduce(expected)
            buckets.append((bucket, expected, order.choice(rules)))
        for bucket, _, rule in buckets:
            if pauses.random() < 0.3:
                time.sleep(pauses.random() / 50)
            waiting.append(pipeline.submit(bucket, rule))
        for (bucket, expected, rule), summed in zip(buckets, waiting, strict=True):
            summed.result(timeout=60)
            assert torch.equal(bucket, expected), rule


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 1, 2),)], ids=str)
def test_sums_are_right_however_the_buckets_come(nodes, shared_memory):
    run_ranks(sum(map(len, nodes)), sums_in_any_timing, nodes, shared_memory)


def starts_and_ends_until_the_last_rank_joins():
    """Reduce two buckets, which the last rank holds back until the others have started both."""
    topology, events = Topology.of(4, 2, dist.get_rank()), []
    phases = module.independent_phases

    def recorded(tensor, *rest):
        def chunk(name, steps):
            events.append(f"start {name}")
            yield from steps
            events.append(f"end {name}")

        return [chunk(int(tensor[0]), steps) for steps in phases(tensor, *rest)]

    pipeline = BucketPipeline(topology)
    rule = Rule("leader", chunk_bytes=400_000)
    topology.groups.inter, topology.groups.memory  # noqa: B018  (every rank has to make them)
    buckets = [torch.full((200_000,), float(index)) for index in range(2)]
    is_last = topology.rank == 3
    with mock.patch.object(module, "independent_phases", recorded):
        if is_last:
            dist.barrier()
        waiting = [pipeline.submit(bucket, rule) for bucket in buckets]
        if not is_last:
            deadline = time.monotonic() + 60
            while "start 1" not in events and time.monotonic() < deadline:
                time.sleep(0.01)
            before = list(events)
            dist.barrier()
        for summed in waiting:
            summed.result(timeout=60)
    assert all((bucket == 4 * index).all() for index, bucket in enumerate(buckets))
    assert events[-4:].count("end 1") == 2
    return None if is_last else before


def test_a_bucket_starts_before_the_one_before_it_has_ended():
    *others, _ = run_ranks(4, starts_and_ends_until_the_last_rank_joins)
    for events in others:
        assert "start 1" in events
        assert "end 0" not in events


def failures():
    topology = Topology.of(2, 2, dist.get_rank())
    pipeline, good = BucketPipeline(topology), Rule("leader", chunk_bytes=1_000)

    def refuse():
        raise ValueError("not ready")

    pipeline.submit(torch.ones(5_000), good).result(timeout=60)
    order, begun = [], threading.Event()
    submitted = [
        pipeline.submit(torch.ones(50_000), good, begun.wait),
        pipeline.submit(torch.ones(5_000), good, refuse),
        pipeline.submit(torch.ones(5_000), good),
    ]
    for index, summed in enumerate(submitted):
        summed.add_done_callback(lambda _, index=index: order.append(index))
    begun.set()
    for summed in submitted[1:]:
        with pytest.raises(ValueError, match="not ready"):
            summed.result(timeout=60)
    assert order.index(1) < order.index(2)  # the one that failed comes before those behind it
    # Chunks of the first may have been in flight, in another phase on each rank.
    with pytest.raises(ValueError, match="not ready"):
        pipeline.submit(torch.ones(5_000), good).result(timeout=60)


def test_a_failure_ends_the_pipeline_and_reaches_its_own_future_first():
    run_ranks(2, failures)


def as_one_by_one():
    topology = Topology.of(4, 2, dist.get_rank())
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = torch.randn(100_000, generator=generator)
    rule = Rule("hierarchical", chunk_bytes=30_000, wire_dtype="bf16")
    alone, together = values.clone(), values.clone()
    for part in alone.split(17_000):
        all_reduce(part, topology, rule)
    pipeline = BucketPipeline(replace(topology))
    for summed in [pipeline.submit(part, rule) for part in together.split(17_000)]:
        summed.result(timeout=60)
    assert torch.equal(alone, together)


def test_the_pipeline_gives_the_bits_of_one_all_reduce_after_another():
    run_ranks(4, as_one_by_one)
