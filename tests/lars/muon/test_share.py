"""Ranks share the orthogonalisation of Muon: the assignment, the results and what they send."""

import copy
import math
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from largebatch.lars import Muon
from largebatch.lars.muon.share import plan_of
from tests.host_reads import NoHostReads
from tests.lars.muon.training import assert_equal, run, set_gradients, tensors
from tests.lars.problems import laid_out
from tests.ranks import run_ranks

# Several of a shape, convolutions, tall and wide matrices, and one that outweighs the others.
SHAPES = [(16, 32), (32, 16), (16, 32), (24, 16, 3, 3), (24, 16, 3, 3), (16, 24, 1, 1), (32, 48)]
DTYPES = [torch.float32, torch.bfloat16]
NUMBERS = sum(math.prod(shape) for shape in SHAPES)

shapes_of_matrices = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 64), st.integers(0, 64)).map(
        lambda s: (s[0], s[1], s[1] + s[2])
    ),
    max_size=12,
).map(tuple)


@given(shapes_of_matrices, st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_work_is_balanced_and_the_buffer_holds_each_tensor_in_the_part_of_its_owner(shapes, ranks):
    """The busiest rank has at most one tensor more than the mean (Graham)."""
    plan, loads, places = plan_of(shapes, ranks), [0] * ranks, []
    costs = [k * m * m * (n + 2 * m) for k, m, n in shapes]
    for owner, start, shape, cost in zip(plan.owners, plan.offsets, shapes, costs, strict=True):
        loads[owner] += cost
        end = start + math.prod(shape)
        assert plan.bounds[owner] <= start
        assert end <= plan.bounds[owner + 1]
        places.append((start, end))
    assert ranks * max(loads) <= sum(loads) + ranks * max(costs, default=0)
    places.sort()
    assert [start for start, _ in places] == [0, *(end for _, end in places)][: len(places)]
    assert plan.bounds[-1] == sum(map(math.prod, shapes))
    assert len(plan.bounds) == ranks + 1


def weights(dtype=torch.float32, layout="contiguous"):
    return [nn.Parameter(laid_out(t, layout)) for t in tensors(0, SHAPES, dtype)]


def trained(of, steps=1, **options):
    optimizer = Muon(of, 0.1, **options)
    run(optimizer, range(steps))
    return optimizer


#: The form of parameters, and options.
CASES = [
    ({}, {"adjust_lr_fn": "trust_ratio", "trust_coefficient": 0.1}),
    ({"layout": "channels last"}, {"norm_projection": True, "conv_mode": "batched"}),
    ({"layout": "channels last"}, {"ns_dtype": torch.bfloat16, "nesterov": False}),
    ({"dtype": torch.bfloat16}, {"master_weights": True, "maximize": True, "weight_decay": 0.1}),
]


def shared():
    """Bit for bit: the ranks' batches differ, which does not affect products of these shapes."""
    for form, options in CASES:
        together = trained(weights(**form), 2, process_group=dist.group.WORLD, **options)
        alone = trained(weights(**form), 2, **options)
        assert_equal(together, alone)
        assert together.trust_ratios() == alone.trust_ratios()
        by_trust_ratio = options.get("adjust_lr_fn") == "trust_ratio"
        assert len(together.trust_ratios()) == len(SHAPES) * by_trust_ratio


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.broadcasts, self.sent, self.received, self.comparisons = 0, 0, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name == "broadcast_":
            self.broadcasts += 1
            size = sum(t.nbytes for t in args[0])
            self.sent += size * (args[2] == dist.get_rank())
            self.received += size * (args[2] != dist.get_rank())
        elif function.namespace == "c10d":
            assert name == "allgather_", name
            assert sum(t.nbytes for t in args[1]) == 8
            self.comparisons += 1
        return function(*args, **(kwargs or {}))


def counted():
    found = []
    for dtype in DTYPES:
        optimizer = trained(weights(), ns_dtype=dtype, process_group=dist.group.WORLD)
        set_gradients(optimizer, 1)
        with Counted() as counter, NoHostReads(), mock.patch.object(torch.Tensor, "tolist", None):
            optimizer.step()
        found.append((counter.broadcasts, counter.sent, counter.received, counter.comparisons))
    return found


def other_gradients(seen):
    """One rank lacks the gradient of a parameter; ``seen``: what both then have was there before.

    ``seen`` counts the steps before: none, one with all gradients, and one without.
    """
    of = weights()
    optimizer = Muon(of, 0.1, process_group=dist.group.WORLD)
    for step in range(seen):
        set_gradients(optimizer, step)
        if step == 1:
            of[2].grad = None
        optimizer.step()
    before = [parameter.detach().clone() for parameter in of]
    set_gradients(optimizer, seen)
    rank = dist.get_rank()
    if rank == 1:
        of[2].grad = None
    message = f"ranks {1 - rank} have gradients of other parameters, .* its rank {rank}; valid"
    if seen > rank:  # the host does not read the comparison, which the device asserts
        message = "its ranks have gradients of different parameters, .* valid: the same on all"
    for _ in range(2):
        with pytest.raises(RuntimeError if seen > rank else ValueError, match=message):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(of, before, strict=True))
    set_gradients(optimizer, 9)  # and goes on with gradients that agree
    optimizer.step()


def copied():
    """A copy has no process group, which can be set again."""
    optimizer = trained(weights(), process_group=dist.group.WORLD)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.process_group is None
        other.process_group = dist.group.WORLD
        assert other.process_group is optimizer.process_group
        run(other, [1])
    only_first = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="process_group has no rank 1; valid: a group with"):
            optimizer.process_group = only_first
    else:
        trained(weights(), process_group=only_first)
    with pytest.raises(ValueError, match="process_group is not an option of a parameter group"):
        Muon([{"params": weights(), "process_group": dist.group.WORLD}], 0.1)


def on_a_rank():
    for seen in range(3):
        other_gradients(seen)
    copied()
    shared()
    return counted()


@pytest.mark.slow("runs on two ranks")
def test_ranks_take_the_steps_of_one_send_each_direction_once_and_wait_for_no_value():
    for dtype, *of_ranks in zip(DTYPES, *run_ranks(2, on_a_rank), strict=True):
        assert sum(sent for _, sent, _, _ in of_ranks) == NUMBERS * dtype.itemsize
        for broadcasts, sent, received, comparisons in of_ranks:
            assert broadcasts == 2
            assert sent + received == NUMBERS * dtype.itemsize
            assert min(sent, received) > 0
            assert comparisons == 1
