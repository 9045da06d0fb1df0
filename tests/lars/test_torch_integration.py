"""LARS with learning rates in tensors, and with torch.compile."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from largebatch.lars import LARS, as_scheduler, polynomial, split_parameters

STEPS = 12


def problem():
    """Return a model with norms and biases, its inputs and its targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    inputs = torch.randn(64, 8)
    return model, inputs, inputs[:, :1] * inputs[:, 1:2]


def lars(model, lr=0.05, **options):
    return LARS(split_parameters(model, 1e-2), lr, trust_coefficient=0.05, **options)


def train(model, inputs, targets, optimizer, after):
    """Train, calling ``after`` after each step, and return the losses."""
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after()
    return losses


def assert_same(model, other):
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dialect", ["mlperf-corrected", "torch"])
def test_a_tensor_learning_rate_is_set_in_place(dialect):
    model, inputs, targets = problem()
    with_number = copy.deepcopy(model)
    rate = torch.tensor(0.05)
    optimizer = lars(model, rate, dialect=dialect)
    schedule = polynomial(0.3, STEPS, warmup_steps=4)
    scheduler = as_scheduler(optimizer, schedule)
    losses = train(model, inputs, targets, optimizer, after=scheduler.step)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert rate == schedule(STEPS)

    optimizer = lars(with_number, dialect=dialect)
    scheduler = as_scheduler(optimizer, schedule)
    expected = train(with_number, inputs, targets, optimizer, after=scheduler.step)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same(model, with_number)


@pytest.mark.parametrize(
    ("what", "backend", "dialect"),
    [
        ("model", "aot_eager", "mlperf"),
        ("step", "eager", "mlperf"),
        ("step", "eager", "torch"),
    ],
)
def test_compiled_training_matches_eager(what, backend, dialect):
    """With back ends that need no C++ compiler, and a changing learning rate."""

    def run(compiles):
        torch.compiler.reset()
        model, inputs, targets = problem()
        optimizer = lars(model, torch.tensor(0.05), dialect=dialect)
        scheduler = as_scheduler(optimizer, polynomial(0.3, STEPS, warmup_steps=4))
        compiled = model
        if compiles and what == "model":
            compiled = torch.compile(model, backend=backend)
        elif compiles:  # after the scheduler, which wraps a method of any torch optimizer
            optimizer.step = torch.compile(optimizer.step, backend=backend)
        losses = train(compiled, inputs, targets, optimizer, after=scheduler.step)
        return losses, model, optimizer.trust_ratios()

    losses, model, ratios = run(compiles=True)
    plain_losses, plain, plain_ratios = run(compiles=False)
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    assert_same(model, plain)
    assert ratios == pytest.approx(plain_ratios, rel=1e-4)


def test_a_compiled_model_splits_into_the_same_groups():
    model, _, _ = problem()
    groups = split_parameters(torch.compile(model, backend="eager"), 1e-2)
    assert [[name.removeprefix("_orig_mod.") for name, _ in g["params"]] for g in groups] == [
        [name for name, _ in g["params"]] for g in split_parameters(model, 1e-2)
    ]
