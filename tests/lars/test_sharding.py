"""Sharded parameters take the same step as whole ones: norms are those of the whole tensor."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from largebatch.lars import DIALECTS, LARS, split_parameters
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("runs on up to four ranks")


def network():
    torch.manual_seed(0)
    # 7 and 5 are not divisible by 2, which gives shards of different sizes and empty ones.
    return nn.Sequential(
        nn.Linear(6, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 5), nn.Linear(5, 1)
    )


def train(model, dialect, *, full):
    optimizer = LARS(split_parameters(model, 0.01), 0.5, dialect=dialect, implementation="auto")
    for step in range(4):
        torch.manual_seed(step + 1)
        x = torch.randn(8, 6)
        optimizer.param_groups[0]["lr"] = 0.5 / (step + 1)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [p.full_tensor() if full else p for p in model.parameters()]
    return [v.detach().clone() for v in values], optimizer


def sharded():
    for dialect in DIALECTS:
        sharded_in(dialect)


def sharded_in(dialect):
    whole, optimizer = train(network(), dialect, full=False)
    model = network()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    shards, sharded_optimizer = train(model, dialect, full=True)
    for a, b in zip(shards, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    ours, theirs = sharded_optimizer.trust_ratios(), optimizer.trust_ratios()
    assert ours == pytest.approx(theirs, rel=1e-5)
    state = sharded_optimizer.state[next(model.parameters())]["momentum_buffer"]
    assert isinstance(state, DTensor)


def test_fsdp2_matches_one_process():
    run_ranks(2, sharded)


def other_layout():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = LARS([("table", parameter)], 1.0)
    parameter.grad = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    with pytest.raises(TypeError, match="the gradient of table is sharded as"):
        optimizer.step()


def steps(model, optimizer, numbers, ranks=2):
    """Train; each rank sees its part of the batch."""
    for step in numbers:
        torch.manual_seed(step + 1)
        x = torch.randn(8, 6).chunk(ranks)[dist.get_rank() if ranks > 1 else 0]
        for group in optimizer.param_groups:
            group["lr"] = 0.5 / (step + 1)
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()


def whole_state():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = LARS([parameter], 1.0)
    saved = optimizer.state_dict()
    for buffer in (torch.ones(4, 4), distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])):
        saved["state"][0] = {"momentum_buffer": buffer}
        with pytest.raises(ValueError, match=r"momentum_buffer of parameter 0 is sharded as .* in"):
            optimizer.load_state_dict(saved)
        assert not optimizer.state


def fsdp1(use_orig_params):
    model = FullyShardedDataParallel(
        nn.Linear(4, 4), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    with pytest.raises(TypeError, match=r"group0.0 is flattened by FSDP1.*valid: FSDP2's .*fully_"):
        LARS(model.parameters(), 0.1)
    optimizer = LARS([nn.Parameter(torch.ones(2))], 0.1)
    with pytest.raises(TypeError, match=r"parameter group1.0 is flattened by FSDP1"):
        optimizer.add_param_group({"params": model.parameters()})
    assert len(optimizer.param_groups) == 1


def what_is_sharded_otherwise():
    other_layout()
    whole_state()
    for use_orig_params in (False, True):
        fsdp1(use_orig_params)


def test_what_is_sharded_otherwise_is_refused():
    run_ranks(2, what_is_sharded_otherwise)


def zero(dialect, one_matrix_decays):
    """Train under DDP with LARS and with ZeRO over LARS, with a break in the latter."""

    def no_decay(module, name, parameter):
        return parameter.dim() < 2 or (one_matrix_decays and name != "module.0.weight")

    def make(sharded):
        model = DistributedDataParallel(network())
        groups = split_parameters(model, 0.01, no_decay=no_decay, named=not sharded)
        if not sharded:
            return model, LARS(groups, 0.5, 0.8, dialect=dialect)
        return model, ZeroRedundancyOptimizer(groups, LARS, lr=0.5, momentum=0.8, dialect=dialect)

    plain, optimizer = make(sharded=False)
    steps(plain, optimizer, range(6))
    model, sharded = make(sharded=True)
    empty = [not group["params"] for group in sharded.optim.param_groups]
    steps(model, sharded, range(3))
    saved = [None]
    sharded.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saved = [copy.deepcopy(sharded.state_dict())]  # it has tensors of the optimizer
    dist.broadcast_object_list(saved)
    resumed, again = make(sharded=True)
    resumed.load_state_dict(model.state_dict())
    # A consolidated state dict is also one of LARS alone.
    alone, of_alone = make(sharded=False)
    alone.load_state_dict(model.state_dict())
    of_alone.load_state_dict(saved[0])
    again.load_state_dict(saved[0])
    for last in ((model, sharded), (resumed, again), (alone, of_alone)):
        steps(*last, range(3, 6))
        for a, b in zip(last[0].parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b)
    return any(empty), len(again.optim.state)


@pytest.mark.parametrize(
    ("dialect", "one_matrix_decays"), [("mlperf", False), ("mlperf-corrected", True)]
)
def test_zero_redundancy_optimizer_matches_lars_under_ddp(dialect, one_matrix_decays):
    """With one matrix that decays, one rank has no parameter of its group."""
    empty, held = zip(*run_ranks(2, zero, dialect, one_matrix_decays), strict=True)
    assert any(empty) == one_matrix_decays
    assert sum(held) == len(list(network().parameters()))
    assert all(held)
