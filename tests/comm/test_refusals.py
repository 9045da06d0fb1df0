"""Models and uses that a plan cannot serve are refused in one line that says what to use."""

import copy
import io
import pickle
from unittest import mock

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import (
    Plan,
    PlanError,
    PlanState,
    Rule,
    Topology,
    TopologyError,
    plan_hook,
    register,
)
from tests.ranks import run_ranks

PLAN = Plan.single("hierarchical")


def layer():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def train(model):
    model(torch.ones(2, 8)).sum().backward()


def torchs_way(model, topology=None):
    model.register_comm_hook(PlanState(PLAN, topology), plan_hook)


def refusal(function, *args):
    with pytest.raises((PlanError, TopologyError)) as error:
        function(*args)
    (line,) = str(error.value).splitlines()
    assert "; valid: " in line
    return line


def refusals_of_models():
    cpu = torch.device("cpu")
    whole = FullyShardedDataParallel(
        layer(), device_id=cpu, sharding_strategy=ShardingStrategy.NO_SHARD
    )
    torchs_way(whole)
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    part = DistributedDataParallel(layer(), process_group=own)
    unregistered = DistributedDataParallel(layer(), process_group=own)
    torchs_way(part)
    with mock.patch.object(torch._dynamo.config, "optimize_ddp", "python_reducer"):
        python = DistributedDataParallel(layer())
        torchs_way(python)
        raw_python = refusal(train, python)
        python_reducer = refusal(register, DistributedDataParallel(layer()), PLAN)
    layout = Topology.of(4, 2)
    no_buckets = "has no buckets that a plan could reduce; valid: Distributed"
    no_python = "optimize_ddp: python_reducer reduces each gradient on its own, so there"
    one_rank = "process_group: DistributedDataParallel has 1 ranks, and the topology 2"
    sharded = FullyShardedDataParallel(layer(), device_id=cpu)
    other_ranks = refusal(register, DistributedDataParallel(layer()), PLAN, layout)
    for line, expected in (
        (refusal(register, layer(), PLAN), f"model: Linear {no_buckets}"),
        (refusal(register, sharded, PLAN), f"model: FullyShardedDataParallel {no_buckets}"),
        (refusal(train, whole), f"model: FSDP1 {no_buckets}"),
        (python_reducer, no_python),
        (raw_python, no_python),
        (refusal(register, unregistered, PLAN), one_rank),
        (refusal(train, part), one_rank),
        (other_ranks, "topology: 4 ranks, but the process group has 2; valid: Topology.from"),
    ):
        assert line.startswith(expected), line


def uneven(model, batches=2, **options):
    """Train on one batch more on rank 1 than on rank 0; return the last gradient."""
    with model.join(**options):
        for _ in range(batches + dist.get_rank()):
            model.zero_grad()
            train(model)
    gradient = model.module.weight.grad
    return torch.zeros(8, 8) if gradient is None else gradient.clone()


def gradients_in_join():
    topology = Topology.from_environment(1)
    expected = uneven(DistributedDataParallel(layer()))
    for way in (lambda model: register(model, PLAN, topology), lambda m: torchs_way(m, topology)):
        model, refused = (DistributedDataParallel(layer()) for _ in range(2))
        way(model)
        way(refused)
        torch.testing.assert_close(uneven(model), expected)
        # Its last gradient would be half of plain DDP's.
        line = refusal(lambda m=refused: uneven(m, divide_by_initial_world_size=False))
        assert line.startswith("divide_by_initial_world_size: False in join, but a plan")
    idle = DistributedDataParallel(layer())  # connects on rank 0 without a batch of its own
    torchs_way(idle)
    torch.testing.assert_close(uneven(idle, 0), expected if dist.get_rank() else 0 * expected)


def copies_train():
    """Pickled and copied states serve models of their own, wherever the first was made."""
    state = PlanState(PLAN, Topology.of(2, 1))  # made as rank 0
    unconnected = pickle.dumps(state)
    model = DistributedDataParallel(layer())
    model.register_comm_hook(state, plan_hook)
    train(model)
    assert state.topology == Topology.of(2, 1, dist.get_rank())
    for other in (pickle.loads(unconnected), pickle.loads(pickle.dumps(state)), copy.copy(state)):
        assert other.plan == PLAN
        assert other.topology == Topology.of(2, 1)
        second = DistributedDataParallel(layer())
        second.register_comm_hook(other, plan_hook)
        train(second)
        assert torch.equal(second.module.weight.grad, model.module.weight.grad)
    torch.save(model, io.BytesIO())
    compiled = torch.compile(DistributedDataParallel(layer()), backend="eager")
    register(compiled, PLAN)
    assert [hook for hook, _ in compiled._orig_mod._comm_hooks] == [plan_hook]


def two_models_share_a_topology(topology):
    """Two models in one backward: each reduces on a thread of its own, in groups of its own."""
    plan = Plan((Rule("hierarchical", chunk_bytes=64),))
    models = [DistributedDataParallel(layer(), **plan.ddp_options()) for _ in range(2)]
    plain = [DistributedDataParallel(layer()) for _ in range(2)]
    for model in models:
        register(model, plan, topology)
    x = torch.full((2, 8), 1.0 + dist.get_rank())
    for _ in range(8):
        for one, other in (models, plain):
            one.zero_grad()
            other.zero_grad()
            (one(x).square().sum() + other(2 * x).square().sum()).backward()
        for model, expected in zip(models, plain, strict=True):
            torch.testing.assert_close(model.module.weight.grad, expected.module.weight.grad)


def two_models():
    unequal = Topology(((0, 1, 2), (3,)))
    line = refusal(register, DistributedDataParallel(layer()), PLAN, unequal)
    assert line.startswith("algorithm: nodes have 3, 1 ranks")
    register(DistributedDataParallel(layer()), Plan.single("leader"), unequal)
    two_models_share_a_topology(Topology.from_environment(2))
    two_models_share_a_topology(Topology.of(4, 2))  # of rank 0, on every rank


@pytest.mark.slow("starts ranks")
def test_two_models_may_be_given_one_topology_which_their_plan_supports():
    run_ranks(4, two_models)


def on_two_ranks():
    copies_train()
    refusals_of_models()
    gradients_in_join()


@pytest.mark.slow("starts ranks")
def test_what_a_plan_cannot_serve_is_refused_and_states_can_be_pickled_and_copied():
    run_ranks(2, on_two_ranks)


def test_a_state_is_made_before_the_process_group_and_connected_after():
    state = PlanState(PLAN)
    assert state.topology is None
    with pytest.raises(TopologyError, match="no process group yet; valid: connect after init_pro"):
        state.connect()
