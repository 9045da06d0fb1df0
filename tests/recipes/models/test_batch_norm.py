"""Runs whose batch norm is over slices, groups of ranks, or all ranks."""

import contextlib
import io
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from largebatch.pipeline import Phase
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.models.batch_norm import check_batch_norm, statistics_images
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.evaluate import averaged_buffers
from tests.ranks import run_ranks
from tests.recipes.runs import (
    NO_BATCH_NORM,
    ROUNDING,
    assert_same,
    double_precision,
    make,
    train,
    weights,
)

pytestmark = pytest.mark.slow("trains small networks on two ranks")

ALONE = Job(0, 1, 1, torch.device("cpu"))
CPU = torch.device("cpu")


def recipe(*overrides):
    return load("digits", [f"batch_norm.{override}" for override in overrides]).recipe


# --- whole runs ------------------------------------------------------------------------------

GLOBAL = ("batch_norm.ranks=all", "micro_batch_size=8")


def runs_on_ranks(root, folder):
    """Train on 2 ranks with several settings; return the weights, the output and the summaries."""
    found = {"weights": {}, "output": {}, "summary": {}}
    for name, overrides in {
        "global": (*GLOBAL, "checkpoint.every=1", "checkpoint.keep=99"),
        "resumed": (*GLOBAL, f"resume={folder / 'global/checkpoints/step-00000003'}"),
        "micro-batch": ("micro_batch_size=8",),
        "group": ("batch_norm.ranks=2", "micro_batch_size=8"),
        "accumulated": ("batch_norm.ranks=all", "precision=auto", "stop_after=1"),
    }.items():
        output = io.StringIO()
        # `auto` chooses among lower precisions, so it cannot run in double precision.
        exactly = contextlib.nullcontext() if "precision=auto" in overrides else double_precision()
        with contextlib.redirect_stdout(output), exactly:
            trainer = make(root, folder / name, *overrides)
            trainer.run()
        # Running statistics differ between ranks; their mean is what is written.
        found["weights"][name] = weights(trainer)
        found["output"][name] = " ".join(output.getvalue().split())
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
    """Return the norms of the differences of the parameters and of the running statistics."""
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
    """Make the same updates in one process with one forward pass per step.

    Returns the weights and their distance from the initial ones.
    """
    folder = tmp_path_factory.mktemp("whole")
    with double_precision():
        start = weights(make(photos, folder / "start"))
        trained = train(photos, folder / "run", "micro_batch_size=16")
    return trained, distance(trained, start)


@pytest.mark.parametrize("name", ["global", "group"])
def test_a_run_over_all_ranks_follows_one_process_with_the_whole_batch(on_ranks, whole, name):
    trained, moved = whole
    for found in on_ranks:
        assert (distance(found["weights"][name], trained) < ROUNDING * moved).all()
        assert_same(found["weights"][name], on_ranks[0]["weights"][name])
        # Without shared statistics the run ends elsewhere, so sharing them matters.
        assert (distance(found["weights"]["micro-batch"], trained) > 2e-2 * moved).all()


def test_a_resumed_run_over_all_ranks_equals_an_uninterrupted_one(on_ranks):
    for found in on_ranks:
        assert_same(found["weights"]["resumed"], found["weights"]["global"])


def test_slices_in_one_process_equal_the_ranks_of_a_larger_machine(
    photos, on_ranks, whole, tmp_path
):
    """This includes the running statistics, as they are averaged over ranks for evaluation."""
    keys = ("micro_batch_size=16", "batch_norm.images=8")
    with double_precision():
        found = train(photos, tmp_path, *keys)
    theirs = on_ranks[0]["weights"]["micro-batch"]
    assert (distance(found, theirs) < ROUNDING * whole[1]).all()


def test_images_that_share_statistics_are_counted(on_ranks, photos, tmp_path, capsys):
    output, summary = on_ranks[0]["output"], on_ranks[0]["summary"]
    assert "; batch norm over 8 steps " in output["micro-batch"]
    assert "; batch norm over 16 images of 2 ranks steps " in output["group"]
    assert "; batch norm over 16 images of all 2 ranks steps " in output["global"]
    assert "; batch norm over 8 images of all 2 ranks steps " in output["accumulated"]
    assert summary == {
        **dict.fromkeys(("global", "resumed", "group"), 16),
        **dict.fromkeys(("micro-batch", "accumulated"), 8),
    }
    trainer = make(photos, tmp_path / "a", "batch_norm.images=2")
    assert "batch norm over 2 images in slices of a micro-batch" in capsys.readouterr().out
    assert statistics_images(trainer.model, 4) == 2
    trainer = make(photos, tmp_path / "b", *NO_BATCH_NORM)
    assert "batch norm" not in capsys.readouterr().out
    assert statistics_images(trainer.model, 4) is None


# --- refused settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["over=ghost"], "batch_norm.over: no longer a key; use batch_norm.images=N"),
        (["images=2", "ranks=2"], "batch_norm.images: cannot be combined with batch_norm.ranks"),
        (["images=0"], "batch_norm.images: .*greater than 0"),
        (["ranks=some"], "batch_norm.ranks: must be a number of ranks, or all"),
    ],
)
def test_incompatible_keys_are_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        recipe(*overrides)


class Mean(nn.BatchNorm2d):
    """A subclass that the package does not know."""


@pytest.mark.parametrize(
    ("over", "others", "message"),
    [
        (
            ["images=3"],
            [],
            "images: 3 does not divide a micro-batch of 4 images; valid: 1, 2, 4$",
        ),
        (
            ["ranks=3"],
            [],
            "ranks: 3 does not divide the number of ranks, 1; valid: 1",
        ),
        (["ranks=all"], NO_BATCH_NORM, "ranks: test_vit has no batch norm; valid: null"),
    ],
)
def test_unsuitable_settings_are_refused_before_anything_is_written(
    photos, tmp_path, over, others, message
):
    with pytest.raises(RecipeError, match=f"^batch_norm.{message}"):
        make(photos, tmp_path / "run", *(f"batch_norm.{key}" for key in over), *others)
    assert not (tmp_path / "run").exists()


def test_layers_of_unknown_kinds_are_refused():
    phases = [Phase(0, 32, 16, 16)]
    model = nn.Sequential(nn.BatchNorm2d(3), Mean(3))
    check_batch_norm(recipe(), model, phases, 1)
    with pytest.raises(RecipeError) as error:
        check_batch_norm(recipe("images=2"), model, phases, 1)
    assert "1 of resnet" in str(error.value)
    assert "is a Mean, which does not support it; valid: null, or" in str(error.value)


@pytest.mark.parametrize(
    ("over", "later", "message"),
    [
        (["images=8"], Phase(99, 32, 20, 10), "a micro-batch of 10 images"),
    ],
)
def test_later_batch_sizes_are_checked_too(over, later, message):
    model, first = nn.BatchNorm2d(3), Phase(0, 32, 32, 16)
    check_batch_norm(recipe(*over), model, [first], 2)
    with pytest.raises(RecipeError, match=message):
        check_batch_norm(recipe(*over), model, [first, later], 2)
