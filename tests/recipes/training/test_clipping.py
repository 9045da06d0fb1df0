"""The key optimizer.clip_grad_norm: gradients are clipped in each step, their norm is logged."""

import math

import pytest
import torch

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.training.evaluate import Meter
from largebatch.recipes.training.folder.metrics import read_metrics
from tests.ranks import run_ranks
from tests.recipes.runs import JOB, assert_same, make, train

#: Without momentum and decay, a step is as long as the gradient times the rate.
PLAIN = ["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0",
         "schedule.warmup=0", "schedule.name=constant", "schedule.end=0",
         "optimizer.lr=0.5", "evaluate_every=null"]  # fmt: skip


def length_of_step(trainer):
    """The length of the first step, of all weights together, and the norm that it logs."""

    def weights():
        state = trainer.optimizer.state
        masters = (state.get(p, {}).get("master", p) for p in trainer.model.parameters())
        return torch.cat([m.detach().double().flatten() for m in masters])

    before = weights()
    trainer.run()
    (line,) = (line for line in read_metrics(trainer.run_dir) if line["split"] == "train")
    return (weights() - before).norm().item(), line.get("gradient_norm")


@pytest.mark.slow("trains in several precisions")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-master", "fp16-master"])
def test_a_step_of_sgd_is_as_long_as_the_key_says(photos, tmp_path, precision):
    keys = [*PLAIN, "stop_after=1", f"precision={precision}", "loss_scale=auto"]
    keys += ["loss_scale=1024"] if "fp16" in precision else []
    free, logged = length_of_step(make(photos, tmp_path / "free", *keys))
    assert logged is None
    for most in (2 * free / 0.5, 0.1 * free / 0.5):
        key = f"optimizer.clip_grad_norm={most}"
        length, norm = length_of_step(make(photos, tmp_path / f"{most}", *keys, key))
        assert norm == pytest.approx(free / 0.5, rel=1e-3)
        assert length == pytest.approx(0.5 * min(norm, most), rel=1e-3)


@pytest.mark.slow("trains three times")
@pytest.mark.parametrize(
    ("name", "precision"), [("lars", "fp16-master"), ("sgd", "fp32"), ("AdamW", "bf16")]
)
def test_a_norm_that_is_never_reached_changes_nothing(photos, tmp_path, name, precision):
    keys = [f"optimizer.name={name}", f"precision={precision}", "stop_after=2", "optimizer.lr=0.01"]
    keys += ["micro_batch_size=16", "evaluate_every=null", "optimizer.weight_decay=0.01"]
    without = train(photos, tmp_path / "without", *keys)
    assert_same(train(photos, tmp_path / "clipped", *keys, "optimizer.clip_grad_norm=1e6"), without)
    short = train(photos, tmp_path / "short", *keys, "optimizer.clip_grad_norm=0.001")
    # The trust ratio cancels the norm except where there is weight decay.
    assert not all(torch.equal(short[key], value) for key, value in without.items())


@pytest.mark.slow("trains in several precisions")
def test_the_mean_norm_between_readings_is_logged(photos, tmp_path):
    keys = [*PLAIN, "optimizer.clip_grad_norm=0.1", "stop_after=4"]
    train(photos, tmp_path / "each", *keys, "log_every=1")
    train(photos, tmp_path / "both", *keys, "log_every=2")
    each, both = (
        [line["gradient_norm"] for line in read_metrics(tmp_path / run)] for run in ("each", "both")
    )
    assert len(each) == 4
    assert len(set(each)) == 4
    assert both == pytest.approx([(each[0] + each[1]) / 2, (each[2] + each[3]) / 2])


def test_norms_of_skipped_steps_are_left_out():
    meter = Meter(JOB.device)
    x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
    for norms, expected in (
        ((1.0, math.inf, 2.0, math.nan), 1.5),
        ((math.inf,), math.nan),
        ((), 0),
    ):
        meter.add(torch.tensor(1.0), x, y)
        for norm in norms:
            meter.add_gradient_norm(torch.tensor(norm))
        values, count = meter.read(JOB)
        assert count == 4
        assert values.get("gradient_norm", 0) == pytest.approx(expected, nan_ok=True)


def clipped_on_ranks(root, run_dir, *keys):
    return length_of_step(make(root, run_dir, *keys))


@pytest.mark.slow("starts two ranks")
def test_ranks_clip_by_the_norm_of_the_reduced_gradient(photos, tmp_path):
    keys = [*PLAIN, "stop_after=1", "precision=fp16-master", "optimizer.clip_grad_norm=0.01"]
    first, second = run_ranks(2, clipped_on_ranks, photos, tmp_path, *keys, "loss_scale=128")
    assert first == second
    assert first[0] == pytest.approx(0.5 * 0.01, rel=1e-3)
    assert first[1] > 0.02


@pytest.mark.parametrize("value", ["0", "-1", "big"])
def test_a_norm_that_is_not_positive_is_refused(photos, tmp_path, value):
    with pytest.raises(RecipeError, match=r"^recipe digits: optimizer\.clip_grad_norm: "):
        make(photos, tmp_path, f"optimizer.clip_grad_norm={value}")
