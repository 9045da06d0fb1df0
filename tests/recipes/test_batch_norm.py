"""Batch norm's statistics: over slices, ranks, groups of ranks, and all of them."""

import contextlib
import copy
import io
import json
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d
from torch import nn

import largebatch.recipes.trainer as trainer_module
from largebatch.lars import describe, split_parameters
from largebatch.pipeline.stages import Phase
from largebatch.recipes.batch_norm import check_batch_norm, share_statistics, statistics_images
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.evaluate import averaged_buffers
from largebatch.recipes.job import Job
from largebatch.recipes.load import load
from largebatch.recipes.norm_layers import GhostBatchNorm, SharedBatchNorm
from tests.ranks import run_ranks
from tests.recipes.runs import NO_BATCH_NORM, assert_same, make, train, weights

ALONE = Job(0, 1, 1, torch.device("cpu"))
CPU = torch.device("cpu")


def recipe(*overrides):
    return load("digits", [f"batch_norm.{override}" for override in overrides]).recipe


def network(dtype=torch.float64):
    """Batch norm after convolutions, with an activation inside, over features, and as a mean."""
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
    """Images, whose mean is not 0, and what their outputs are weighed with in the loss."""
    generator = torch.Generator().manual_seed(1)
    images = 10 + torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    factors = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return images.to(dtype), factors.to(dtype)


def results(model, images, factors, passes=2):
    """Outputs, gradients and buffers, after some passes."""
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
    job = Job(rank, ranks, ranks, CPU)
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
    far = nn.Sequential(nn.BatchNorm2d(3))  # where a mean of squares would cancel
    share_statistics(far, recipe(*overrides), job)
    found["far"] = far((images + 1000).float()).detach()
    for _ in range(rank + 1):  # not as often on each rank: without collectives
        model[:6].eval()(images)
    found["span"] = statistics_images(model, 8)
    return found


@pytest.mark.parametrize(
    ("overrides", "size"), [(["over=global"], 4), (["over=group", "ranks=2"], 2)]
)
def test_ranks_that_share_statistics_are_one_process_with_all_their_images(overrides, size):
    """torch's own batch norm on all of it is the oracle; gradients of parameters are each rank's
    share, which DDP sums."""
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
        ours_far = torch.cat([own["far"] for own in ours]).double()
        torch.testing.assert_close(ours_far, far, rtol=0, atol=1e-3)
        half = network(torch.float32)(torch.cat([images[r] - 10 for r in ranks]).float())
        ours = torch.cat([own["half"] for own in ours])
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), half, rtol=0.1, atol=0.1)


# --- slices ----------------------------------------------------------------------------------


@settings(max_examples=25)
@given(images=st.integers(1, 5), slices=st.integers(1, 4), last=st.booleans())
def test_ghost_batches_are_plain_batch_norm_on_each_slice(images, slices, last):
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


def test_only_whole_slices_are_taken_in_training():
    model = network()
    share_statistics(model, recipe("over=ghost", "images=4"), ALONE)
    with pytest.raises(ValueError, match="6 images are not in slices of 4"):
        model(inputs(6)[0])
    assert model.eval()(inputs(6)[0]).shape == (6, 2)


def shared_over_one(model):
    for layer in [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]:
        SharedBatchNorm.put_in_place_of(layer, dist.group.WORLD)


def ghost(model):
    share_statistics(model, recipe("over=ghost", "images=4"), ALONE)


@pytest.mark.parametrize("change", [ghost, shared_over_one])
def test_layers_go_with_torch_compile(tmp_path, change):
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


def test_layers_stay_what_optimizers_and_checkpoints_know(photos, tmp_path):
    plain = make(photos, tmp_path / "plain")
    ghost = make(photos, tmp_path / "ghost", "batch_norm.over=ghost", "batch_norm.images=2")
    for layer in (layer for layer in ghost.model.modules() if isinstance(layer, nn.BatchNorm2d)):
        raise AssertionError(f"{layer} was left as it was")
    groups = [describe(split_parameters(trainer.model, 1e-4)) for trainer in (plain, ghost)]
    assert groups[0] == groups[1]
    assert_same(weights(ghost), weights(plain))  # zero gammas too
    ghost.run()
    timm.create_model("test_resnet", num_classes=3).load_state_dict(
        torch.load(tmp_path / "ghost" / "weights.pt")
    )


# --- whole runs ------------------------------------------------------------------------------

GLOBAL = ("batch_norm.over=global", "micro_batch_size=8")


def runs_on_ranks(root, folder):
    """Weights at the end of some runs on 2 ranks, and what the runs told."""
    # Drawing takes longer than training here.
    trainer_module.write_report = lambda run_dir, title: run_dir
    found = {"weights": {}, "told": {}, "summary": {}}
    for name, overrides in {
        "global": (*GLOBAL, "checkpoint.every=1", "checkpoint.keep=99"),
        "resumed": (*GLOBAL, f"resume={folder / 'global/checkpoints/step-00000003'}"),
        "micro-batch": ("micro_batch_size=8",),
        "rank": ("batch_norm.over=rank", "micro_batch_size=null"),
        "group": ("batch_norm.over=group", "batch_norm.ranks=2", "micro_batch_size=8"),
        "accumulated": ("batch_norm.over=global", "precision=auto", "stop_after=1"),
    }.items():
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            trainer = make(root, folder / name, *overrides)
            trainer.run()
        # Ranks differ in what each gathered; what is written is their mean.
        found["weights"][name] = weights(trainer)
        found["told"][name] = " ".join(told.getvalue().split())
        if dist.get_rank() == 0:
            summary = json.loads((folder / name / "summary.json").read_text())
            found["summary"][name] = summary["batch_norm_images"]
        own = [buffer.clone() for buffer in trainer.model.buffers()]
        with averaged_buffers(trainer.model, trainer.job):
            same = all(map(torch.equal, own, trainer.model.buffers()))
        assert same
    return found


@pytest.fixture(scope="module")
def on_ranks(photos, tmp_path_factory):
    return run_ranks(2, runs_on_ranks, photos, tmp_path_factory.mktemp("norm"))


def distance(ours, theirs):
    """Of parameters, and of running statistics: the length of the difference."""
    ours, theirs = (
        [
            torch.cat([v.flatten() for k, v in state.items() if ("running" in k) == running])
            for running in (False, True)
        ]
        for state in (
            {k: v.double() for k, v in state.items() if "tracked" not in k}
            for state in (ours, theirs)
        )
    )
    return torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)])


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    """The same updates by one process that forwards all at once, and how far they went."""
    folder = tmp_path_factory.mktemp("whole")
    start = weights(make(photos, folder / "start"))
    trained = train(photos, folder / "run", "micro_batch_size=16")
    return trained, distance(trained, start)


@pytest.mark.parametrize("name", ["global", "group"])
def test_a_run_over_all_ranks_follows_one_process_with_the_whole_batch(on_ranks, whole, name):
    trained, moved = whole
    for found in on_ranks:
        assert (distance(found["weights"][name], trained) < 1e-4 * moved).all()
        assert_same(found["weights"][name], on_ranks[0]["weights"][name])
        # Statistics matter: without sharing them the run is another.
        assert (distance(found["weights"]["micro-batch"], trained) > 2e-2 * moved).all()


def test_a_resumed_run_over_all_ranks_is_the_run_that_was_never_stopped(on_ranks):
    for found in on_ranks:
        assert_same(found["weights"]["resumed"], found["weights"]["global"])


def test_over_a_rank_is_a_statement_and_changes_nothing(on_ranks):
    for found in on_ranks:
        assert_same(found["weights"]["rank"], found["weights"]["micro-batch"])


def test_slices_on_one_process_are_the_ranks_of_a_larger_machine(photos, on_ranks, whole, tmp_path):
    """Running statistics included, as evaluation on ranks has them."""
    keys = ("micro_batch_size=16", "batch_norm.over=ghost", "batch_norm.images=8")
    found = train(photos, tmp_path, *keys)
    theirs = on_ranks[0]["weights"]["micro-batch"]
    assert (distance(found, theirs) < 1e-4 * whole[1]).all()


def test_how_many_images_share_statistics_is_told(on_ranks, photos, tmp_path, capsys):
    told, summary = on_ranks[0]["told"], on_ranks[0]["summary"]
    assert "batch norm over 8 images (each micro-batch of a rank)" in told["micro-batch"]
    assert "batch norm over 8 images (all of a rank in a step)" in told["rank"]
    assert "batch norm over 16 images (micro-batches of 2 ranks)" in told["group"]
    assert "batch norm over 16 images (micro-batches of all ranks, 2)" in told["global"]
    assert "batch norm over 8 images (micro-batches of all ranks, 2)" in told["accumulated"]
    assert summary == {
        **dict.fromkeys(("global", "resumed", "group"), 16),
        **dict.fromkeys(("micro-batch", "rank", "accumulated"), 8),
    }
    trainer = make(photos, tmp_path / "a", "batch_norm.over=ghost", "batch_norm.images=2")
    assert "batch norm over 2 images (slices of each micro-batch)" in capsys.readouterr().out
    assert statistics_images(trainer.model, 4) == 2
    trainer = make(photos, tmp_path / "b", *NO_BATCH_NORM)
    assert "batch norm" not in capsys.readouterr().out
    assert statistics_images(trainer.model, 4) is None


# --- what does not go ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["over=ranks"], "batch_norm.over: .*ghost"),
        (["over=ghost"], "batch_norm.images: over ghost needs it: a number of images, such as 8"),
        (["over=group"], "batch_norm.ranks: over group needs it: a number of ranks, such as 8"),
        (["images=2"], "batch_norm.images: goes with over ghost; valid with micro-batch: null"),
        (["over=global", "ranks=2"], "batch_norm.ranks: goes with over group; valid with global"),
        (["over=ghost", "images=0"], "batch_norm.images: .*greater than 0"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        recipe(*overrides)


class Mean(nn.BatchNorm2d):
    """Normalises in a way of its own."""


@pytest.mark.parametrize(
    ("over", "others", "message"),
    [
        (
            ["over=ghost", "images=3"],
            [],
            "images: 3 does not divide a micro-batch of 4 images; valid: 1, 2, 4$",
        ),
        (
            ["over=group", "ranks=3"],
            [],
            "ranks: 3 does not divide the number of ranks, 1; valid: 1",
        ),
        (
            ["over=rank"],
            [],
            "over: rank, but a rank's 16 images of a step are forwarded 4 at a time, and those "
            "that are not forwarded at once cannot share statistics; valid: micro-batch, or "
            "micro_batch_size=null",
        ),
        (["over=global"], NO_BATCH_NORM, "over: test_vit has no batch norm; valid: micro-batch"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    photos, tmp_path, over, others, message
):
    with pytest.raises(RecipeError, match=f"^batch_norm.{message}"):
        make(photos, tmp_path / "run", *(f"batch_norm.{key}" for key in over), *others)
    assert not (tmp_path / "run").exists()


def test_layers_of_unknown_kinds_are_refused():
    loader = SimpleNamespace(phases=(Phase(0, 32, 16, 16),))
    model = nn.Sequential(nn.BatchNorm2d(3), Mean(3))
    check_batch_norm(recipe("over=micro-batch"), model, loader, 1)
    with pytest.raises(RecipeError) as error:
        check_batch_norm(recipe("over=ghost", "images=2"), model, loader, 1)
    assert "1 of resnet" in str(error.value)
    assert "is a Mean, which cannot be had over ghost; valid: micro-batch, or" in str(error.value)


@pytest.mark.parametrize(
    ("over", "later", "message"),
    [
        (["over=ghost", "images=8"], Phase(99, 32, 20, 10), "a micro-batch of 10 images"),
        (["over=rank"], Phase(99, 32, 64, 16), "a rank's 32 images of a step are forwarded 16"),
    ],
)
def test_later_stages_of_batches_are_looked_at_too(over, later, message):
    model, first = nn.BatchNorm2d(3), Phase(0, 32, 32, 16)
    check_batch_norm(recipe(*over), model, SimpleNamespace(phases=(first,)), 2)
    with pytest.raises(RecipeError, match=message):
        check_batch_norm(recipe(*over), model, SimpleNamespace(phases=(first, later)), 2)
