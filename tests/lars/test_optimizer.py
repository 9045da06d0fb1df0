"""The optimizer: parameter groups, gradients, state, and the errors it raises."""

import copy

import pytest
import torch
from torch import nn

from largebatch.lars import LARS
from tests.lars.problems import IMPLEMENTATIONS, SHAPES, assert_identical, tensors


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_not_modified_and_missing_ones_skipped(implementation):
    parameters = [nn.Parameter(t) for t in tensors(0)]
    optimizer = LARS(parameters, 1.0, weight_decay=0.1, implementation=implementation)
    gradients = tensors(1)
    for parameter, gradient in zip(parameters[1:], gradients[1:], strict=True):
        parameter.grad = gradient.clone()
    before = parameters[0].detach().clone()
    optimizer.step()
    assert torch.equal(parameters[0].detach(), before)
    for parameter, gradient in zip(parameters[1:], gradients[1:], strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert set(optimizer.trust_ratios()) == {f"group0.{i}" for i in range(1, len(SHAPES))}


def test_a_deep_copy_steps_like_the_original():
    parameter = nn.Parameter(torch.ones(4))
    optimizer = LARS([("weight", parameter)], 0.1, dialect="torch", implementation="reference")
    parameter.grad = torch.ones(4)
    optimizer.step()
    other = copy.deepcopy(optimizer)
    copied = other.param_groups[0]["params"][0]
    copied.grad = torch.ones(4)
    other.step()
    optimizer.step()
    assert torch.equal(parameter, copied)
    assert other.trust_ratios() == optimizer.trust_ratios()
    assert list(other.trust_ratios()) == ["weight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be >= 0, not -1.0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), not 1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be >= 0"),
        ({"trust_coefficient": 0.0}, "trust_coefficient must be > 0"),
        ({"eps": -1e-9}, "eps must be >= 0"),
        (
            {"dialect": "adam"},
            r"dialect must be one of mlperf, .*, simclr-popular, not 'adam'",
        ),
        (
            {"implementation": "cuda"},
            "implementation 'cuda' is not one of auto, reference, foreach, fused, triton",
        ),
        (
            {"nesterov": True, "momentum": 0.0},
            "nesterov must be False unless momentum > 0, not True",
        ),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LARS([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **options})


def test_complex_parameters_and_sparse_gradients_are_refused_without_side_effects():
    with pytest.raises(TypeError, match=r"parameter group0.0 is complex"):
        LARS([nn.Parameter(torch.ones(2, dtype=torch.complex64))], 0.1)
    dense, embedding = nn.Parameter(torch.ones(3)), nn.Embedding(4, 2, sparse=True)
    optimizer = LARS([("dense", dense), ("table", embedding.weight)], 0.1)
    dense.grad = torch.ones(3)
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(TypeError, match="the gradient of table is sparse"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3))
    assert torch.equal(embedding.weight, before)
    assert not optimizer.state


def test_an_implementation_that_does_not_run_on_the_device_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    on_cpu, on_meta = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
    for parameter in (on_cpu, on_meta):
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"'triton' does not run on cpu; valid there: auto, fore"):
        LARS([on_cpu], 0.1, implementation="triton").step()
    optimizer = LARS([on_cpu, on_meta], 0.1, implementation="fused")
    with pytest.raises(ValueError, match=r"'fused' does not run on meta; valid there: auto, fore"):
        optimizer.step()
    assert torch.equal(on_cpu, torch.ones(3))
    assert not optimizer.state


def test_a_state_dict_that_does_not_fit_is_refused_without_side_effects():
    def stepped(shape, **options):
        parameter = nn.Parameter(torch.ones(shape))
        optimizer = LARS([parameter], 0.1, **options)
        parameter.grad = torch.ones(shape)
        optimizer.step()
        return optimizer

    ours = stepped((2, 3))
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=r"momentum_buffer of parameter 0 has shape \(3, 2\)"):
        ours.load_state_dict(stepped((3, 2)).state_dict())
    with pytest.raises(
        ValueError, match="is of dialect 'torch', this optimizer of dialect 'mlperf'"
    ):
        ours.load_state_dict(stepped((2, 3), dialect="torch").state_dict())
    assert_identical(([], before), ([], ours.state_dict()))


def test_lars_fits_a_small_regression():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.randn(256, 8)
    y = x[:, :1] * x[:, 1:2]
    optimizer = LARS(model.parameters(), 1.0, trust_coefficient=0.01)
    losses = []
    for _ in range(300):
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]


def test_the_previous_learning_rate_is_updated_in_place():
    """A CUDA graph reads and writes the tensors that it was captured with."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = LARS([parameter], 0.5, dialect="mlperf-corrected")
    previous = optimizer.param_groups[0]["previous_lr"]
    for lr in (0.5, 0.25):
        parameter.grad = torch.ones(3)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        assert optimizer.param_groups[0]["previous_lr"] is previous
        assert previous.item() == lr
