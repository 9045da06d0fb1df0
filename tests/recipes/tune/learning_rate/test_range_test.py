"""The range test finds where an optimizer diverges, under any ranks, and refuses bad ranges."""

import json
import math
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from largebatch.recipes.commands.tree import app
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.ranks import Job
from largebatch.recipes.training import trainer
from largebatch.recipes.tune.learning_rate.range_report import numbers, write
from largebatch.recipes.tune.learning_rate.range_test import (
    MARGIN,
    analyse,
    range_test,
)
from tests.ranks import run_ranks
from tests.recipes.runs import BASE, NO_BATCH_NORM, double_precision


def rising(low, high, steps):
    return [low * (high / low) ** (step / steps) for step in range(steps)]


def quadratic(rates, *, largest, momentum=0.0, noise=0.0, seed=0):
    """Losses of SGD on a quadratic of two eigenvalues, the larger one as given, and a floor."""
    random = Random(seed)
    curvatures = (0.01 * largest, largest)
    weights, buffers = [c**-0.5 for c in curvatures], [0.0, 0.0]
    losses = []
    for rate in rates:
        losses.append(1 + 0.5 * sum(c * w * w for c, w in zip(curvatures, weights, strict=True)))
        for i, c in enumerate(curvatures):
            gradient = c * weights[i] + noise * c**0.5 * random.gauss(0, 1)
            buffers[i] = momentum * buffers[i] + gradient
            weights[i] -= rate * buffers[i]
    return losses


@settings(max_examples=20)
@given(
    largest=st.floats(1e-3, 1e3),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    noise=st.floats(0.03, 0.3),
    seed=st.integers(0, 99),
)
def test_sgd_on_a_quadratic_diverges_at_its_stability_limit(largest, momentum, noise, seed):
    """Earlier where steps amplify much noise just below it, later as the loss is smoothed."""
    limit = 2 * (1 + momentum) / largest  # Polyak 1964; without momentum, 2 / largest eigenvalue
    rates = rising(limit / 1e3, limit * 1e2, 200)
    losses = quadratic(rates, largest=largest, momentum=momentum, noise=noise, seed=seed)
    found = analyse(rates, losses)
    assert 0.5 * limit < found.diverging_lr < 3 * limit  # 0.71 to 2.24 in 1,500 cases
    quiet = quadratic(rates, largest=largest, momentum=momentum, noise=noise / 10, seed=seed)
    assert limit < analyse(rates, quiet).diverging_lr < 3 * limit
    assert found.suggested_lr == found.diverging_lr / MARGIN
    assert found.steepest_lr <= found.lowest_lr < found.diverging_lr


def test_a_run_that_does_not_diverge_suggests_no_peak():
    rates = rising(1e-3, 1.0, 100)
    found = analyse(rates, quadratic(rates, largest=1.0, noise=0.1))
    assert found.diverging_lr is None
    assert found.suggested_lr is None
    assert len(found.smoothed) == 100


def test_losses_that_are_not_finite_or_refused_are_divergence():
    rates = rising(0.1, 10, 50)
    falling = [2 - 0.02 * step for step in range(40)]
    assert analyse(rates, [*falling, math.nan]).diverging_lr == rates[40]
    assert analyse(rates, [*falling, math.inf]).diverging_lr == rates[40]
    # FP16 gradients that overflow at every loss scale end the run before the loss is read.
    assert analyse(rates, falling, failed=True).diverging_lr == rates[40]
    with pytest.raises(RecipeError, match=r"--lr: the run diverges at once, at 0.1.*a lower LOW"):
        analyse(rates, [2.0, math.nan])


def test_a_jump_of_the_loss_that_comes_back_is_no_divergence():
    """As of SGD at batch 2,560 on CIFAR-10 near a rate of 0.6."""
    rates = rising(0.01, 10, 60)
    losses = [2.3 - 0.02 * step for step in range(60)]
    losses[30:34] = [2.4, 2.97, 2.78, 2.4]
    assert analyse(rates, losses).diverging_lr is None


KEYS = ["optimizer.name=sgd", "optimizer.trust_coefficient=0.001", *NO_BATCH_NORM]


def range_of(root, folder, *overrides, base=BASE, **options):
    distributed = dist.is_initialized()
    world_size = dist.get_world_size() if distributed else 1
    rank = dist.get_rank() if distributed else 0
    job = Job(rank, world_size, world_size, torch.device("cpu"))
    here = [*base, f"data.path={root}", *overrides]
    return range_test("digits", here, job, folder, **options)


@pytest.mark.slow("trains with each schedule")
def test_the_rates_of_a_run_rise_from_low_to_high_whatever_the_schedule(photos, tmp_path):
    """Schedule, stages and the like of the recipe do not matter, and no file is left."""
    steps_taken = []
    keys = [
        *KEYS, "schedule={name: step, milestones: [1ep], warmup: 0.5ep, end: 0}",
        "stages=[{from: 1ep, batch_size: 32, lr: linear}]", "ema.decay=0.9", "stop_after=3",
        "scale=linear", "evaluate_every=1", "target_accuracy=1", "batch_size=32",
        "gradient_noise_every=99ep",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        step = trainer.Trainer._update

        def update(self, batches, meter):
            steps_taken.append(self.optimizer.param_groups[0]["lr"])
            step(self, batches, meter)

        patch.setattr(trainer.Trainer, "_update", update)
        base = [key for key in BASE if not key.startswith("optimizer.lr=")]
        out = tmp_path / "out"
        test = range_of(photos, out, *keys, base=base, lr=(1e-4, 1e-2), steps=20)
    assert steps_taken[:20] == pytest.approx(test.lr)
    assert test.lr == pytest.approx(rising(1e-4, 1e-2, 20))
    assert test.present_lr == 0.5  # scaled from 4 at batch 256
    assert test.findings.diverging_lr is None
    assert len(test.loss) == 20
    assert test.epochs == pytest.approx(20 * 32 / 53)
    assert not list(out.iterdir())


def test_a_run_that_diverges_ends_early(photos, tmp_path):
    test = range_of(photos, tmp_path, *KEYS, steps=20, lr=(0.1, 1e9))
    assert test.findings.diverging_lr == test.lr[-1] < 1e5
    assert test.epochs < 12 * 16 / 53
    content = numbers(test)
    assert len(content["lr"]) == len(content["loss"]) == len(content["smoothed"])
    assert content["suggested_lr"] == test.lr[-1] / MARGIN
    paths = write(test, tmp_path)
    assert json.loads((tmp_path / "range.json").read_text()) == json.loads(json.dumps(content))
    assert [path.stat().st_size > 0 for path in paths] == [True, True]


def in_double(root, folder):
    with double_precision():
        return range_of(root, folder, *KEYS, steps=20, lr=(0.1, 1e9))


@pytest.mark.slow("trains on one process and on 2 ranks")
def test_two_ranks_find_what_one_does(photos, tmp_path):
    """Losses are means over ranks, and all ranks stop together."""
    alone = in_double(photos, tmp_path / "1")
    for found in run_ranks(2, in_double, photos, tmp_path / "2"):
        assert found.ranks == 2
        assert found.loss == pytest.approx(alone.loss, rel=1e-6, nan_ok=True)
        assert found.findings.diverging_lr == alone.findings.diverging_lr is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "1..0.1"], "--lr: 1..0.1 is an empty range; valid: LOW..HIGH with 0 < LOW"),
        (["--lr", "0..1"], "--lr: 0..1 is an empty range"),
        (["--lr", "1..inf"], "--lr: 1..inf is an empty range"),
        (["--steps", "3"], "--steps: 3 updates give no curve; valid: at least 20"),
        (["optimizer.lr=0"], "optimizer.lr: 0 gives no range of rates; valid: a range by --lr"),
        (["--trials", "3"], "--trials: only for a search; valid with --range: --lr, --steps"),
        (["--coarse", "0.25"], "--coarse: only for a search"),
        (["--metric", "loss"], "--metric: only for a search"),
        (["--seed", "0"], "--seed: only for a search"),
        (["data.path=nowhere"], "data.path: no folder nowhere"),
        (["--out", "{file}"], "--out: cannot write into"),
    ],
)
def test_bad_input_is_refused(photos, tmp_path, options, message):
    (tmp_path / "file").touch()
    options = [option.format(file=tmp_path / "file") for option in options]
    keys = ["tune", "lr", "digits", f"data.path={photos}", *BASE, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*keys, "--range", *options])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"largebatch: error: {message}")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out" / "range.json").exists()


def test_steps_need_a_range_test(photos):
    result = CliRunner().invoke(app, ["tune", "lr", "digits", "--steps", "30"])
    assert result.exit_code == 2
    assert "--steps: only for a range test; valid: with --range" in result.stderr


def test_the_command_writes_a_table_a_picture_and_numbers(photos, tmp_path):
    keys = [*BASE, *KEYS, f"data.path={photos}"]
    arguments = ["tune", "lr", "digits", *keys, "--range", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--lr", "0.01..1e6", "--steps", "20"])
    assert result.exit_code == 0, result.stderr
    assert "SGD diverges at" in result.stdout
    assert "suggested peak" in result.stdout
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["range.json", "range.png"]
