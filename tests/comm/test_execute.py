"""Chunks are pipelined through the phases in an order that is the same on all ranks."""

from itertools import product
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from largebatch.comm import Rule, Topology, execute
from largebatch.comm.algorithms import Phased
from largebatch.comm.execute import _pipelined
from largebatch.comm.node_memory import LARGEST_BYTES


class Recorder(Phased):
    name, traffic = "recorder", None

    def __init__(self):
        self.events = []

    def phases(self, tensor, topology):
        chunk = int(tensor[0])
        for phase in "abc":
            self.events.append(f"start {phase}{chunk}")
            yield Waited(self.events, f"{phase}{chunk}")
        self.events.append(f"end {chunk}")


class Waited:
    def __init__(self, events, what):
        self.events, self.what = events, what

    def wait(self):
        self.events.append(f"wait {self.what}")


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_the_next_chunk_starts_a_phase_before_the_previous_one_is_waited_for(chunks):
    """Each phase of each chunk runs once, in the same order on all ranks, named for profilers."""
    recorder, tensor = Recorder(), torch.arange(chunks)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _pipelined(recorder, tensor.split(1), tensor.dtype, Topology.of(1, 1))
    named = {event.key for event in profiler.key_averages()}
    assert {f"chunk {chunks}, phase 2", f"chunk {chunks}, wait for phase 2"} <= named
    seen = recorder.events
    assert len(seen) == len(set(seen)) == 7 * chunks
    for chunk in range(chunks):
        mine = [event for event in seen if event.endswith(str(chunk))]
        steps = [f"{verb} {phase}{chunk}" for phase in "abc" for verb in ("start", "wait")]
        assert mine == [*steps, f"end {chunk}"]
    for phase, chunk in product("abc", range(chunks - 1)):
        start, following = (seen.index(f"start {phase}{c}") for c in (chunk, chunk + 1))
        assert start < following < seen.index(f"wait {phase}{chunk}")


@pytest.mark.parametrize(("ranks", "chunk_bytes"), [(6, None), (2, 2**20), (7, 2**26)])
def test_a_chunk_in_shared_memory_is_no_longer_than_its_limit(ranks, chunk_bytes):
    tensor = torch.empty(5 * 2**21 + 1)  # 40 MiB and a rest
    rule = Rule("leader", chunk_bytes=chunk_bytes)
    topology = Topology.of(ranks, ranks)
    with mock.patch.object(execute, "_node_memory", return_value=mock.sentinel.memory):
        chunks = execute._chunks(tensor, topology, rule, tensor.dtype)
    limit = min(chunk_bytes or LARGEST_BYTES, LARGEST_BYTES)
    sizes = [chunk.numel() for chunk in chunks]
    assert sum(sizes) == tensor.numel()
    assert all(size % ranks == 0 for size in sizes[:-1])
    assert limit - 4 * ranks < max(sizes) * 4 <= limit
