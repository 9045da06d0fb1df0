"""Profiles of a model's gradients in the order of backward, estimated."""

import pytest
import timm
import torch
from torch import nn

from largebatch.comm import estimate_profile


def test_resnet50_has_161_gradients_of_102_mb():
    with torch.device("meta"):
        model, inputs = timm.create_model("resnet50"), [torch.empty(1, 3, 224, 224)]
    found = estimate_profile(model, inputs, 0.3)
    assert len(found.gradients) == 161
    assert found.size_bytes == 25_557_032 * 4
    assert found.compute_seconds == pytest.approx(0.3)
    assert found.backward_seconds == pytest.approx(0.2)
    half = estimate_profile(model, inputs, 0.3, gradient_dtype=torch.float16)
    assert (half.size_bytes, half.element_bytes) == (found.size_bytes // 2, 2)
    slower = found.scaled(0.9)
    assert slower.compute_seconds == pytest.approx(0.9)
    ready = [3 * gradient.ready_seconds for gradient in found.gradients]
    assert [gradient.ready_seconds for gradient in slower.gradients] == pytest.approx(ready)


def test_estimated_time_is_proportional_to_the_operations_of_layers():
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 30), nn.Linear(30, 2))
    found = estimate_profile(model, [torch.empty(5, 10)], 3.0)
    # 100, 300 and 60 multiplications; two of the three seconds are backward.
    ready = {g.name: g.ready_seconds for g in found.gradients}
    assert ready["3.weight"] == ready["3.bias"] == pytest.approx(2 * 60 / 460)
    assert ready["2.weight"] == pytest.approx(2 * 360 / 460)
    assert ready["0.weight"] == pytest.approx(2.0)
    assert [g.name[0] for g in found.gradients] == list("332200")


def test_shared_and_unused_parameters_come_last():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(4, 4)
            self.shared = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x):
            return self.shared(self.frozen(self.shared(x)))

    found = estimate_profile(Odd(), [torch.empty(1, 4)], 3.0)
    names = [g.name for g in found.gradients]
    assert sorted(names) == ["shared.bias", "shared.weight", "unused.bias", "unused.weight"]
    assert names[-1].startswith("unused")
    assert all(g.ready_seconds == pytest.approx(2.0) for g in found.gradients)
