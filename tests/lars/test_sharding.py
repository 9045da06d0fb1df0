"""Sharded parameters take the same step as whole ones: norms are those of the whole tensor."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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


def sharded(dialect):
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
    return True


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_fsdp2_matches_one_process(dialect):
    assert run_ranks(2, sharded, dialect) == [True, True]


def in_two_dimensions():
    """Train on a 2 x 2 mesh, replicated or sharded over each of its dimensions."""
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    weight, gradient = torch.randn(6, 4), torch.randn(6, 4)
    results = []
    for placements in ([Replicate(), Replicate()], [Replicate(), Shard(1)], [Shard(0), Shard(1)]):
        parameter = nn.Parameter(distribute_tensor(weight.clone(), mesh, placements))
        parameter.grad = distribute_tensor(gradient, mesh, placements)
        optimizer = LARS([parameter], 1.0, master_weights=True)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.zeros(())
        optimizer.step()
        results.append(parameter.full_tensor().detach())
    whole = nn.Parameter(weight.clone())
    whole.grad = gradient / 4
    LARS([whole], 1.0).step()
    for result in results:
        torch.testing.assert_close(result, whole.detach())
    return dist.get_rank()


def test_every_placement_on_a_two_dimensional_mesh_matches_the_whole_tensor():
    assert run_ranks(4, in_two_dimensions) == [0, 1, 2, 3]


def other_layout():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = LARS([("table", parameter)], 1.0)
    parameter.grad = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    with pytest.raises(TypeError, match="the gradient of table is sharded as"):
        optimizer.step()
    return True


def test_a_gradient_sharded_unlike_its_parameter_is_refused():
    assert run_ranks(2, other_layout) == [True, True]
