"""What is done with the gradients of a run: they are clipped, and their noise is measured."""

import pytest
import torch

from largebatch.recipes.training.folder.metrics import read_metrics
from tests.ranks import run_ranks
from tests.recipes.runs import assert_same, double_precision, weights
from tests.recipes.training.small import Small, small_networks, small_trainer

# --- clipping: optimizer.clip_grad_norm --------------------------------------------------------

#: Without momentum and decay, a step is as long as the gradient times the rate.
PLAIN = ["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0",
         "schedule.warmup=0", "schedule.name=constant", "schedule.end=0",
         "optimizer.lr=0.5", "evaluate_every=null", "log_every=1"]  # fmt: skip


def length_of_step(run_dir, *keys):
    """The length of the first step, of all weights together, and the norm that it logs."""

    def weights():
        state = trainer.optimizer.state
        masters = (state.get(p, {}).get("master", p) for p in trainer.model.parameters())
        return torch.cat([m.detach().double().flatten() for m in masters])

    with small_networks():
        trainer = small_trainer(run_dir, *PLAIN, "stop_after=1", *keys)
        before = weights()
        trainer.run()
    return (weights() - before).norm().item(), read_metrics(run_dir)[0].get("gradient_norm")


@pytest.mark.parametrize("precision", ["fp16", "bf16-master", "fp16-master"])
def test_a_step_of_sgd_is_as_long_as_the_key_says(tmp_path, precision):
    keys = [f"precision={precision}", f"loss_scale={1024 if 'fp16' in precision else 'auto'}"]
    free, logged = length_of_step(tmp_path / "free", *keys)
    assert logged is None
    for most in (2 * free / 0.5, 0.1 * free / 0.5):
        key = f"optimizer.clip_grad_norm={most}"
        length, norm = length_of_step(tmp_path / f"{most}", *keys, key)
        assert norm == pytest.approx(free / 0.5, rel=1e-3)
        assert length == pytest.approx(0.5 * min(norm, most), rel=1e-3)


@pytest.mark.slow("starts two ranks")
def test_ranks_clip_by_the_norm_of_the_reduced_gradient(tmp_path):
    keys = ["precision=fp16-master", "loss_scale=128", "optimizer.clip_grad_norm=0.01"]
    first, second = run_ranks(2, length_of_step, tmp_path, *keys, "micro_batch_size=6")
    assert first == second
    assert first[0] == pytest.approx(0.5 * 0.01, rel=1e-3)
    assert first[1] > 0.02


# --- noise: gradient_noise_every ---------------------------------------------------------------


def with_much_to_learn(classes):
    """The small network without dropout, which expects of each image the same class."""
    model = Small(classes)
    model[-2].p = 0
    torch.nn.init.constant_(model[-1].bias[:1], 3.0)
    return model


@pytest.fixture
def biased():
    with small_networks(with_much_to_learn):
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
    # which could not measure it, and has not begun
    keys += ["stages=[{from: 1ep, batch_size: 3, lr: keep}]"]
    sums = []  # of the gradients of a step so far
    with double_precision():
        trainer = small_trainer(tmp_path, *keys)
        step, parameters = trainer._take_step, [*trainer.model.parameters()]
        forward_backward = step.forward_backward

        def summing(*arguments):
            result = forward_backward(*arguments)
            sums.append(torch.cat([p.grad.flatten() for p in parameters]))
            return result

        step.forward_backward = summing
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
def test_training_is_the_same_with_noise(tmp_path, precision):
    keys = [f"precision={precision}", f"loss_scale={256 if 'fp16' in precision else 'auto'}"]
    keys += ["log_every=2", "optimizer.clip_grad_norm=0.5"]
    plain = small_trainer(tmp_path / "plain", *keys)
    plain.run()
    ours = small_trainer(tmp_path / "ours", *keys, "gradient_noise_every=1")
    ours.run()
    assert_same(weights(ours), weights(plain))
    assert measured(tmp_path / "plain") == {}
    assert [*measured(tmp_path / "ours")] == [2, 4, 6, 8]
