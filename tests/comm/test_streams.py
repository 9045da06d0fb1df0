"""The all-reduce and the hook are right for every order in which CUDA streams may run.

The code runs on a model of streams, allocators and NCCL (tests/streams.py, tests/comm/nccl.py).
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from largebatch.comm import ALGORITHMS, Plan, PlanState, Rule, all_reduce, execute
from largebatch.comm.fsdp2 import _average_shard
from tests.comm.nccl import Nccl
from tests.streams import Machine, Stream

TWO_BY_TWO, ONE_NODE, TWO_NODES = ((0, 1), (2, 3)), ((0, 1),), ((0,), (1,))
UNEQUAL = ((0, 1), (2,))
# Fewer chunks than there are phases, as many, one more, and many.
CHUNKED = [("torus", 2), ("leader", 4), ("hierarchical", 5), ("torus", 8)]
CASES = [(name, None) for name in ALGORITHMS] + CHUNKED

schedules = st.integers(0, 2**32 - 1)
GENERATE = [Phase.explicit, Phase.generate]  # no schedule is simpler than another
wires = st.sampled_from([None, "fp16", "bf16"])


def layouts(name):
    return st.sampled_from(
        [TWO_BY_TWO, ONE_NODE, TWO_NODES] + [UNEQUAL] * (name not in ("hierarchical", "torus"))
    )


def values(rank, message, length):
    """Whole numbers whose sums and means over two or four ranks are exact in BF16."""
    generator = torch.Generator().manual_seed(1000 * message + rank)
    return 12 * torch.randint(-3, 4, (length,), generator=generator).float()


def total(job, message, length):
    return sum(values(rank, message, length) for rank in job.world)


def rule_of(name, wire, chunks, length, ranks, sums=None):
    if chunks is None:
        return Rule(name, wire_dtype=wire, sum_dtype=sums)
    elements = -(-length // chunks // ranks) * ranks
    chunk_bytes = elements * (2 if wire else 4)
    return Rule(name, wire_dtype=wire, chunk_bytes=chunk_bytes, sum_dtype=sums)


def sum_dtypes(name):
    return st.sampled_from([None, "fp32"]) if name in ("hierarchical", "torus") else st.none()


def wrong(seed, nodes, program):
    """Run a program that yields (message, expected, result); return the messages that differ."""
    results = []
    with Machine(seed) as machine:
        job = Nccl(machine, nodes)
        job.on_every_rank(lambda topology: results.extend(program(job, topology)))
        machine.synchronize()
    return [message for message, expected, got in results if not torch.equal(got.raw, expected)]


@settings(max_examples=5, phases=GENERATE)
@given(schedules, wires)
def test_sums_of_two_callers_on_streams_of_their_own_are_right(seed, wire):
    """The lanes are shared, so that the second caller is given memory that the first has used."""
    rule, length = rule_of("hierarchical", wire, 3, 97, 2), 97

    def program(job, topology):
        callers = torch.cuda.current_stream(), Stream()
        for message in range(4):
            with torch.cuda.stream(callers[message % 2]):
                tensor = values(topology.rank, message, length).to("cuda:0")
                all_reduce(tensor, topology, rule)
                yield message, total(job, message, length), tensor.clone()
                tensor.zero_()

    assert not wrong(seed, ONE_NODE, program)


def bucket_of(buffer, index):
    return SimpleNamespace(buffer=lambda: buffer, index=lambda: index, parameters=list)


def gradients_of_buckets(rule, lengths):
    """Return a program that averages buckets by the hook as DDP does.

    A bucket's memory belongs to the compute stream, which goes on with backward after each call
    of the hook, and waits for all futures at its end.
    """

    def program(job, topology):
        reducer = PlanState(Plan((rule,)), topology)
        buckets = [torch.zeros(length).to("cuda:0") for length in lengths]
        for step in range(2):
            futures = []
            for index, bucket in enumerate(buckets):
                message = len(buckets) * step + index
                bucket.copy_(values(topology.rank, message, lengths[index]).to("cuda:0"))
                futures.append(reducer.reduce(bucket_of(bucket, index)))
                values(9, message, lengths[index]).to("cuda:0").mul_(2)  # of the next layer
            for future in futures:
                future.wait()
            for index, bucket in enumerate(buckets):
                message = len(buckets) * step + index
                mean = total(job, message, lengths[index]) / len(job.world)
                yield message, mean, bucket * 1

    return program


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_gradients_do_not_depend_on_the_order_of_streams(name, chunks):
    @settings(max_examples=5, phases=GENERATE)
    @given(schedules, layouts(name), wires, st.integers(0, 1), sum_dtypes(name))
    def check(seed, nodes, wire, surplus, sums):
        ranks = sum(map(len, nodes))
        length = 48 * ranks + surplus  # a surplus needs padding
        rule = rule_of(name, wire, chunks, length, ranks, sums)
        assert not wrong(seed, nodes, gradients_of_buckets(rule, [length, 31, length]))

    check()


@pytest.mark.parametrize("wait", ["end", "join"])
def test_a_wait_that_is_missing_shows_in_some_order_of_streams(monkeypatch, wait):
    """So the model has what the tests above rely on: streams that run ahead, and memory reused."""
    monkeypatch.setattr(execute._Lanes, wait, lambda *_: None)
    program = gradients_of_buckets(rule_of("hierarchical", "fp16", 8, 192, 4), [192, 31, 192])
    assert any(wrong(seed, TWO_BY_TWO, program) for seed in range(40))


@settings(max_examples=10, phases=GENERATE)
@given(schedules, wires)
def test_shards_of_fsdp2_do_not_depend_on_the_order_of_streams(seed, wire):
    """FSDP2 casts each shard and frees it.

    A shard's memory belongs to the stream of reduce-scatters, which goes on with the next one.
    """
    plan = Plan.single("hierarchical", wire_dtype=wire)

    def program(job, topology):
        scatters, reduces, casts = Stream(), Stream(), []
        for message in range(4):
            with torch.cuda.stream(scatters):
                shard = values(topology.rank, message, 40).to("cuda:0")
            reduces.wait_stream(scatters)
            with torch.cuda.stream(reduces):
                _average_shard(plan, topology, shard)
                casts.append(shard.clone())
            del shard
        torch.cuda.current_stream().wait_stream(reduces)
        for message, cast in enumerate(casts):
            yield message, total(job, message, 40) / len(job.world), cast * 1

    assert not wrong(seed, TWO_BY_TWO, program)


@pytest.mark.parametrize("wire", [None, "fp16"])
def test_backward_goes_on_while_a_ring_waits_for_the_other_rank(wire):
    """Also where a plan is nothing but the back end's own all-reduce."""
    with Machine(0) as machine:
        backward = []

        def program(topology):
            if topology.rank == 0:  # rank 1 does not come
                state = PlanState(Plan.single("ring", wire_dtype=wire), topology)
                state.reduce(bucket_of(torch.ones(4).to("cuda:0"), 0))
                machine.enqueue(lambda: backward.append("next layer"))

        Nccl(machine, ONE_NODE).on_every_rank(program)
        while machine._step():
            pass
        assert backward
        assert any(stream.queue for stream in machine.streams)  # the all-reduce still waits
