"""The runs of an estimate: the same recipe at another batch size and length."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.recipes.errors import AgreedError, RecipeError
from largebatch.recipes.schema.load import RECIPE, load
from largebatch.recipes.training.folder.names import CHECKPOINTS
from largebatch.recipes.training.folder.outcome import metrics_of
from largebatch.recipes.tune import trial as tune_runs
from largebatch.recipes.tune.critical_batch.base import Base, label_entropy
from largebatch.recipes.tune.critical_batch.runs import Run, final_loss, make, record_of
from tests.recipes.runs import JOB
from tests.recipes.tune.critical_batch.law import loaded

DIGITS = load("digits", ["batch_size=48", "micro_batch_size=16"])


@pytest.fixture
def base(photos, tmp_path):
    def make(*overrides, rule=None, ranks=1):
        return Base.of(loaded(photos, *overrides), tmp_path / "out", ranks, rule)

    return make


def recipe_of(base, batch, epochs=50.0):
    """The recipe of a run."""
    base.write()
    return load(str(base.out / RECIPE), base.overrides(batch, epochs, seed=3)).recipe


def test_batches_are_around_the_recipes_and_all_lengths_keep_their_part_of_the_run(base):
    """400 steps of 4 images are 40 of 50 epochs, whatever the batch size is."""
    assert base().default_batches() == (2, 4, 8)
    assert base("batch_size=13", "micro_batch_size=13").default_batches() == (13, 26)
    made = base("schedule={name: step, milestones: [20ep, 400], end: 0}").of_runs((8, 16), 25.0)
    recipe = recipe_of(made, 8, 25.0)
    assert [str(span) for span in recipe.schedule.milestones] == ["0.4dur", "0.8dur"]
    assert (recipe.epochs, recipe.seed) == (25, 3)


@pytest.mark.parametrize(
    ("optimizer", "rule", "factor"), [("lars", None, 2.0), ("sgd", None, 4.0), ("sgd", "sqrt", 2.0)]
)
def test_the_learning_rate_follows_the_batch_by_a_rule(base, optimizer, rule, factor):
    made = base(f"optimizer.name={optimizer}", rule=rule).of_runs((16, 32), 50.0)
    assert recipe_of(made, 16).optimizer.lr == factor


@pytest.mark.parametrize(
    ("own", "batches", "images"), [(8, (2, 4, 8), 2), (8, (12, 16), 4), (1, (2, 3), 1)]
)
def test_batch_norm_sees_the_same_number_of_images_at_all_batches(base, own, batches, images):
    made = base("batch_size=16", f"micro_batch_size={own}").of_runs(batches, 50.0)
    assert {recipe_of(made, batch).micro_batch_size for batch in batches} == {images}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_batches_that_are_accepted_divide_into_passes_of_which_batch_norm_has_statistics(data):
    ranks, own = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 200))
    part = data.draw(st.sampled_from([None, 2, 4]))
    norm = DIGITS.recipe.batch_norm.model_copy(update={"images": part})
    changed = {"batch_size": own * ranks, "micro_batch_size": own, "batch_norm": norm}
    recipe = DIGITS.recipe.model_copy(update=changed)
    base = Base(DIGITS, recipe, Path(), 1000, 0.0, ranks, "sqrt")
    batches = data.draw(st.lists(st.integers(1, 300).map(lambda n: n * ranks), min_size=2))
    with suppress(RecipeError):
        images = base.of_runs(base.checked(batches), 1.0).recipe.micro_batch_size
        assert 1 < images <= own
        assert all(batch // ranks % images == 0 for batch in batches)
        assert part is None or images % part == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_floor_of_the_loss_is_that_of_the_best_prediction(smoothing):
    shares = torch.full((1, 10), smoothing / 10, dtype=torch.float64)
    shares[0, 3] += 1 - smoothing
    best = torch.log(shares + 1e-30)
    lowest = F.cross_entropy(best, torch.tensor([3]), label_smoothing=smoothing)
    assert label_entropy(smoothing, 10) == pytest.approx(lowest.item(), abs=1e-9)


def test_only_training_images_are_read(base, tmp_path, photos):
    """Images are held out of those for training, and the folder of the others may be missing."""
    alone = tmp_path / "data"
    alone.mkdir()
    (alone / "train").symlink_to(photos / "train")
    made = base(f"data.path={alone}", "data.holdout=null")
    assert made.recipe.data.holdout == 5  # a tenth of 53
    assert made.images == 48
    assert base("data.holdout=13").images == 40


def test_what_cannot_be_estimated_is_refused(base):
    def fails(message, call, *given):
        with pytest.raises(RecipeError, match=f"^{message}"):
            call(*given)

    checked = base(ranks=2).checked
    fails("--batches: 4 is the only one; valid: such as 4,8", checked, (4,))
    fails("--batches: 9 does not divide into equal shares .*; valid: a multip", checked, (9,))
    fails("--batches: 6, 8 have no images per .*; valid: multiples of 4", checked, (6, 8))
    stage = "stages=[{from: 5ep, batch_size: 8, lr: sqrt}]"
    fails("stages: batch_size changes during", base, stage)
    fails("stop_after: the run ends before its schedule does", base, "stop_after=5ep")
    synthetic = "data={source: synthetic, holdout: null}"
    fails("data.source: synthetic images", base, synthetic)


def test_the_last_part_of_the_training_loss_counts():
    for losses, expected in (([9.0] * 17 + [5.0, 3.0, 1.0], 3.0), ([2.0], 2.0), ([], float("inf"))):
        assert final_loss(losses) == expected


@pytest.mark.slow("trains")
def test_a_run_by_the_trainer_is_read_from_its_folder_and_goes_on_where_it_was_stopped(
    base, tmp_path, monkeypatch
):
    made = base("label_smoothing=0.1").of_runs((4, 8), 2.0)
    made.write()
    run, folder = Run(8, 2.0, seed=0), tmp_path / "out" / "run"
    assert record_of(made, run, JOB, folder) is None
    losses = []

    def stops(metrics):
        """Tell the process to end, after half of the run."""
        losses.append(metrics.values["loss"])
        if len(losses) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(tune_runs._Recorder, "on_log", lambda self, metrics: stops(metrics))
        with pytest.raises(SystemExit):
            make(made, run, JOB, folder)
    assert record_of(made, run, JOB, folder) is None
    found = make(made, run, JOB, folder)
    lines = metrics_of(folder)
    assert losses == [line["loss"] for line in lines.train[:5]]  # these steps were not made again
    assert len(lines.train) == 10
    assert (found.run, found.status, found.trained) == (run, "finished", 2.0)
    assert found.loss == pytest.approx(
        lines.train[-1]["loss"] / 2 + lines.train[-2]["loss"] / 2 - made.floor
    )
    assert 0.2 < made.floor < 0.5
    assert found.top1 == lines.val[-1]["top1"]
    assert found.seconds > 0
    assert record_of(made, run, JOB, folder) == found
    assert not (folder / CHECKPOINTS).exists()
    other = base("label_smoothing=0.1", "optimizer.momentum=0.8").of_runs((4, 8), 2.0)
    other.write()
    message = "--out: .*run holds a run of another recipe: optimizer.momentum is now 0.8, was 0.9"
    with pytest.raises(AgreedError, match=message):
        record_of(other, run, JOB, folder)
    made = base("optimizer.name=sgd", "optimizer.lr=1e30").of_runs((4, 8), 1.0)
    made.write()
    found = make(made, Run(4, 1.0, 0), JOB, tmp_path / "out" / "diverged")
    assert (found.status, found.loss, found.trained < 1) == ("diverged", float("inf"), True)
