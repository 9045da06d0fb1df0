"""Sharded parameters take the steps of whole ones, by norms and matrices of whole tensors."""

import copy
from functools import partial
from itertools import chain, cycle, pairwise

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
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from largebatch.lars import DENOMINATORS, DIALECTS, LARS, Muon, split_parameters
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("runs on up to four ranks")

SIZES = [6, 7, 3, 1, 5, 8]  # shards on two ranks are of different sizes, or empty on one


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(*sizes), nn.Tanh()) for sizes in pairwise(SIZES)]
    return nn.Sequential(*chain(*layers), nn.LayerNorm(SIZES[-1])).to(dtype)


def sharded_network(dtype):
    model = network(dtype)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return model


def steps(model, optimizer, numbers, *, split=True):
    """Train at a changing rate; each rank sees its part of the batch, if it is split."""
    for step in numbers:
        torch.manual_seed(step + 1)
        x = torch.randn(8, SIZES[0], dtype=next(model.parameters()).dtype)
        x = x.chunk(dist.get_world_size())[dist.get_rank()] if split else x
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (step + 1)
        optimizer.zero_grad()
        model(x).pow(3).mean().backward()
        optimizer.step()


def lars(model, **options):
    return LARS(split_parameters(model, 0.01), 0.05, trust_coefficient=0.1, **options)


def muon(model, rule, **options):
    """Leave one matrix and the vectors to another rule."""

    def orthogonal(module, name, parameter):
        return parameter.dim() > 1 and "2.weight" not in name

    groups = split_parameters(model, 0.01, orthogonal=orthogonal)
    return Muon(groups, 0.05, 0.8, others={"rule": rule}, **options)


CASES = [
    *(
        partial(lars, dialect=dialect, denominator=denominator, nesterov=nesterov)
        for dialect, denominator, nesterov in zip(
            DIALECTS, cycle(DENOMINATORS), cycle((False, True, True))
        )
    ),
    partial(muon, rule="sgd", adjust_lr_fn="trust_ratio", trust_coefficient=0.1),
    partial(muon, rule="lars", norm_projection=True),
    partial(muon, rule="adamw", adjust_lr_fn="match_rms_adamw", nesterov=False),
]


def fsdp2(make, **options):
    # In FP64: directions of small singular values amplify the rounding of gradients.
    whole, model = network(torch.float64), sharded_network(torch.float64)
    empty = [not p.to_local().numel() for p in model.parameters() if p.dim() > 1]
    assert any(empty) == (dist.get_rank() == 1)
    alone, ours = make(whole), make(model, **options)
    steps(whole, alone, range(3), split=False)
    steps(model, ours, range(3))
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-8, atol=1e-8)
    assert ours.trust_ratios() == pytest.approx(alone.trust_ratios(), rel=1e-3)
    values = [v for state in ours.state.values() for name, v in state.items() if name != "step"]
    assert all(isinstance(value, DTensor) for value in values)


def resumed(full):
    options = StateDictOptions(full_state_dict=full)

    def made():
        model = sharded_network(torch.bfloat16)
        return model, muon(model, "adamw", norm_projection=True, master_weights=True)

    model, optimizer = made()
    steps(model, optimizer, range(2))
    weights = copy.deepcopy(get_model_state_dict(model, options=options))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    steps(model, optimizer, range(2, 4))
    again, other = made()
    set_model_state_dict(again, weights, options=options)
    set_optimizer_state_dict(again, other, saved, options=options)
    steps(again, other, range(2, 4))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
        theirs = other.state[b]
        for name, value in optimizer.state[a].items():
            same = (value, theirs[name])
            assert torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in same))
        assert theirs["master"].dtype == torch.float32


def other_layouts():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    for kind in (LARS, Muon):
        optimizer = kind([("table", parameter)], 1.0)
        parameter.grad = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
        with pytest.raises(TypeError, match="the gradient of table is sharded as"):
            optimizer.step()
        saved = optimizer.state_dict()
        for buffer in (torch.ones(4, 4), distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])):
            saved["state"][0] = {"momentum_buffer": buffer}
            with pytest.raises(ValueError, match="momentum_buffer of parameter 0 is sharded"):
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


def on_two_ranks():
    for make in CASES:
        fsdp2(make)
    fsdp2(CASES[-3], process_group=dist.group.WORLD)
    for full in (False, True):
        resumed(full)
        fsdp1(use_orig_params=full)
    other_layouts()
    return zero("mlperf", False), zero("mlperf-corrected", True)


def test_two_ranks_match_one_process():
    """FSDP2 with shards of all sizes, state dicts of torch, and ZeRO; FSDP1 is refused.

    With one matrix that decays, one of ZeRO's ranks has no parameter of its group.
    """
    for one_matrix_decays, of_ranks in enumerate(zip(*run_ranks(2, on_two_ranks), strict=True)):
        empty, held = zip(*of_ranks, strict=True)
        assert any(empty) == bool(one_matrix_decays)
        assert sum(held) == len(list(network().parameters()))
        assert all(held)


def on_four_ranks():
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
        made = [distribute_tensor(weight.clone(), mesh, placements) for weight in weights]
        of_cases.append([nn.Parameter(weight) for weight in made])
    whole = [nn.Parameter(weight) for weight in weights]
    for of in (whole, *of_cases):
        for p, gradient in zip(of, gradients, strict=True):
            p.grad = 4 * gradient
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(4 * gradient, p.device_mesh, p.placements)
        optimizer = Muon(of, 0.1, norm_projection=True, adjust_lr_fn="trust_ratio")
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.zeros(())
        optimizer.step()
        for parameter, expected in zip(of, whole, strict=True):
            found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            torch.testing.assert_close(found, expected)
    return dist.get_rank()


def test_every_placement_on_a_two_dimensional_mesh_matches_the_whole_tensor():
    assert run_ranks(4, on_four_ranks) == [0, 1, 2, 3]
