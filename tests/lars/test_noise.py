"""GradientNoise: exact against gradients of single examples, unbiased, and over which steps."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.lars import GradientNoise


def network(norm=None):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 2), norm or nn.Identity(), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)]
    return nn.Sequential(*layers).double()


def examples(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 3, 3, dtype=torch.float64, generator=generator)
    return images, torch.randint(4, (count,), generator=generator)


def measured(noise, model, batches):
    """Measure one step whose backward passes are of ``batches``."""
    for images, labels in batches:
        (F.cross_entropy(model(images), labels) / len(batches)).backward()
    noise.step()
    model.zero_grad()


def moments(gradients, unbiased):
    """|mean|² and the total variance of gradients, shape ``[n, parameters]``."""
    return gradients.mean(0).square().sum().item(), gradients.var(0, unbiased).sum().item()


class Weights(nn.Module):
    """Parameters whose gradient by ``model(x).mean()`` is the mean of x, shape ``[n, 3]``."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, dtype=dtype))
        self.b = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, x):
        return x[:, :2] @ self.a + x[:, 2] * self.b


def pass_of(model, x, factor=1.0):
    (factor * model(x).mean()).backward()


values = st.floats(-4, 4).filter(lambda v: v == 0 or abs(v) > 1e-3)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(values, values, values), min_size=2, max_size=3),
    st.sampled_from([(1, 2), (2, 2), (1, 3)]),
    st.sampled_from(["divided", "summed"]),
)
def test_the_estimates_are_unbiased(gradients, sizes, loss):
    """Over all draws with replacement their mean is that of the examples' gradients, exactly."""
    (batch_size, passes), singles = sizes, torch.tensor(gradients, dtype=torch.float64)
    norm2, trace = moments(singles, unbiased=False)
    draws = [*product(range(len(singles)), repeat=batch_size * passes)]
    model = Weights()
    noise = GradientNoise(model.parameters(), batch_size, window=len(draws))
    factor = 1 / passes if loss == "divided" else 1.0
    for draw in draws:
        for batch in torch.tensor(draw).split(batch_size):
            pass_of(model, singles[batch], factor)
        noise.step()
        model.zero_grad()
    found, unit = noise.estimate(), (factor * passes) ** 2
    size = 1e-9 * singles.square().sum().item()
    assert found.gradient_norm2 / unit == pytest.approx(norm2, abs=size)
    assert found.trace / unit == pytest.approx(trace, abs=size)
    if norm2 > 1e-3 * (norm2 + trace):
        assert found.noise_scale == pytest.approx(trace / norm2, rel=1e-4, abs=1e-9)


def test_steps_that_are_not_watched_have_no_hooks_and_are_not_measured():
    model = Weights()
    noise = GradientNoise(model.parameters(), 1)
    pass_of(model, torch.ones(1, 3, dtype=torch.float64))  # of a step that is given up
    model.zero_grad()
    noise.watch(False)
    assert not any(p._backward_hooks for p in model.parameters())
    for _ in range(2):
        pass_of(model, torch.ones(1, 3, dtype=torch.float64))
    noise.step()
    model.zero_grad()
    assert noise.estimate().steps == 0
    noise.watch()
    for x in (1.0, 3.0):
        pass_of(model, torch.full((1, 3), x, dtype=torch.float64), 1 / 2)
    noise.step()
    found = noise.estimate()
    assert found.steps == 1
    assert found.trace == pytest.approx(6)  # three times the variance of 1 and 3
    assert math.isnan(found.standard_error)


def test_a_gradient_that_drowns_in_noise_has_no_noise_scale():
    model = Weights()
    noise = GradientNoise(model.parameters(), 1)
    for _ in range(3):
        for x in (1.0, -1.0):
            pass_of(model, torch.full((1, 3), x, dtype=torch.float64), 1 / 2)
        noise.step()
        model.zero_grad()
    found = noise.estimate()
    assert found.gradient_norm2 == pytest.approx(-3)
    assert math.isnan(found.noise_scale)
    assert math.isnan(found.standard_error)
