"""Sharded parameters take the steps of whole ones, and ranks may share those of whole ones."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from largebatch.lars import Muon, split_parameters
from tests.ranks import run_ranks

SIZES = [6, 7, 3, 1, 5, 8]  # shards on two ranks are of different sizes, or empty on one


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [
        layer for inner, outer in pairwise(SIZES) for layer in (nn.Linear(inner, outer), nn.Tanh())
    ]
    return nn.Sequential(*layers, nn.LayerNorm(SIZES[-1])).to(dtype)


def groups(model, rule):
    """Return groups of which one matrix and the vectors are left to another rule."""

    def orthogonal(module, name, parameter):
        return parameter.dim() > 1 and "2.weight" not in name

    made = split_parameters(model, 0.01, orthogonal=orthogonal)
    return [group if group["orthogonal"] else {**group, "rule": rule} for group in made]


CASES = [
    ("sgd", {"adjust_lr_fn": "trust_ratio", "trust_coefficient": 0.1}),
    ("lars", {"norm_projection": True}),
    ("adamw", {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}),
]


def steps(model, optimizer, numbers, *, split):
    for step in numbers:
        torch.manual_seed(step + 1)
        x = torch.randn(8, SIZES[0])
        x = x.chunk(dist.get_world_size())[dist.get_rank()] if split else x
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).pow(3).mean().backward()
        optimizer.step()


def sharded_network(dtype=torch.float32):
    model = network(dtype)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return model


def fsdp2(rule, options, process_group):
    # In FP64: directions of small singular values amplify the rounding of gradients.
    whole, model = network(torch.float64), sharded_network(torch.float64)
    empty = [not p.to_local().numel() for p in model.parameters() if p.dim() > 1]
    assert any(empty) == (dist.get_rank() == 1)
    alone = Muon(groups(whole, rule), 0.05, 0.8, **options)
    ours = Muon(groups(model, rule), 0.05, 0.8, process_group=process_group, **options)
    steps(whole, alone, range(2), split=False)
    steps(model, ours, range(2), split=True)
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-8, atol=1e-8)
    assert ours.trust_ratios() == pytest.approx(alone.trust_ratios(), rel=1e-3)
    assert all(
        isinstance(value, DTensor)
        for state in ours.state.values()
        for name, value in state.items()
        if name != "step"
    )


def resumed(rule, full):
    """Train in bfloat16 with masters, save, resume in a new model, and compare with no break."""
    options = StateDictOptions(full_state_dict=full)

    def make():
        model = sharded_network(torch.bfloat16)
        return model, Muon(groups(model, rule), 0.05, norm_projection=True, master_weights=True)

    model, optimizer = make()
    steps(model, optimizer, range(2), split=True)
    weights = copy.deepcopy(get_model_state_dict(model, options=options))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    steps(model, optimizer, range(2, 4), split=True)
    again, other = make()
    set_model_state_dict(again, weights, options=options)
    set_optimizer_state_dict(again, other, saved, options=options)
    steps(again, other, range(2, 4), split=True)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
        theirs = other.state[b]
        for name, value in optimizer.state[a].items():
            same = (value, theirs[name])
            assert torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in same))
        assert theirs["master"].dtype == torch.float32


def on_two_ranks():
    for case in CASES:
        fsdp2(*case, process_group=None)
    fsdp2(*CASES[0], process_group=dist.group.WORLD)
    for full in (False, True):
        resumed("adamw", full)
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    with pytest.raises(TypeError, match=r"the gradient of group0.0 is sharded as"):
        Muon([parameter], 0.1).step()


@pytest.mark.slow("runs on two ranks")
def test_fsdp2_matches_one_process():
    """With shards of all sizes, beside other rules, and with state dicts of torch."""
    run_ranks(2, on_two_ranks)


def on_four_ranks():
    """Take a step on a 2 x 2 mesh, by hand and under FSDP2 with tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    made = [nn.Linear(6, 8, bias=False), nn.Linear(8, 7, bias=False)]
    weights = [layer.weight.detach().clone() for layer in made]
    gradients = [torch.randn_like(weight) for weight in weights]
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(nn.Sequential(*made), mesh["tensor"], plan)
    for layer in model:
        fully_shard(layer, mesh=mesh["data"])
    of_cases = [list(model.parameters())]
    for placements in ([Replicate(), Replicate()], [Replicate(), Shard(1)], [Shard(0), Shard(1)]):
        of_cases.append(
            [nn.Parameter(distribute_tensor(w.clone(), mesh, placements)) for w in weights]
        )
    whole = [nn.Parameter(weight) for weight in weights]
    for of in (whole, *of_cases):
        for parameter, gradient in zip(of, gradients, strict=True):
            parameter.grad = 4 * gradient
            if isinstance(parameter, DTensor):
                parameter.grad = distribute_tensor(
                    4 * gradient, parameter.device_mesh, parameter.placements
                )
        optimizer = Muon(of, 0.1, norm_projection=True, adjust_lr_fn="trust_ratio")
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.zeros(())
        optimizer.step()
        for parameter, expected in zip(of, whole, strict=True):
            found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            torch.testing.assert_close(found, expected)
    return dist.get_rank()


@pytest.mark.slow("runs on four ranks")
def test_every_placement_on_a_two_dimensional_mesh_matches_the_whole_tensor():
    assert run_ranks(4, on_four_ranks) == [0, 1, 2, 3]
