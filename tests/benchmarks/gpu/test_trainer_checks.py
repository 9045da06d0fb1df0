"""The check of compiled steps: that it finds a step that computes something else."""

import pytest
import torch

from benchmarks.gpu import trainer_checks
from largebatch.amp import Precision

CPU = torch.device("cpu")


@pytest.mark.slow("trains three runs of a small network")
def test_a_micro_batch_that_is_left_out_of_compiled_steps_is_found(monkeypatch):
    backward, train, calls = Precision.backward, trainer_checks.train, []
    is_compiled = False

    def noted(device, steps, settings):
        nonlocal is_compiled
        is_compiled = "compile=default" in settings
        return train(device, steps, settings)

    def every_other(self, loss):
        calls.append(loss)
        backward(self, 0 * loss if is_compiled and len(calls) % 2 == 0 else loss)

    monkeypatch.setattr(trainer_checks, "train", noted)
    monkeypatch.setattr(Precision, "backward", every_other)
    with pytest.raises(AssertionError, match="of the way apart"):
        trainer_checks.compiled_is_eager("bf16", CPU)


def test_the_distance_is_a_share_of_the_change():
    one = {"a": torch.tensor([2.0, 0.0]), "b": torch.tensor([0.0, 2.0]), "still": torch.zeros(2)}
    assert trainer_checks.distance(one, one) == 0
    assert trainer_checks.distance(one, {name: 0 * value for name, value in one.items()}) == 1
    other = one | {"b": torch.tensor([0.0, 1.0])}
    assert trainer_checks.distance(one, other) == pytest.approx(0.5**1.5)
