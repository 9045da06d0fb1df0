"""Gradients are fused by the paper's rule, and DDP's buckets are the plan's segments."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import Plan, Rule, Topology, fused_bytes, hook, register
from tests.ranks import run_ranks


def test_small_tensors_are_pooled_and_large_ones_are_not():
    sizes = [10, 20, 500, 30, 50, 10, 100, 40]
    assert fused_bytes(sizes, 100) == (30, 500, 90, 100, 40)
    assert fused_bytes([60, 40, 10], 100) == (100, 10)  # full at the threshold itself
    assert fused_bytes([], 100) == ()


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


def buckets(plan, sizes):
    """Elements of the buckets in the third backward, in the order in which they are reduced."""
    model = nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in sizes))

    class Sum(nn.Module):  # independent layers, whose gradients are produced last to first
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(torch.ones(layer.in_features)).sum()
            return x

    ddp = DistributedDataParallel(Sum(), **plan.ddp_options())
    register(ddp, plan, Topology.of(2, 1, dist.get_rank()))
    seen = []
    reduce = hook.PlanState.reduce

    def seen_by(state, bucket):
        seen.append(bucket.buffer().numel())
        return reduce(state, bucket)

    with mock.patch.object(hook.PlanState, "reduce", seen_by):
        for _ in range(3):
            seen.clear()
            ddp(torch.zeros(())).backward()
    return seen


def buckets_of_each(cases):
    return [buckets(*case) for case in cases]


@pytest.mark.slow("starts ranks")
def test_ddp_has_the_buckets_of_the_plan():
    small, large = [1000, 2000, 3000, 4000, 5000, 600], [200_000, 300_000, 100_000]
    bytes_ = [4 * size for size in small]
    two = Plan((Rule("leader"),), segments=(sum(bytes_[2:]), sum(bytes_[:2])))
    paper = Plan((Rule("ring"),), segments=fused_bytes(bytes_[::-1], 4 * 2500))
    default, larger = Plan.single(), Plan.single(fusion_threshold_bytes=26 * 2**20)
    assert default.ddp_options() == {}  # DDP's own first bucket has 1 MiB
    found = run_ranks(
        2, buckets_of_each, [(two, small), (paper, small), (default, large), (larger, large)]
    )
    expected = [[12600, 3000], [600, 5000, 4000, 3000, 3000], [400_000, 200_000], [600_000]]
    assert found == [expected] * 2
