"""A run goes on with fewer ranks when one is lost for good, and with all of them later."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from largebatch.recipes.errors import RecipeError
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
    weights,
)

AGAIN = ("resume=true", "resume.reshard=true")


def steps_of(root, run_dir, *keys):
    """Train on these ranks, and give the weights, the global batch, and what was said."""
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


def in_turn(root, run_dir, *keys):
    """Train on 4 ranks, on 3 and on 4 again, each for three steps."""
    return [
        run_ranks(ranks, steps_of, root, run_dir, *keys, *AGAIN, f"stop_after={stop}")[0]
        for ranks, stop in ((4, 3), (3, 6), (4, 9))
    ]


@pytest.mark.slow("starts 15 processes")
def test_four_ranks_then_three_then_four_make_the_updates_of_four(photos, tmp_path):
    """Global batches, and the micro-batches over which batch norm goes, hold the same images."""
    keys = ("batch_size=48", "micro_batch_size=4")
    whole, _, _ = run_ranks(4, steps_of, photos, tmp_path / "whole", *keys, "stop_after=9")[0]
    one, two, three = in_turn(photos, tmp_path / "part", *keys)
    assert (one[1], two[1], three[1]) == ((4, 3, 4), (4, 4, 3), (4, 3, 4))
    unchanging = [k for k in whole if "running" not in k and "tracked" not in k]
    ours, theirs = ({k: w[k] for k in unchanging} for w in (three[0], whole))
    assert largest_difference(ours, theirs) < ROUNDING
    shape = "now 4 images x 4 accumulated x 3 ranks, was 4 images x 3 accumulated x 4 ranks"
    assert f"a global batch is {shape}; batch norm over 4 images as before" in two[2]
    assert "now 4 images x 3 accumulated x 4 ranks, was 4 images x 4 accumulated" in three[2]
    assert "a global batch is" not in one[2]


@pytest.mark.slow("starts 15 processes")
def test_an_open_micro_batch_does_not_grow_on_fewer_ranks(photos, tmp_path):
    """As it may not fit into memory; without batch norm, the updates stay those of four ranks."""
    keys = (*NO_BATCH_NORM, "batch_size=24", "micro_batch_size=null")
    whole, _, _ = run_ranks(4, steps_of, photos, tmp_path / "whole", *keys, "stop_after=9")[0]
    one, two, three = in_turn(photos, tmp_path / "part", *keys)
    assert (one[1], two[1], three[1]) == ((6, 1, 4), (4, 2, 3), (6, 1, 4))
    shape = "now 4 images x 2 accumulated x 3 ranks, was 6 images x 1 accumulated x 4 ranks"
    assert f"a global batch is {shape}" in two[2]
    assert "batch norm" not in two[2]
    assert largest_difference(three[0], whole) < ROUNDING


def test_a_batch_that_does_not_divide_is_refused_and_the_checkpoint_stays(photos, tmp_path):
    make(photos, tmp_path, "micro_batch_size=null", "stop_after=2").run()
    path = latest(tmp_path / "checkpoints")
    on_three = Job(0, 3, 3, torch.device("cpu"))
    here = [f"data.path={photos}", f"run_dir={tmp_path}", "micro_batch_size=null", *AGAIN]
    loaded = load("digits", [*BASE, *here])
    with pytest.raises(RecipeError) as error:
        prepare(loaded, on_three, run_place(loaded, ""))
    assert str(error.value) == (
        "batch_size: 16 does not divide into equal shares on 3 ranks; "
        "valid: a multiple of 3, such as 15, or 2 ranks"
    )
    assert read_state(path)["step"] == 2
    changes = prepare(loaded, Job(0, 2, 2, torch.device("cpu")), run_place(loaded, "")).changes
    shape = "now 8 images x 1 accumulated x 2 ranks, was 16 images x 1 accumulated x 1 ranks"
    norm = "batch norm now over 8 images, was over 16: expect other losses"
    assert changes[0] == f"a global batch is {shape}; {norm}"


@given(st.integers(1, 12), st.integers(1, 60), st.integers(1, 300))
def test_the_micro_batch_is_the_largest_that_fits_and_divides(ranks, share, most):
    keys = [*BASE, f"batch_size={ranks * share}", "micro_batch_size=null", "epochs=2"]
    recipe = load("digits", [*keys, "schedule.warmup=0"]).recipe
    phase = timeline_of(recipe, 100_000, ranks, most).phases[0]
    assert share % phase.micro_batch_size == 0
    assert phase.micro_batch_size <= most
    assert not any(share % n == 0 for n in range(phase.micro_batch_size + 1, min(share, most) + 1))
    assert timeline_of(recipe, 100_000, ranks).phases[0].micro_batch_size == share
