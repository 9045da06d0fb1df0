"""The hook gives the gradients of plain DDP with each plan, and with each of DDP's features.

It is registered in torch's own way and connects in the first backward.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import Plan, PlanState, Rule, Topology, plan_hook
from largebatch.recipes.models.norm_layers import SharedBatchNorm
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("trains on up to four ranks")

WIDTH, STEPS = 64, 3


class Branches(nn.Module):
    """Uses the second layer only on odd ranks, and the third never."""

    def __init__(self):
        super().__init__()
        self.shared, self.sometimes, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = self.shared(x).tanh()
        return self.sometimes(x) if dist.get_rank() % 2 else x


def layers(width=WIDTH, count=4):
    hidden = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(nn.Linear(WIDTH, width), *hidden, nn.Linear(width, WIDTH))


def reused():
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def mixed_dtypes():
    model = layers()
    model[2].to(torch.bfloat16)
    model[3].to(torch.float64)
    for layer in model[1:5]:
        layer.register_forward_pre_hook(lambda one, args: args[0].to(one[0].weight.dtype))
    model[5].register_forward_pre_hook(lambda _, args: args[0].float())
    return model


def shared_norm():
    """Batch norm over all ranks; torch's SyncBatchNorm does not run on CPUs."""
    norm = nn.BatchNorm1d(WIDTH)
    SharedBatchNorm.put_in_place_of(norm, dist.group.WORLD)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@dataclass
class Feature:
    model: Callable[[], nn.Module] = layers
    options: dict[str, Any] = field(default_factory=dict)  # those of DDP
    run: Callable[[nn.Module], Any] = lambda ddp: ddp  # what is called in place of DDP
    micro_batches: int = 1  # backward passes per step; all but the last without synchronization
    bucket_bytes: int = 20_000


FEATURES = {
    "plain": Feature(),
    "batch norm over ranks": Feature(shared_norm),
    "unused parameters": Feature(Branches, {"find_unused_parameters": True}),
    "no_sync": Feature(options={"gradient_as_bucket_view": True}, micro_batches=3),
    # torch.compile splits DDP's graph at its buckets, of 1 MiB at least.
    "compiled": Feature(
        lambda: layers(600, 3),
        run=lambda ddp: torch.compile(ddp, backend="aot_eager"),
        bucket_bytes=2**20,
    ),
    "mixed dtypes": Feature(mixed_dtypes),
    "static graph": Feature(reused, {"static_graph": True}),
}

# The largest difference that is allowed, relative to the largest gradient.
PLANS = {
    "ring": (Plan.single("ring"), 0.0),
    "hierarchical": (Plan.single("hierarchical"), 1e-6),
    "leader, bf16": (Plan.single("leader", wire_dtype="bf16"), 1e-2),
    "two rules": (Plan((Rule("ring", 18_000), Rule("hierarchical"))), 1e-6),
    "leader in chunks": (Plan((Rule("leader", chunk_bytes=7_000),)), 1e-6),
    "row": (Plan((Rule("torus", shape=(4, 1), chunk_bytes=7_000),)), 1e-6),
    "point to point": (Plan((Rule("halving-doubling", 18_000), Rule("parameter-server"))), 1e-6),
    "ring, fp16": (Plan.single("ring", wire_dtype="fp16"), 2e-3),
}
# Every plan, and every feature with one of the first three.
BY_PLAN = [("plain", plan) for plan in PLANS]
BY_FEATURE = [(name, [*PLANS][i % 3]) for i, name in enumerate(FEATURES) if name != "plain"]


def gradients_of(run, ddp, images):
    ddp.zero_grad()
    for i, batch in enumerate(images):
        with ddp.no_sync() if i < len(images) - 1 else contextlib.nullcontext():
            run(batch).square().sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in ddp.parameters()]
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def difference(feature, plan, hook=plan_hook):
    """The largest difference of gradients from plain DDP's, relative to the largest gradient."""
    ranks = dist.get_world_size()
    plan = replace(plan, fusion_threshold_bytes=feature.bucket_bytes)
    torch.manual_seed(0)
    network = feature.model()
    models = [
        DistributedDataParallel(one, **plan.ddp_options(), **feature.options)
        for one in (network, copy.deepcopy(network))
    ]
    models[1].register_comm_hook(PlanState(plan, Topology.of(ranks, ranks // 2)), hook)
    runs = [feature.run(ddp) for ddp in models]
    generator = torch.Generator().manual_seed(dist.get_rank())
    worst = 0.0
    for _ in range(STEPS):  # buckets are rebuilt after the first
        images = torch.randn(feature.micro_batches, 8, WIDTH, generator=generator)
        expected, ours = (gradients_of(*pair, images) for pair in zip(runs, models, strict=True))
        worst = max(worst, ((ours - expected).abs().max() / expected.abs().max()).item())
    assert expected.abs().max() > 0
    return worst


def check(cases):
    for feature, name in cases:
        plan, limit = PLANS[name]
        found = difference(FEATURES[feature], plan)
        if feature == "mixed dtypes":  # one of the layers has BF16 gradients
            limit = max(limit, torch.finfo(torch.bfloat16).eps)
        assert found <= limit, (feature, name, found)
        if "16" in name:
            assert found > 0, f"{feature}: nothing was sent in half precision"


def with_features():
    check(BY_FEATURE)
    bf16 = bf16_compress_wrapper(plan_hook)
    bf16.__name__ = "renamed"  # by its name, DDP refuses this hook where there is no NCCL
    for hook, limit in ((fp16_compress_wrapper(plan_hook), 2e-3), (bf16, 2e-2)):
        assert 1e-6 < difference(Feature(), Plan.single("hierarchical"), hook) < limit


def test_gradients_equal_those_of_plain_ddp_with_each_feature_and_under_torchs_wrappers():
    run_ranks(2, with_features)


def test_gradients_equal_those_of_plain_ddp_with_each_plan():
    run_ranks(4, check, BY_PLAN)
