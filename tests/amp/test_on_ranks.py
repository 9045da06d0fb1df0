"""Overflows, clipping and masters on two ranks: under DDP, and of parameters sharded by FSDP2."""

from contextlib import nullcontext

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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from largebatch.amp import (
    INITIAL_LOSS_SCALE,
    MasterWeights,
    Precision,
    full_precision_state_dict,
    reset_masters,
)
from largebatch.lars import LARS
from tests.amp.nets import Loop
from tests.amp.test_clipping import optimizer_in
from tests.amp.test_masters import OPTIMIZERS
from tests.amp.test_statistics import same, state_of
from tests.ranks import run_ranks

UNDER_DDP = [  # precision, optimizer, and whether gradients are views of DDP's buckets
    *(("fp32", "sgd", True), ("fp16", "sgd", True)),
    *(("fp16-master", "lars", True), ("fp16-master", "sgd", False)),
]


def under_ddp(name, kind, views):
    """Take six clipped steps of two micro-batches; one rank overflows in three of them."""
    loop = Loop(name, kind)
    loop.network = DistributedDataParallel(loop.model, gradient_as_bucket_view=views)
    loop.x, loop.labels = (t.chunk(2)[dist.get_rank()] for t in (loop.x, loop.labels))
    seen = []
    for step in range(6):
        before = state_of(loop)
        bad = {1: (0, 1), 3: (1, 0), 4: (0, 0)}.get(step) if loop.precision.scales else None
        for micro_batch in range(2):
            factor = 1e30 if (micro_batch, dist.get_rank()) == bad else 1.0
            with loop.network.no_sync() if micro_batch == 0 else nullcontext():
                loop.backward(*((0.1, factor) if step == 1 else (0.1 * factor, 1.0)))
        norm = loop.precision.clip_grad_norm_(loop.optimizer, 0.01)
        loop.precision.step(loop.optimizer)
        loop.optimizer.zero_grad(set_to_none=not views)
        assert norm.isfinite() == (bad is None)
        assert bad is not None or norm > 0.01
        if bad is not None:
            assert same(state_of(loop), before)
        seen.append((loop.precision.skipped_steps, loop.precision.loss_scale, norm.nan_to_num()))
    return seen, [p.detach().clone() for p in loop.model.parameters()]


def sharded_net(shard, precision):
    torch.manual_seed(0)
    # 7 and 5 are not divisible by 2, which gives shards of different sizes.
    net = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 5))
    net = precision.convert(net)
    if shard:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    return net


def clipped_in_shards(name, kind):
    def run(shard):
        precision = Precision(name, loss_scale=128.0)
        net = sharded_net(shard, precision)
        optimizer = optimizer_in(precision, kind, net.parameters())
        norms = []
        for step in range(4):
            torch.manual_seed(step + 1)
            with precision.forward():
                loss = (8 * net(torch.randn(8, 6))).square().mean()
            precision.backward(loss)
            norms.append(precision.clip_grad_norm_(optimizer, 0.5).item())
            precision.step(optimizer)
            optimizer.zero_grad()
        before = [p.full_tensor() if shard else p.detach().clone() for p in net.parameters()]
        results = norms, [p.float() for p in before]
        precision.backward(net(torch.ones(8, 6)).sum())
        if not shard or dist.get_rank() == 1:  # in one shard only
            gradient = net[0].weight.grad
            (gradient.to_local() if shard else gradient)[0, 0] = float("inf")
        if shard:
            with pytest.raises(ValueError, match="norm_type must be finite with sharded"):
                precision.clip_grad_norm_(optimizer, 0.5, norm_type=float("inf"))
        assert not precision.clip_grad_norm_(optimizer, 0.5).isfinite()
        precision.step(optimizer)
        assert precision.skipped_steps == 1
        after = [p.full_tensor() if shard else p for p in net.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return results

    ours, theirs = run(shard=True), run(shard=False)
    assert min(theirs[0]) > 0.5
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5 if name == "fp32" else 5e-3)
    for a, b in zip(ours[1], theirs[1], strict=True):
        tolerance = 1e-5 if name == "fp32" else 5e-3
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return ours[0]


def sharded_steps(net, optimizer, steps):
    for step in steps:
        torch.manual_seed(step + 1)
        net(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def masters_in_shards(kind):
    def make(shard):
        net = sharded_net(shard, Precision("bf16-master"))
        if kind == "lars":
            return net, LARS(net.parameters(), 0.5, trust_coefficient=0.1, master_weights=True)
        return net, MasterWeights(OPTIMIZERS[kind](net.parameters()))

    def run(shard, resume):
        net, optimizer = make(shard)
        sharded_steps(net, optimizer, range(3))
        if resume:
            whole = StateDictOptions(full_state_dict=resume == "whole")
            state = get_optimizer_state_dict(net, optimizer, options=whole)
            weights = get_model_state_dict(net, options=whole)
            net, optimizer = make(shard)
            set_model_state_dict(net, weights, options=whole)
            set_optimizer_state_dict(net, optimizer, state, options=whole)
        sharded_steps(net, optimizer, range(3, 5))
        return net, optimizer

    expected = full_precision_state_dict(*run(False, None))
    for resume in (None, "whole", "parts"):
        net, optimizer = run(True, resume)
        weight = next(net.parameters())
        assert isinstance(optimizer.state[weight]["master"], DTensor)
        exported = full_precision_state_dict(net, optimizer)
        assert not any(isinstance(value, DTensor) for value in exported.values())
        for name, value in expected.items():
            assert exported[name].dtype == torch.float32
            torch.testing.assert_close(exported[name], value, rtol=5e-3, atol=5e-3)
        master = optimizer.state[weight]["master"].full_tensor()
        assert torch.equal(exported["0.weight"], master)
        assert torch.equal(weight.full_tensor(), master.bfloat16())
        with torch.no_grad():
            weight.to_local().add_(1)
        reset_masters(optimizer)
        assert torch.equal(
            optimizer.state[weight]["master"].full_tensor(), weight.full_tensor().float()
        )
        with torch.no_grad():
            weight.to_local().mul_(-1)
        edited = weight.full_tensor().float()
        assert torch.equal(full_precision_state_dict(net, optimizer)["0.weight"], edited)
        with pytest.warns(UserWarning, match="weights have been changed"):
            sharded_steps(net, optimizer, range(5, 6))
        master = optimizer.state[weight]["master"].full_tensor()
        assert torch.equal(weight.full_tensor(), master.bfloat16())
        assert (master - edited).norm() < 0.5 * edited.norm()
    return exported


def on_a_rank():
    of_norms = ("fp32", "sgd"), ("fp16-master", "lars")
    return (
        [under_ddp(*case) for case in UNDER_DDP],
        [clipped_in_shards(*case) for case in of_norms],
        [masters_in_shards(kind) for kind in ("adamw", "lars")],
    )


@pytest.mark.slow("starts two ranks")
def test_two_ranks_take_the_same_steps():
    """They skip, clip and put back statistics alike, and shards take the steps of whole tensors."""
    first, second = run_ranks(2, on_a_rank)
    assert same(first, second)
    for (name, *_), (seen, weights) in zip(UNDER_DDP, first[0], strict=True):
        if name != "fp32":
            assert [skipped for skipped, *_ in seen] == [0, 1, 1, 2, 3, 3]
            assert seen[-1][1] == INITIAL_LOSS_SCALE / 2
        assert all(torch.isfinite(w).all() for w in weights)
