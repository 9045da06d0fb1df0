"""Branches from a checkpoint of the recipe's own run: where they start, and what changes there."""

import pytest
import torch

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.lr import learning_rates
from largebatch.recipes.training.timeline import timeline_of
from largebatch.recipes.training.trainer import Trainer
from largebatch.recipes.tune.critical_batch.branches import branch_overrides, trunk_overrides
from largebatch.recipes.tune.critical_batch.estimate import Budget, estimate
from largebatch.recipes.tune.critical_batch.runs import Base, Run
from largebatch.recipes.tune.trial import measure
from tests.recipes.runs import JOB
from tests.recipes.tune.critical_batch.law import loaded

EPOCHS, AFTER = 4.0, 2.0  # of 10 steps of 4 images


@pytest.fixture(scope="module")
def trunk(photos, tmp_path_factory):
    """The recipe's own run up to a checkpoint at step 20, and its folder."""
    out = tmp_path_factory.mktemp("branches")
    base = Base.of(loaded(photos), out, 1)
    base.write()
    measure(str(base.path), trunk_overrides(base, EPOCHS, AFTER), JOB, out / "trunk")
    return base, out / "trunk"


def branch(trunk, batch, folder, epochs=1.0):
    base, path = trunk
    overrides = branch_overrides(base, Run(batch, epochs, 0, AFTER), EPOCHS, path)
    return load(str(base.path), [*overrides, f"run_dir={folder}"])


@pytest.mark.slow("trains a trunk and branches")
@pytest.mark.parametrize(("batch", "factor"), [(4, 1.0), (8, 2**0.5), (20, 5**0.5), (2, 0.5**0.5)])
def test_a_branch_continues_the_trunk_with_another_batch(trunk, tmp_path, batch, factor):
    base, path = trunk
    made = Trainer.of(branch(trunk, batch, tmp_path / "branch"), JOB, quiet=True)
    whole = load(str(base.path), [*base.overrides(Run(4, EPOCHS, 0)), "resume=true"])
    same = whole.recipe.model_copy(update={"run_dir": str(path)})
    saved = Trainer.of(type(whole)(whole.name, "", same), JOB, quiet=True)
    # It has the trunk's weights and momentum,
    assert made.step == saved.step == 20
    for ours, theirs in zip(made.model.parameters(), saved.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        state = made.optimizer.state[ours]["momentum_buffer"]
        assert state.count_nonzero()
        assert torch.equal(state, saved.optimizer.state[theirs]["momentum_buffer"])
    # reads the trunk's next images, an epoch in all,
    assert made.timeline.batch_size(20) == batch
    assert (made.last_step - made.step) * batch == 40
    # and its rate falls from the trunk's, times the factor, to 0.
    timeline = timeline_of(saved.context.recipe, base.images)
    rate = learning_rates(saved.context.recipe, timeline).schedule(20)
    assert 0 < rate < saved.context.recipe.optimizer.lr
    assert made._built.schedule(20) == pytest.approx(factor * rate)
    half = (20 + made.last_step) // 2
    left = (made.last_step - half) / (made.last_step - 20)
    assert made._built.schedule(half) == pytest.approx(left * factor * rate)
    assert made._built.schedule(made.last_step) == pytest.approx(0, abs=1e-12)


def test_a_branch_needs_a_checkpoint_where_it_begins(trunk):
    base, path = trunk
    with pytest.raises(RecipeError, match=r"--out: .* has no checkpoint at step 30"):
        branch_overrides(base, Run(8, 1.0, 0, 3.0), EPOCHS, path)


@pytest.mark.slow("makes eight branches")
def test_branches_of_all_points_and_batches_are_made_and_compared(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("largebatch.recipes.tune.critical_batch.estimate.FEWEST_UPDATES", 1)
    said = []
    options = {"batches": (4, 8), "epochs": EPOCHS, "method": "branches", "say": said.append}
    few = estimate(loaded(photos), JOB, tmp_path / "out", budget=Budget(epochs=3), **options)
    assert few.left_out
    found = estimate(loaded(photos), JOB, tmp_path / "out", budget=Budget(epochs=30), **options)
    made = [record for record in found.records if record.kind == "run"]
    assert len(made) == len(said) - 2 == 8
    assert {record.run.after for record in made} == {1.0, 2.0}
    assert {record.trained for record in made} == {1.0, 2.0}
    trunks = [record.trained for record in found.records if record.kind == "trunk"]
    assert trunks == [1.0, 1.0]
    assert list(found.methods) == ["branches"]
    assert not found.left_out


def test_stages_have_no_place_in_branches(photos, tmp_path):
    staged = loaded(photos, "stages=[{from: 5ep, image_size: 16}]")
    with pytest.raises(RecipeError, match="--method: branches take the place of the recipe's st"):
        estimate(staged, JOB, tmp_path / "out", batches=(4, 8), epochs=4.0, method="branches")
