"""Clipping and unscaling on several ranks: under DDP, and of sharded parameters."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from largebatch.amp import Precision
from tests.amp.clipping import optimizer_in
from tests.amp.nets import loss_of, net_and_batch
from tests.ranks import run_ranks


def ddp_runs(cases):
    return [ddp_run(*case) for case in cases]


def ddp_run(name, kind, views):
    """Take four clipped steps of two micro-batches on this rank's half of each batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, x, labels = net_and_batch()
    precision = Precision(name)
    model = precision.convert(model)
    optimizer = optimizer_in(precision, kind, model.parameters())
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    norms = []
    for _ in range(4):
        for part in range(2):
            mine = slice((2 * rank + part) * 8, (2 * rank + part + 1) * 8)
            loss = loss_of(precision, ddp, x[mine], labels[mine]) / 2
            if part == 0:
                with ddp.no_sync():
                    precision.backward(loss)
            else:
                precision.backward(loss)
        norms.append(precision.clip_grad_norm_(optimizer, 0.05).item())
        precision.step(optimizer)
        optimizer.zero_grad(set_to_none=not views)
    assert ranks == 2
    return norms, [p.detach().float().clone() for p in model.parameters()]


@pytest.mark.slow("starts two ranks")
def test_all_ranks_of_ddp_clip_by_the_same_norm():
    kinds = [("fp32", "sgd"), ("fp16-master", "sgd"), ("fp16-master", "lars")]
    cases = [(*kind, views) for kind in kinds for views in (False, True)]
    first, second = run_ranks(2, ddp_runs, cases)
    for (norms, weights), (others, theirs) in zip(first, second, strict=True):
        assert norms == others
        assert min(norms) > 0.05
        assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))


def sharded_run(name, kind):
    """Take four clipped steps, sharded over the ranks and on one rank."""

    def run(shard):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.Linear(5, 1))
        precision = Precision(name, loss_scale=128.0)
        net = precision.convert(net)
        if shard:
            for layer in net:
                fully_shard(layer)
            fully_shard(net)
        optimizer = optimizer_in(precision, kind, net.parameters())
        norms = []
        for step in range(4):
            torch.manual_seed(step + 1)
            with precision.forward():
                loss = (4 * net(torch.randn(8, 6))).square().mean()
            precision.backward(loss)
            norms.append(precision.clip_grad_norm_(optimizer, 0.5).item())
            precision.step(optimizer)
            optimizer.zero_grad()
        before = [p.full_tensor() if shard else p.detach().clone() for p in net.parameters()]
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
        whole = [p.full_tensor() if shard else p for p in net.parameters()]
        return norms, [p.detach().float().clone() for p in whole]

    ours, theirs = run(shard=True), run(shard=False)
    assert min(theirs[0]) > 0.5
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5 if name == "fp32" else 5e-3)
    for a, b in zip(ours[1], theirs[1], strict=True):
        tolerance = 1e-5 if name == "fp32" else 5e-3
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return ours[0]


def sharded_runs(cases):
    return [sharded_run(*case) for case in cases]


@pytest.mark.slow("starts two ranks")
def test_the_norm_of_sharded_gradients_is_that_of_whole_ones():
    cases = itertools.product(("fp32", "fp16-master"), ("lars", "sgd"))
    first, second = run_ranks(2, sharded_runs, list(cases))
    assert first == second
