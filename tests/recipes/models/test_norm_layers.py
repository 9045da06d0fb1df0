"""Batch norm over slices, groups of ranks or all ranks equals plain batch norm on those images."""

import copy

import pytest
import timm
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d
from torch import nn

from largebatch.lars import describe, split_parameters
from largebatch.recipes.models.batch_norm import share_statistics, statistics_images
from largebatch.recipes.models.norm_layers import GhostBatchNorm, SharedBatchNorm
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from tests.ranks import run_ranks
from tests.recipes.runs import JOB, assert_same, make, weights

pytestmark = pytest.mark.slow("compiles layers, and runs them on up to four ranks")


def recipe(*overrides):
    return load("digits", [f"batch_norm.{override}" for override in overrides]).recipe


def network(dtype=torch.float64):
    """Build a network with batch norm of several kinds, one with a cumulative average."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, bias=False),
        nn.BatchNorm2d(5, eps=1e-3, momentum=0.3),
        nn.ReLU(),
        nn.Conv2d(5, 4, 3, bias=False),
        BatchNormAct2d(4),
        nn.BatchNorm2d(4, affine=False, momentum=None),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.Linear(4, 2),
    ).to(dtype)


def inputs(count, dtype=torch.float64):
    """Return images whose mean is not 0, and the weights of their outputs in the loss."""
    generator = torch.Generator().manual_seed(1)
    images = 10 + torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    factors = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return images.to(dtype), factors.to(dtype)


def results(model, images, factors, passes=2):
    """Return outputs, gradients and buffers after some passes."""
    images = images.clone().requires_grad_()
    for _ in range(passes):
        output = model(images)
        (output * factors).sum().backward()
    return {
        "output": output.detach(),
        "input": images.grad,
        "parameters": {name: p.grad for name, p in model.named_parameters()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
    }


# --- several ranks ---------------------------------------------------------------------------

SHARES = (3, 1, 4, 2)  # images of each rank


def network_of_a_rank(*overrides):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    job = Job(rank, ranks, ranks, JOB.device)
    images, factors = (t.split(SHARES)[rank] for t in inputs(sum(SHARES)))
    model = network()
    share_statistics(model, recipe(*overrides), job)
    found = results(model, images, factors)
    again = copy.deepcopy(model)
    assert again[1] is not model[1]
    assert again[1].process_group is model[1].process_group
    torch.testing.assert_close(again(images), model(images))
    assert_same(dict(again.named_buffers()), dict(model.named_buffers()))
    half = network(torch.float32)
    share_statistics(half, recipe(*overrides), job)
    with torch.autocast("cpu", torch.bfloat16):
        found["half"] = half((images - 10).float().to(memory_format=torch.channels_last)).detach()
    # Far from 0, the difference of the mean square and the squared mean would cancel.
    far = nn.Sequential(nn.BatchNorm2d(3))
    share_statistics(far, recipe(*overrides), job)
    found["far"] = far((images + 1000).float()).detach()
    for _ in range(rank + 1):  # a different number on each rank, so evaluation must not communicate
        model[:6].eval()(images)
    found["span"] = statistics_images(recipe(*overrides), model, 8, ranks)
    return found


@pytest.mark.parametrize(("overrides", "size"), [(["ranks=all"], 4), (["ranks=2"], 2)])
def test_ranks_that_share_statistics_equal_one_process_with_all_images(overrides, size):
    """torch's batch norm on all images is the oracle.

    Each rank has its share of the parameters' gradients, and the shares add up to the whole.
    """
    found = run_ranks(4, network_of_a_rank, *overrides)
    images, factors = (t.split(SHARES) for t in inputs(sum(SHARES)))
    for first in range(0, 4, size):
        ranks = range(first, first + size)
        ours = [found[rank] for rank in ranks]
        plain = results(
            network(), torch.cat([images[r] for r in ranks]), torch.cat([factors[r] for r in ranks])
        )
        close = {"rtol": 1e-9, "atol": 1e-9}
        for key in ("output", "input"):
            torch.testing.assert_close(torch.cat([own[key] for own in ours]), plain[key], **close)
        for name, whole in plain["parameters"].items():
            total = sum(own["parameters"][name] for own in ours)
            torch.testing.assert_close(total, whole, **close)
        for own in ours:
            torch.testing.assert_close(own["buffers"], plain["buffers"], **close)
            assert_same(own["buffers"], ours[0]["buffers"])
            assert own["span"] == 8 * size
        far = nn.BatchNorm2d(3).double()(torch.cat([images[r] for r in ranks]))
        ours_far = torch.cat([own["far"] for own in ours])
        torch.testing.assert_close(ours_far.double(), far, rtol=0, atol=1e-3)
        half = network(torch.float32)(torch.cat([images[r] - 10 for r in ranks]).float())
        ours = torch.cat([own["half"] for own in ours])
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), half, rtol=0.1, atol=0.1)


# --- slices ----------------------------------------------------------------------------------


@settings(max_examples=25)
@given(images=st.integers(1, 5), slices=st.integers(1, 4), last=st.booleans())
def test_ghost_batch_norm_equals_plain_batch_norm_on_each_slice(images, slices, last):
    x, factors = inputs(images * slices)
    x = x.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    plain = nn.Sequential(*network()[:6])
    ghost = copy.deepcopy(plain)
    for layer in (ghost[1], ghost[4], ghost[5]):
        GhostBatchNorm.put_in_place_of(layer, images)
    factors = factors[:, 0, None, None, None]
    ours = results(ghost, x, factors, passes=1)
    theirs = [
        results(copy.deepcopy(plain), piece, by, passes=1)
        for piece, by in zip(x.split(images), factors.split(images), strict=True)
    ]
    for key in ("output", "input"):
        torch.testing.assert_close(ours[key], torch.cat([piece[key] for piece in theirs]))
    for name, found in ours["parameters"].items():
        torch.testing.assert_close(found, sum(piece["parameters"][name] for piece in theirs))
    for name, found in ours["buffers"].items():
        each = torch.stack([piece["buffers"][name].double() for piece in theirs])
        torch.testing.assert_close(found.double(), each.mean(0))
    if last:
        assert ghost[:2](x).is_contiguous(memory_format=torch.channels_last)


def test_only_whole_slices_are_accepted_in_training():
    model = network()
    share_statistics(model, recipe("images=4"), JOB)
    with pytest.raises(ValueError, match="6 images do not divide into slices of 4"):
        model(inputs(6)[0])
    assert model.eval()(inputs(6)[0]).shape == (6, 2)


def shared_over_one(model):
    for layer in [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]:
        SharedBatchNorm.put_in_place_of(layer, dist.group.WORLD)


def ghost(model):
    share_statistics(model, recipe("images=4"), JOB)


@pytest.mark.parametrize("change", [ghost, shared_over_one])
def test_layers_work_with_torch_compile(tmp_path, change):
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        plain = network()
        change(plain)
        compiled = copy.deepcopy(plain)
        compiled.compile(backend="eager")
        ours, theirs = (results(model, *inputs(8)) for model in (compiled, plain))
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(ours, theirs)


def test_optimizers_and_checkpoints_treat_layers_as_plain_batch_norm(photos, tmp_path):
    plain = make(photos, tmp_path / "plain")
    ghost = make(photos, tmp_path / "ghost", "batch_norm.images=2")
    assert not [layer for layer in ghost.model.modules() if isinstance(layer, nn.BatchNorm2d)]
    groups = [describe(split_parameters(trainer.model, 1e-4)) for trainer in (plain, ghost)]
    assert groups[0] == groups[1]
    assert_same(weights(ghost), weights(plain))  # zero gammas too
    ghost.run()
    timm.create_model("test_resnet", num_classes=3).load_state_dict(
        torch.load(tmp_path / "ghost" / "weights.pt")
    )
