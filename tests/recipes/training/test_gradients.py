"""What is done with the gradients of a run: they are clipped, and their noise is measured."""

import math

import pytest
import torch

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.training.evaluate import Meter
from largebatch.recipes.training.folder.metrics import read_metrics
from tests.host_reads import NoHostReads
from tests.ranks import run_ranks
from tests.recipes.runs import JOB, assert_same, double_precision, make, train, weights
from tests.recipes.training.small import Small, small_networks, small_trainer

# --- clipping: optimizer.clip_grad_norm --------------------------------------------------------

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
@pytest.mark.parametrize("precision", ["fp16", "bf16-master", "fp16-master"])
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


# --- noise: gradient_noise_every ---------------------------------------------------------------


class Biased(Small):
    """The small network without dropout and with much to learn."""

    def __init__(self, classes):
        super().__init__(classes)
        self[-2].p = 0
        with torch.no_grad():
            self[-1].bias[0] = 3  # which most images are not


@pytest.fixture
def biased():
    with small_networks(Biased):
        yield


def measured(run_dir):
    """Steps and values of the lines that have a noise scale."""
    return {
        line["step"]: (line["noise_scale"], line["noise_scale_error"])
        for line in read_metrics(run_dir)
        if "noise_scale" in line
    }


@pytest.mark.usefixtures("biased")
def test_the_noise_is_that_of_the_gradients_of_the_micro_batches(tmp_path):
    """Of the steps that are due: four micro-batches each of three images."""
    keys = ["stop_after=4", "log_every=1", "micro_batch_size=3", "gradient_noise_every=2"]
    sums = []  # of the gradients of a step so far

    def summing(forward_backward, parameters):
        def called(*arguments):
            result = forward_backward(*arguments)
            sums.append(torch.cat([p.grad.flatten() for p in parameters]))
            return result

        return called

    with double_precision():
        trainer = small_trainer(tmp_path, *keys)
        step, parameters = trainer._take_step, [*trainer.model.parameters()]
        step.forward_backward = summing(step.forward_backward, parameters)
        trainer.run()
    rows = []
    for of_step in torch.stack(sums).view(4, 4, -1):
        gradients = 4 * of_step.diff(dim=0, prepend=torch.zeros_like(of_step[:1]))
        variance = gradients.var(0).sum()
        norm2 = gradients.mean(0).square().sum() - variance / 4
        rows.append(torch.stack([norm2, 3 * variance]))
    found = measured(tmp_path)
    assert [*found] == [2, 3, 4]
    assert found[2] == found[3]
    for step, (norm2, trace) in ((2, rows[1]), (4, rows[1] + rows[3])):
        assert found[step][0] == pytest.approx((trace / norm2).item(), rel=1e-6)
    assert found[2][1] is None  # one step has no standard error
    assert found[4][1] > 0


@pytest.mark.slow("trains twice in each precision")
@pytest.mark.usefixtures("biased")
@pytest.mark.parametrize("precision", ["fp32", "fp16-master"])
def test_training_is_the_same_with_noise_and_does_not_wait_for_the_device(tmp_path, precision):
    scaled = ["loss_scale=256"] if "fp16" in precision else []
    keys = ["log_every=2", "optimizer.clip_grad_norm=0.5", f"precision={precision}", *scaled]
    plain = small_trainer(tmp_path / "plain", *keys)
    plain.run()
    ours = small_trainer(tmp_path / "ours", *keys, "gradient_noise_every=1")
    measure = ours._built.noise.step

    def checked(*arguments):
        with NoHostReads():
            return measure(*arguments)

    ours._built.noise.step = checked
    ours.run()
    assert_same(weights(ours), weights(plain))
    assert measured(tmp_path / "plain") == {}
    assert [*measured(tmp_path / "ours")] == [2, 4, 6, 8]


@pytest.mark.usefixtures("biased")
def test_noise_that_cannot_be_measured_is_refused(tmp_path):
    key = "gradient_noise_every=2"
    one_pass = r"gradient_noise_every: a batch of 12 .* valid: a micro_batch_size of at most 6, or"
    with pytest.raises(RecipeError, match=one_pass):
        small_trainer(tmp_path, key, "micro_batch_size=12")
    later = "stages=[{from: 1ep, batch_size: 4, micro_batch_size: 4, lr: keep}]"
    with pytest.raises(RecipeError, match=r"a batch of 4 images .* at most 2, or null"):
        small_trainer(tmp_path, key, later)
    small_trainer(tmp_path, key, later, "stop_after=2")
    with pytest.raises(RecipeError, match=r"gradient_noise_every: 9ep is longer than the run"):
        small_trainer(tmp_path, "gradient_noise_every=9ep")
