"""Gradients are fused by the paper's rule, and DDP's buckets are the plan's segments."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import Plan, Rule, fused_bytes


def test_small_tensors_are_pooled_and_large_ones_are_not():
    sizes = [10, 20, 500, 30, 50, 10, 100, 40]
    assert fused_bytes(sizes, 100) == (30, 500, 90, 100, 40)
    assert fused_bytes([60, 40, 10], 100) == (100, 10)  # full at the threshold itself


@given(st.lists(st.integers(1, 200), max_size=30), st.integers(1, 300))
def test_every_tensor_is_in_exactly_one_segment(sizes, threshold):
    left = sizes.copy()
    for segment in fused_bytes(sizes, threshold):
        tensors = [left.pop(0)]
        while sum(tensors) < segment:
            tensors.append(left.pop(0))
        assert sum(tensors) == segment
        assert len(tensors) == 1 or max(tensors) < threshold
        assert sum(tensors[:-1]) < threshold  # a full segment takes no further tensor
        if segment < threshold:  # it is closed by a large tensor, or the end
            assert not left or left[0] >= threshold
    assert not left


class Sum(nn.Module):
    """Independent layers, whose gradients are produced last to first."""

    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in sizes))

    def forward(self, x):
        return x + sum(layer(torch.ones(layer.in_features)).sum() for layer in self.layers)


@pytest.fixture
def buckets():
    """Return a function that gives the elements of DDP's buckets in the order of reduction."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def of(plan, sizes):
        seen, ddp = [], DistributedDataParallel(Sum(sizes), **plan.ddp_options())

        def hook(_, bucket):
            seen.append(bucket.buffer().numel())
            done = Future()
            done.set_result(bucket.buffer())
            return done

        ddp.register_comm_hook(None, hook)
        for _ in range(3):  # buckets are rebuilt after the first
            seen.clear()
            ddp(torch.zeros(())).backward()
        return seen

    yield of
    dist.destroy_process_group()


def test_ddp_has_the_buckets_of_the_plan(buckets):
    small, large = [1000, 2000, 3000, 4000, 5000, 600], [200_000, 300_000, 100_000]
    bytes_ = [4 * size for size in small]
    two = Plan((Rule("leader"),), segments=(sum(bytes_[2:]), sum(bytes_[:2])))
    paper = Plan((Rule("ring"),), segments=fused_bytes(bytes_[::-1], 4 * 2500))
    assert Plan.single().ddp_options() == {}  # DDP's own first bucket has 1 MiB
    assert buckets(two, small) == [12600, 3000]
    assert buckets(paper, small) == [600, 5000, 4000, 3000, 3000]
    assert buckets(Plan.single(), large) == [400_000, 200_000]
    assert buckets(Plan.single(fusion_threshold_bytes=26 * 2**20), large) == [600_000]
