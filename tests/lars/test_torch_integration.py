"""LARS with other parts of torch: schedulers, clipping, torch.compile and weight averaging."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.testing import assert_close

from largebatch.lars import DIALECTS, LARS, as_scheduler, polynomial, split_parameters

STEPS = 12


def problem():
    """Return a model with norms and biases, its inputs and its targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    inputs = torch.randn(64, 8)
    return model, inputs, inputs[:, :1] * inputs[:, 1:2]


def lars(model, lr=0.05, **options):
    return LARS(split_parameters(model, 1e-2), lr, trust_coefficient=0.05, **options)


def train(model, inputs, targets, optimizer, before=lambda step: None, after=lambda loss: None):
    """Train, calling ``before`` and ``after`` in each step, and return the losses."""
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        before(step)
        optimizer.step()
        losses.append(loss.item())
        after(losses[-1])
    return losses


def assert_same(model, other, **tolerances):
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(ours, theirs, **tolerances or {"rtol": 0, "atol": 0})


def settings(optimizer):
    """Return what a scheduler may set: the learning rate and momentum of each group."""
    return [(float(group["lr"]), group["momentum"]) for group in optimizer.param_groups]


SCHEDULERS = {
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=[0.5, 0.2], total_steps=STEPS + 1),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=[lambda s: 1 + s, lambda s: 1 / (1 + s)]),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4),
            lr_scheduler.PolynomialLR(optimizer, total_iters=STEPS, power=2),
        ],
        milestones=[4],
    ),
    # It is given the same loss in every step.
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=1),
}


@pytest.mark.parametrize(("name", "dialect"), zip(SCHEDULERS, sorted(DIALECTS), strict=True))
def test_a_torch_scheduler_equals_the_same_rates_set_by_hand(name, dialect):
    plateau = name == "ReduceLROnPlateau"
    model, inputs, targets = problem()
    by_hand = copy.deepcopy(model)

    # The rates come from the same scheduler over torch's own optimizer.
    sgd = torch.optim.SGD(split_parameters(copy.deepcopy(model), 1e-2), 0.05, momentum=0.9)
    scheduler = SCHEDULERS[name](sgd)
    wanted = []
    for _ in range(STEPS):
        wanted.append(settings(sgd))
        sgd.step()
        scheduler.step(1.0) if plateau else scheduler.step()
    for group in range(2):
        assert len({rates[group] for rates in wanted}) > 2

    optimizer = lars(model, dialect=dialect)
    scheduler = SCHEDULERS[name](optimizer)
    seen = []
    losses = train(
        model,
        inputs,
        targets,
        optimizer,
        lambda step: seen.append(settings(optimizer)),
        lambda loss: scheduler.step(1.0) if plateau else scheduler.step(),
    )
    assert seen == wanted
    assert min(losses) < 0.9 * losses[0]

    optimizer = lars(by_hand, dialect=dialect)

    def set_by_hand(step):
        for group, (lr, momentum) in zip(optimizer.param_groups, wanted[step], strict=True):
            group.update(lr=lr, momentum=momentum)

    assert train(by_hand, inputs, targets, optimizer, set_by_hand) == losses
    assert_same(model, by_hand)


@pytest.mark.parametrize("dialect", ["mlperf-corrected", "torch"])
def test_a_tensor_learning_rate_is_set_in_place(dialect):
    model, inputs, targets = problem()
    with_number = copy.deepcopy(model)
    rate = torch.tensor(0.05)
    optimizer = lars(model, rate, dialect=dialect)
    schedule = polynomial(0.3, STEPS, warmup_steps=4)
    scheduler = as_scheduler(optimizer, schedule)
    losses = train(model, inputs, targets, optimizer, after=lambda loss: scheduler.step())
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert rate == schedule(STEPS)

    optimizer = lars(with_number, dialect=dialect)
    scheduler = as_scheduler(optimizer, schedule)
    expected = train(with_number, inputs, targets, optimizer, after=lambda loss: scheduler.step())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same(model, with_number, rtol=1e-5, atol=1e-6)


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
        losses = train(compiled, inputs, targets, optimizer, after=lambda loss: scheduler.step())
        return losses, model, optimizer.trust_ratios()

    losses, model, ratios = run(compiles=True)
    plain_losses, plain, plain_ratios = run(compiles=False)
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    assert_same(model, plain, rtol=1e-5, atol=1e-6)
    assert ratios == pytest.approx(plain_ratios, rel=1e-4)


def test_a_compiled_model_splits_into_the_same_groups():
    model, _, _ = problem()
    groups = split_parameters(torch.compile(model, backend="eager"), 1e-2)
    assert [[name.removeprefix("_orig_mod.") for name, _ in g["params"]] for g in groups] == [
        [name for name, _ in g["params"]] for g in split_parameters(model, 1e-2)
    ]
