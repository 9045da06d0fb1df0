"""Under FSDP2, a plan averages gradients between the copies of a model, as DDP's hook does."""

from contextlib import nullcontext
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import (
    ALGORITHMS,
    CollectiveError,
    Plan,
    PlanError,
    PlanState,
    Topology,
    plan_hook,
    register,
    register_fsdp2,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("trains on four ranks")
PLAN = Plan.single("hierarchical")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def mesh_of(ranks_per_copy):
    shape = dist.get_world_size() // ranks_per_copy, ranks_per_copy
    return init_device_mesh("cpu", shape, mesh_dim_names=("between", "within"))["within"]


def shard(model, mesh, **options):
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(tensors):
    return [getattr(t, "full_tensor", lambda t=t: t)().detach().clone() for t in tensors]


def batch(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(model, steps=3, micro_batches=1, unsynced=lambda last: nullcontext()):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        for part in range(micro_batches):
            with unsynced(part == micro_batches - 1):
                images = batch(step * micro_batches + part, dist.get_rank())
                model(images).square().mean().backward()
        seen += whole(p.grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return seen + whole(model.parameters())


def largest_difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def gradients_and_weights_are_those_of_ddp_with_the_plan():
    ranks = dist.get_world_size()
    topology = Topology.of(ranks, 2, dist.get_rank())
    ddp, composable = DistributedDataParallel(network()), replicate_by_ddp(network())
    register(ddp, PLAN, topology)
    composable.register_comm_hook(PlanState(PLAN, topology), plan_hook)  # as the guide says
    assert largest_difference(train(ddp), train(composable)) == 0
    found = {}
    for name, per_copy in ON_FOUR:
        ddp, model = DistributedDataParallel(network()), shard(network(), mesh_of(per_copy))
        register(ddp, Plan.single(name), topology)
        register_fsdp2(model, Plan.single(name), topology)
        found[name, per_copy] = largest_difference(train(ddp), train(model))
    assert max(found.values()) < 1e-7, found
    # (a + b) + (c + d) in both, divided by powers of two
    same = {name for (name, _), difference in found.items() if not difference}
    assert same >= {"hierarchical", "leader", "torus", "halving-doubling"}
    assert found["hierarchical", 1] == found["hierarchical", 2] == 0


# A copy is on one rank, or on a node.
ON_FOUR = [*product(ALGORITHMS, [1]), ("hierarchical", 2), ("leader", 2)]
# Names, and the largest relative error of a rounding.
HALVES = {torch.float16: ("fp16", 2**-11), torch.bfloat16: ("bf16", 2**-8)}


def half_precision_errs_by_its_roundings():
    """On the wire of the plan, and where FSDP2 itself reduces in it, dividing in two parts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    exact = network().double()
    sum(exact(batch(0, r).double()).square().mean() / ranks for r in range(ranks)).backward()
    expected = [p.grad for p in exact.parameters()]
    largest = max(gradient.abs().max().item() for gradient in expected)
    for dtype, per_copy, by_plan in product(HALVES, (1, 2), (True, False)):
        policy = MixedPrecisionPolicy(reduce_dtype=None if by_plan else dtype)
        model = shard(network(), mesh_of(per_copy), mp_policy=policy)
        plan = Plan.single("hierarchical", wire_dtype=HALVES[dtype][0] if by_plan else None)
        register_fsdp2(model, plan, Topology.of(ranks, 2, rank))
        model(batch(0, rank)).square().mean().backward()
        got = whole(p.grad.double() for p in model.parameters())
        error = largest_difference(got, expected) / largest
        assert 0 < error < 8 * HALVES[dtype][1], (dtype, per_copy, by_plan)


def gradients_accumulate_as_under_ddp():
    topology = Topology.of(dist.get_world_size(), 2, dist.get_rank())
    model, ddp = shard(network(), mesh_of(2)), DistributedDataParallel(network())
    register(ddp, PLAN, topology)
    register_fsdp2(model, PLAN, topology)

    def unsynced(last):
        model.set_requires_gradient_sync(last)
        return nullcontext()

    theirs = train(ddp, 2, 3, lambda last: nullcontext() if last else ddp.no_sync())
    assert largest_difference(train(model, 2, 3, unsynced), theirs) < 1e-7


def models_whose_gradients_a_hook_cannot_average_are_refused():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    two_nodes, one_node = Topology.of(4, 2, rank), Topology.of(4, 4, rank)
    parts = [dist.new_group(part) for part in ([0], [1, 2, 3])]
    uneven = shard(network(), DeviceMesh.from_group(parts[rank > 0], "cpu"))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    one_copy, ddp = shard(network(), init_device_mesh("cpu", (ranks,))), network()
    no_mesh = r"model: \w+ is not sharded by FSDP2 over one 1-d mesh; valid: fully_shard"
    copies = "mesh: copies of the model on {} ranks; valid: one copy per node"
    for model, message in (
        *((model, no_mesh) for model in (network(), replicate(network()))),
        *((model, no_mesh) for model in (DistributedDataParallel(ddp), shard(network(), hybrid))),
        (one_copy, copies.format("4")),
        (uneven, copies.format("1, 3")),
    ):
        with pytest.raises(PlanError, match=message):
            register_fsdp2(model, PLAN, two_nodes)
    register_fsdp2(one_copy, PLAN, one_node)  # nothing to do, and no error
    assert largest_difference(train(one_copy), train(DistributedDataParallel(ddp))) < 1e-7


def an_all_reduce_that_fails_is_named():
    model = shard(network(), mesh_of(1))
    register_fsdp2(model, PLAN, Topology.of(4, 2, dist.get_rank()))
    with (
        mock.patch("largebatch.comm.fsdp2.average", side_effect=RuntimeError("cable")),
        pytest.raises(CollectiveError) as error,
    ):
        train(model)
    line = f"rank {dist.get_rank()}: hierarchical all-reduce of 72 bytes failed: cable"
    assert str(error.value) == line


def on_four_ranks():
    gradients_and_weights_are_those_of_ddp_with_the_plan()
    gradients_accumulate_as_under_ddp()
    models_whose_gradients_a_hook_cannot_average_are_refused()
    half_precision_errs_by_its_roundings()
    an_all_reduce_that_fails_is_named()


def test_gradients_are_averaged_as_under_ddp_and_what_cannot_be_is_refused():
    run_ranks(4, on_four_ranks)
