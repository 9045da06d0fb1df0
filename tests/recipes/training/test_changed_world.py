"""A run goes on with fewer ranks when one is lost for good, and with all of them later."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from largebatch.pipeline import DataError
from largebatch.recipes.ranks import Job
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.build import prepare
from largebatch.recipes.training.folder.checkpoint import latest, read_state
from largebatch.recipes.training.folder.place import run_place
from largebatch.recipes.training.timeline import timeline_of
from tests.ranks import run_ranks
from tests.recipes.runs import (
    BASE,
    NO_BATCH_NORM,
    ROUNDING,
    double_precision,
    largest_difference,
    make,
    refused,
    weights,
)

AGAIN = ("resume=true", "resume.reshard=true")


def steps_of(root, run_dir, *keys, whole=None):
    """Train on these ranks, and give the weights, the global batch, and what was said.

    ``whole`` is the folder of a run of all steps, which is made besides.
    """
    if whole:
        return steps_of(root, whole, *keys, "stop_after=9"), steps_of(root, run_dir, *keys)
    lines = []
    with double_precision(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "largebatch.recipes.training.screen.console.Display.say",
            lambda _, line: lines.append(line),
        )
        trainer = make(root, run_dir, "epochs=9", *keys)
        trainer.run()
    loader = trainer.loader
    shape = (loader.micro_batch_size, loader.accumulation, loader.world_size)
    return weights(trainer), shape, "\n".join(lines)


@pytest.mark.slow("starts 8 processes")
@pytest.mark.parametrize(
    ("keys", "of_three", "of_two"),
    [
        (["batch_size=48", "micro_batch_size=4"], (4, 4, 3), (4, 6, 2)),
        # An open micro-batch does not grow on fewer ranks, as it may not fit into memory.
        ([*NO_BATCH_NORM, "batch_size=24", "micro_batch_size=null"], (8, 1, 3), (6, 2, 2)),
    ],
)
def test_three_ranks_then_two_then_three_make_the_updates_of_three(
    photos, tmp_path, keys, of_three, of_two
):
    """Global batches, and the micro-batches over which batch norm goes, hold the same images."""
    part = photos, tmp_path / "part", *keys, *AGAIN
    first = partial(steps_of, whole=tmp_path / "whole")
    (whole, _, _), one = run_ranks(3, first, *part, "stop_after=3")[0]
    two, three = (
        run_ranks(ranks, steps_of, *part, f"stop_after={stop}")[0]
        for ranks, stop in ((2, 6), (3, 9))
    )
    assert [one[1], two[1], three[1]] == [of_three, of_two, of_three]
    ours, theirs = (
        {k: w[k] for k in w if "running" not in k and "tracked" not in k} for w in (three[0], whole)
    )
    assert largest_difference(ours, theirs) < ROUNDING
    now, before = (
        f"{micro} images x {accumulated} accumulated x {ranks} ranks"
        for micro, accumulated, ranks in (of_two, of_three)
    )
    norm = "" if NO_BATCH_NORM[0] in keys else "; batch norm over 4 images as before"
    assert f"a global batch is now {now}, was {before}{norm}\n" in two[2]
    assert f"a global batch is now {before}, was {now}" in three[2]
    assert "a global batch is" not in one[2]


def test_a_batch_that_does_not_divide_is_refused_and_the_checkpoint_stays(photos, tmp_path):
    make(photos, tmp_path, "micro_batch_size=null", "stop_after=2").run()
    path = latest(tmp_path / "checkpoints")

    def prepared(ranks, *keys):
        here = [f"data.path={photos}", f"run_dir={tmp_path}", "micro_batch_size=null"]
        loaded = load("digits", [*BASE, *here, *keys])
        return prepare(loaded, Job(0, ranks, ranks, torch.device("cpu")), run_place(loaded, ""))

    assert refused(prepared, 3, *AGAIN) == (
        "batch_size: 16 does not divide into equal shares on 3 ranks; "
        "valid: a multiple of 3, such as 15, or 2 ranks"
    )
    with pytest.raises(DataError, match=r"micro_batch_size 16, now it is 8; resume.reshard=true"):
        prepared(2, AGAIN[0])
    assert read_state(path)["step"] == 2
    shape = "now 8 images x 1 accumulated x 2 ranks, was 16 images x 1 accumulated x 1 ranks"
    norm = "batch norm now over 8 images, was over 16: expect other losses"
    assert prepared(2, *AGAIN).changes[0] == f"a global batch is {shape}; {norm}"


@given(st.integers(1, 12), st.integers(1, 60), st.integers(1, 300))
def test_the_micro_batch_is_the_largest_that_fits_and_divides(ranks, share, most):
    keys = [*BASE, f"batch_size={ranks * share}", "micro_batch_size=null", "epochs=2"]
    recipe = load("digits", [*keys, "schedule.warmup=0"]).recipe
    phase = timeline_of(recipe, 100_000, ranks, most).phases[0]
    assert share % phase.micro_batch_size == 0
    assert phase.micro_batch_size <= most
    assert not any(share % n == 0 for n in range(phase.micro_batch_size + 1, min(share, most) + 1))
    assert timeline_of(recipe, 100_000, ranks).phases[0].micro_batch_size == share
