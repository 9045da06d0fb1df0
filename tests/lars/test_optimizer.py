"""The optimizer: parameter groups, gradients, state, and the errors it raises."""

import pytest
import torch
from torch import nn

from largebatch.lars import LARS, Muon
from tests.lars.problems import IMPLEMENTATIONS, SHAPES, tensors


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_not_modified_and_missing_ones_skipped(implementation):
    parameters = [nn.Parameter(t) for t in tensors(0)]
    optimizer = LARS(parameters, 1.0, weight_decay=0.1, implementation=implementation)
    gradients = tensors(1)
    for parameter, gradient in zip(parameters[1:], gradients[1:], strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    assert torch.equal(parameters[0], tensors(0)[0])
    for parameter, gradient in zip(parameters[1:], gradients[1:], strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert set(optimizer.trust_ratios()) == {f"group0.{i}" for i in range(1, len(SHAPES))}


@pytest.mark.parametrize("kind", [LARS, Muon])
@pytest.mark.parametrize("lr", [float("nan"), -1.0, None, torch.ones(1)])
def test_a_wrong_rate_that_is_set_later_changes_nothing(kind, lr):
    first, second = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer = kind([{"params": [first]}, {"params": [second]}], lr=0.1)
    for parameter in (first, second):
        parameter.grad = torch.ones(2, 3)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in (first, second)]
    optimizer.param_groups[1]["lr"] = lr
    with pytest.raises(ValueError, match=r"^lr must be (>= 0|a 0-d tensor)[^\n]*$"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, (first, second), strict=True))


@pytest.mark.parametrize("kind", [LARS, Muon, lambda *args, **o: LARS.like("timm", *args, **o)])
def test_arguments_of_other_libraries_and_a_missing_rate_are_refused_in_one_line(kind):
    weight = [nn.Parameter(torch.ones(2, 3))]
    with pytest.raises(TypeError, match=r"^'trust_coeff' is not .*mean 'trust_coefficient'.*$"):
        kind(weight, lr=0.1, trust_coeff=0.001)
    with pytest.raises(
        TypeError, match=r"^lr is missing; valid: (LARS|Muon)\(params, lr=...\), .*$"
    ):
        kind(weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be >= 0, not -1.0"),
        ({"lr": torch.ones(1)}, r"lr must be a 0-d tensor, such as lr.squeeze\(\), not .* \[1\]"),
        ({"lr": "0.1"}, "lr must be >= 0, not '0.1'"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), not 1.0"),
        ({"trust_coefficient": 0.0}, "trust_coefficient must be > 0"),
        ({"eps": -1e-9}, "eps must be >= 0"),
        ({"dialect": "adam"}, r"dialect must be one of mlperf, .*, simclr-popular, not 'adam'"),
        ({"implementation": "cuda"}, "implementation 'cuda' is not one of auto, reference, fore"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov must be False unless momentum > 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LARS([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("adpat", "'adpat' is not an option of a parameter group; did you mean 'adapt'. valid: lr"),
        ("trust_coeff", "did you mean 'trust_coefficient'. valid: lr, momentum, .*, adapt$"),
        ("is_skipped", "'is_skipped' is not an option of a parameter group; valid: lr, mom"),
        ("master_weights", r"valid: LARS\(..., master_weights=...\), for all groups"),
    ],
)
def test_keys_of_a_group_that_would_have_no_effect_are_refused(key, message):
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    with pytest.raises(ValueError, match=message):
        LARS([{"params": [first], key: True}], 0.1)
    optimizer = LARS([first], 0.1)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [second], key: True})
    assert len(optimizer.param_groups) == 1


def test_keys_of_a_group_that_are_for_others_are_accepted():
    """By torch's schedulers, timm, and loops that scale the learning rate of each layer."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = LARS([parameter], 0.1, master_weights=True)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=5)
    torch.optim.swa_utils.SWALR(optimizer, 0.1)
    again = {**optimizer.param_groups[0], "lr_scale": 0.5, "name": "stem", "master_weights": True}
    assert LARS([again], 0.2, master_weights=True).param_groups[0]["lr_scale"] == 0.5


def test_complex_parameters_and_sparse_gradients_are_refused_without_side_effects():
    with pytest.raises(TypeError, match=r"parameter group0.0 is complex"):
        LARS([nn.Parameter(torch.ones(2, dtype=torch.complex64))], 0.1)
    dense, embedding = nn.Parameter(torch.ones(3)), nn.Embedding(4, 2, sparse=True)
    optimizer = LARS([("dense", dense), ("table", embedding.weight)], 0.1)
    dense.grad = torch.ones(3)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="the gradient of table is sparse"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3))
    assert not optimizer.state


def test_an_implementation_that_does_not_run_on_the_device_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    on_cpu, on_meta = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
    for parameter in (on_cpu, on_meta):
        parameter.grad = torch.ones_like(parameter)
    for parameters, implementation, dialect, message in (
        ([on_cpu], "triton", "mlperf", "'triton' does not run on cpu: .* CUDA "),
        ([on_cpu], "triton", "simclr-popular", "it has no dialect 'simclr-popular'"),
        ([on_cpu, on_meta], "fused", "mlperf", "'fused' does not run on meta: .* CPU"),
    ):
        optimizer = LARS(parameters, 0.1, dialect=dialect, implementation=implementation)
        with pytest.raises(ValueError, match=f"{message}.*; valid there: auto"):
            optimizer.step()
        assert torch.equal(on_cpu, torch.ones(3))
        assert not optimizer.state
