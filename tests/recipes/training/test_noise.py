"""The key gradient_noise_every: its metrics, and that training is the same with it."""

import pytest
import torch

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.training.folder.metrics import read_metrics
from tests.host_reads import NoHostReads
from tests.recipes.runs import assert_same, double_precision, weights
from tests.recipes.training.small import Small, small_trainer


@pytest.fixture(autouse=True)
def biased(monkeypatch):
    """Let recipes build the small network, without dropout and with much to learn."""

    def build(recipe, classes):
        torch.manual_seed(7)
        model = Small(classes)
        model[-2].p = 0
        with torch.no_grad():
            model[-1].bias[0] = 3  # which most images are not
        return model

    monkeypatch.setattr("largebatch.recipes.training.build.build_model", build)
    monkeypatch.setattr("largebatch.recipes.training.build.check_image_size", lambda *_: None)


def measured(run_dir):
    """Steps and values of the lines that have a noise scale."""
    return {
        line["step"]: (line["noise_scale"], line["noise_scale_error"])
        for line in read_metrics(run_dir)
        if "noise_scale" in line
    }


def test_the_metrics_are_those_of_the_gradients_of_the_micro_batches(tmp_path):
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
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-master", "fp16-pure"])
def test_training_is_the_same_with_it_and_does_not_wait_for_the_device(tmp_path, precision):
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


def test_what_cannot_be_measured_is_refused(tmp_path):
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
