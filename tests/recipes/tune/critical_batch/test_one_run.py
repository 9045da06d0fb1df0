"""What one run is recorded as."""

import pytest

from largebatch.recipes.schema.load import load
from largebatch.recipes.training.folder.metrics import METRICS
from largebatch.recipes.tune.critical_batch import one_run
from largebatch.recipes.tune.critical_batch.one_run import final_loss
from largebatch.recipes.tune.critical_batch.runs import Base, Run
from largebatch.recipes.tune.trial import measure
from tests.recipes.runs import JOB
from tests.recipes.tune.critical_batch.law import loaded


def test_the_last_part_of_the_training_loss_counts_by_its_images():
    falling = [(1.0, 9.0), (8.0, 5.0), (9.0, 3.0), (10.0, 1.0)]
    assert final_loss(falling) == pytest.approx((1.0 * 1 + 0.5 * 3) / 1.5)
    assert final_loss([(6.0, 4.0), (7.8, 3.0), (8.0, 1.0)], since=6.0) == pytest.approx(
        (0.2 * 1 + 0.1 * 3) / 0.3
    )
    assert final_loss([(4.0, 2.0)]) == 2.0
    assert final_loss([]) == float("inf")


def test_a_run_by_the_trainer_is_recorded_and_leaves_no_files(photos, tmp_path, monkeypatch):
    base = Base.of(loaded(photos, "label_smoothing=0.1"), tmp_path, 1)
    base.write()
    run = Run(8, 2.0, seed=0)
    seen = []

    def kept(*arguments):
        seen.append(measure(*arguments))
        assert (arguments[-1] / METRICS).exists()
        return seen[0]

    monkeypatch.setattr(one_run, "measure", kept)
    found, signal = one_run.make_run(
        base, run, JOB, tmp_path / "run", overrides=base.overrides(run)
    )
    assert signal == 0
    assert found.run == run
    assert (found.status, found.trained, found.precision) == ("finished", 2.0, "fp32")
    assert found.loss == pytest.approx(final_loss(seen[0].training) - base.floor)
    assert 0.2 < base.floor < 0.5
    assert (found.held_out_loss, found.top1) == (seen[0].readings[0].loss, seen[0].readings[0].top1)
    assert 0 < found.train_seconds < found.seconds
    assert load(str(base.path), base.overrides(run)).recipe.batch_size == 8
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
