"""Runs whose batch norm is over slices, groups of ranks, or all ranks."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from largebatch.pipeline import Phase
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.models.batch_norm import check_batch_norm, in_words
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


def recipe(*overrides):
    return load("digits", [f"batch_norm.{override}" for override in overrides]).recipe


# --- whole runs ------------------------------------------------------------------------------

GLOBAL = ("batch_norm.ranks=all", "micro_batch_size=8")


def runs_on_ranks(root, folder):
    """Train on 2 ranks with several settings; return the weights and the summaries."""
    found = {"weights": {}, "summary": {}}
    for name, overrides in {
        "global": (*GLOBAL, "checkpoint.every=1", "checkpoint.keep=99"),
        "resumed": (*GLOBAL, f"resume={folder / 'global/checkpoints/step-00000003'}"),
        "micro-batch": ("micro_batch_size=8",),
    }.items():
        with double_precision():
            trainer = make(root, folder / name, *overrides)
            trainer.run()
        # Running statistics differ between ranks; their mean is what is written.
        found["weights"][name] = weights(trainer)
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


def test_a_run_over_all_ranks_follows_one_process_with_the_whole_batch(on_ranks, whole):
    trained, moved = whole
    for found in on_ranks:
        assert (distance(found["weights"]["global"], trained) < ROUNDING * moved).all()
        assert_same(found["weights"]["global"], on_ranks[0]["weights"]["global"])
        # Without shared statistics the run ends elsewhere, so sharing them matters.
        assert (distance(found["weights"]["micro-batch"], trained) > 2e-2 * moved).all()
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


def test_images_that_share_statistics_are_counted(on_ranks):
    assert on_ranks[0]["summary"] == {"global": 16, "resumed": 16, "micro-batch": 8}
    model = nn.BatchNorm2d(3)
    for overrides, said in (
        ([], "batch norm over 8, then 4"),
        (["images=2"], "batch norm over 2 images in slices of a micro-batch"),
        (["ranks=2"], "batch norm over 16, then 8 images of 2 ranks"),
        (["ranks=all"], "batch norm over 32, then 16 images of all 4 ranks"),
    ):
        phases = [Phase(0, 32, 32, micro) for micro in (8, 4)]
        loader = SimpleNamespace(timeline=SimpleNamespace(phases=phases))
        assert in_words(recipe(*overrides), model, loader, 4) == said
    assert in_words(recipe(), nn.Linear(1, 1), loader, 4) == ""


# --- refused settings ------------------------------------------------------------------------


class Mean(nn.BatchNorm2d):
    """A subclass that the package does not know."""


@pytest.mark.parametrize(
    ("over", "others", "message"),
    [
        (["images=3"], [], "images: 3 does not .* of 4 images; valid: 1, 2, 4$"),
        (["ranks=3"], [], "ranks: 3 does not .* of ranks, 1; valid: 1"),
        (["ranks=all"], NO_BATCH_NORM, "ranks: test_vit has no batch norm; valid: null"),
        (["images=2", "ranks=2"], [], "images: cannot be combined with batch_norm.ranks"),
        (["ranks=some"], [], "ranks: must be a number, or all"),
    ],
)
def test_unsuitable_settings_are_refused_before_anything_is_written(
    photos, tmp_path, over, others, message
):
    with pytest.raises(RecipeError, match=rf"^(recipe digits: )?batch_norm\.{message}"):
        make(photos, tmp_path / "run", *(f"batch_norm.{key}" for key in over), *others)
    assert not (tmp_path / "run").exists()


def test_layers_of_unknown_kinds_and_later_batch_sizes_are_refused():
    first, later = Phase(0, 32, 16, 16), Phase(99, 32, 20, 10)
    model = nn.Sequential(nn.BatchNorm2d(3), Mean(3))
    check_batch_norm(recipe(), model, [first, later], 1)
    with pytest.raises(RecipeError) as error:
        check_batch_norm(recipe("images=2"), model, [first], 1)
    assert "1 of resnet" in str(error.value)
    assert "is a Mean, which does not support it; valid: null, or" in str(error.value)
    check_batch_norm(recipe("images=8"), model[:1], [first], 2)
    with pytest.raises(RecipeError, match="a micro-batch of 10 images"):
        check_batch_norm(recipe("images=8"), model[:1], [first, later], 2)
