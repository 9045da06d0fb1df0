"""Precision: which dtype things run in, and what loss scaling does."""

import pytest
import torch
from torch import nn

from largebatch.amp import PRECISIONS, Precision, fastest
from largebatch.lars import LARS


def model_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.randn(64, 16), torch.randint(4, (64,))


def train(name, steps=20):
    model, x, y = model_and_batch()
    precision = Precision(name)
    optimizer = LARS(model.parameters(), 0.5, trust_coefficient=0.02)
    losses = []
    for _ in range(steps):
        with precision.forward():
            logits = model(x)
            loss = nn.functional.cross_entropy(logits.float(), y)
        losses.append(loss.item())
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
    return losses, logits.dtype, {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("name", PRECISIONS)
def test_half_precisions_follow_fp32_with_fp32_parameters(name):
    losses, forward_dtype, parameter_dtypes = train(name)
    assert forward_dtype == PRECISIONS[name]
    assert parameter_dtypes == {torch.float32}
    assert losses == pytest.approx(train("fp32")[0], rel=0.02)
    assert losses[-1] < losses[0] / 2


def test_fp32_is_the_bare_loop():
    model, x, y = model_and_batch()
    optimizer = LARS(model.parameters(), 0.5, trust_coefficient=0.02)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert train("fp32")[0] == losses


@pytest.mark.parametrize("optimizer_class", [LARS, torch.optim.SGD])
def test_an_overflow_costs_a_step_and_halves_the_loss_scale(optimizer_class):
    model, x, y = model_and_batch()
    precision = Precision("fp16")
    optimizer = optimizer_class(model.parameters(), 0.1)

    def step(factor):
        with precision.forward():
            loss = nn.functional.cross_entropy(model(x).float(), y)
        precision.backward(loss * factor)
        precision.step(optimizer)
        optimizer.zero_grad()
        return precision.state_dict()["scale"], [p.detach().clone() for p in model.parameters()]

    scale, good = step(1.0)
    halved, after_overflow = step(1e30)
    assert halved == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(good, after_overflow, strict=True))
    kept, moved = step(1.0)
    assert kept == halved
    assert not torch.equal(good[0], moved[0])


def test_the_loss_scale_is_saved():
    precision = Precision("fp16")
    state = precision.state_dict() | {"scale": 512.0}
    other = Precision("fp16")
    other.load_state_dict(state)
    assert other.state_dict()["scale"] == 512.0
    assert Precision("bf16").state_dict() == {}
    Precision("bf16").load_state_dict(state)
    other.load_state_dict(Precision("bf16").state_dict())
    assert other.state_dict()["scale"] == 512.0


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="precision 'fp8' is not one of fp32, bf16, fp16"):
        Precision("fp8")


def test_fastest_times_every_candidate_in_turn_and_leaves_out_the_first_round(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    calls = []

    def run(precision):
        warm = len(calls) >= 2
        calls.append(precision.name)
        now[0] += {"bf16": 2.0, "fp32": 3.0}[precision.name] if warm else 0.125

    assert fastest(run, ("fp32", "bf16"), repeats=2) == {"bf16": 2.0, "fp32": 3.0}
    assert calls == ["fp32", "bf16"] * 3
