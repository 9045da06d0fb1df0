"""Muon as an optimizer of torch: options, groups, schedulers, compilation and other rules."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from largebatch.lars import LARS, Muon, as_scheduler, hidden_weights, polynomial, split_parameters
from tests.lars.muon.training import (
    OTHERS,
    SHAPES,
    groups,
    make,
    parameters,
    run,
    set_gradients,
    tensors,
)

STEPS = 6


@given(
    momentum=st.sampled_from([0.0, 0.9]),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    maximize=st.booleans(),
)
@settings(max_examples=16, deadline=None)
def test_the_rules_sgd_and_lars_are_those_of_torch_and_of_lars(momentum, nesterov, **options):
    options |= {"momentum": momentum, "nesterov": nesterov and momentum > 0}
    for rule in ("sgd", "lars"):
        theirs, ours = ([nn.Parameter(t) for t in tensors(0, OTHERS)] for _ in range(2))
        if rule == "sgd":
            other = torch.optim.SGD(theirs, 0.05, **options)
        else:
            other = LARS(theirs, 0.05, dialect="torch", **options)
        optimizer = Muon([{"params": ours, "orthogonal": False, "rule": rule}], 0.05, **options)
        run(other, range(4))
        run(optimizer, range(4))
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_missing_gradients_are_skipped_and_gradients_are_kept():
    optimizer, other = make(), make()
    skipped = {1, 4, 8}
    before = [parameter.detach().clone() for parameter in parameters(optimizer)]
    set_gradients(optimizer, 0)
    for number, parameter in enumerate(parameters(optimizer)):
        if number in skipped:
            parameter.grad = None
    kept = {n: p.grad.clone() for n, p in enumerate(parameters(optimizer)) if n not in skipped}
    optimizer.step()
    run(other, range(1))
    for number, parameter in enumerate(parameters(optimizer)):
        expected = before[number] if number in skipped else parameters(other)[number]
        assert_close(parameter.detach(), expected.detach(), rtol=1e-6, atol=1e-6)
        assert (parameter in optimizer.state) == (number not in skipped)
        assert parameter.grad is None or torch.equal(parameter.grad, kept[number])
    for parameter in parameters(optimizer):
        parameter.grad = None
    optimizer.step()  # none at all


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        ({"params": [nn.Parameter(torch.ones(3))]}, ValueError, r"group4.0 has 1 dim.*hidden_wei"),
        ({"params": [nn.Parameter(torch.ones(2, 2, dtype=torch.cfloat))]}, TypeError,
         r"group4.0 is complex; Muon takes real"),
        ({"params": [], "ns_step": 3}, ValueError, "'ns_step' is not an opt.*did you mean 'ns_st"),
        ({"params": [], "ns_steps": 0}, ValueError, "ns_steps must be a whole number >= 1, not 0"),
        ({"params": [], "rule": "adam"}, ValueError, "rule must be one of sgd, lars, adamw, not"),
        ({"params": [], "adjust_lr_fn": None}, ValueError, "adjust_lr_fn must be one of original"),
        ({"params": [], "betas": (0.9, 1.0)}, ValueError, "betas must be two in"),
        ({"params": [], "master_weights": True}, ValueError, r"valid: Muon\(..., master_weights="),
        ({"params": [], "others": {"lr": 1.0}}, ValueError, r"others is not an option of a param"),
    ],
)  # fmt: skip
def test_unfit_groups_are_refused_and_not_added(group, error, message):
    optimizer = make()
    with pytest.raises(error, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 4
    run(optimizer, range(1))


def test_sparse_gradients_are_refused_before_anything_changes():
    optimizer = make()
    set_gradients(optimizer, 0)
    parameter = optimizer.param_groups[1]["params"][1]
    parameter.grad = parameter.grad.to_sparse()
    with pytest.raises(TypeError, match=r"gradient of group1.1 is sparse; Muon takes dense"):
        optimizer.step()
    assert not optimizer.state


def test_a_group_that_is_added_takes_the_options_of_others():
    optimizer = make(rules=[], others={"rule": "adamw", "lr": 0.3, "betas": (0.5, 0.9)})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "orthogonal": False})
    optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(2))], "orthogonal": False, "rule": "sgd", "lr": 1.0}
    )
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    found = [(group["rule"], group["lr"]) for group in optimizer.param_groups]
    assert found == [("sgd", 0.1), ("adamw", 0.3), ("sgd", 1.0), ("sgd", 0.1)]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.9)


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(),
        nn.Linear(16, 1),
    )  # fmt: skip
    inputs = torch.randn(64, 8)
    return model, inputs, inputs[:, :1] * inputs[:, 1:2]


def train(optimizer_of, *, compiles=False):
    torch.compiler.reset()
    model, inputs, targets = problem()
    optimizer, scheduler = optimizer_of(model)
    if compiles:  # after the scheduler, which wraps a method of any torch optimizer
        optimizer.step = torch.compile(optimizer.step, backend="eager")
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        scheduler.step()
    return losses, optimizer


def muon(model, lr, **options):
    made = split_parameters(model, 1e-2, orthogonal=hidden_weights(model))
    return Muon(made, lr, 0.8, adjust_lr_fn="trust_ratio", trust_coefficient=0.05, **options)


@pytest.mark.slow("compiles the step")
def test_a_compiled_step_matches_an_eager_one():
    """With a back end that needs no C++ compiler, and a changing learning rate in a tensor."""

    def build(model):
        optimizer = muon(model, torch.tensor(0.05), others={"rule": "lars"})
        return optimizer, as_scheduler(optimizer, polynomial(0.3, STEPS, warmup_steps=2))

    losses, compiled = train(build, compiles=True)
    expected, eager = train(build)
    assert losses == pytest.approx(expected, rel=1e-5)
    for a, b in zip(parameters(compiled), parameters(eager), strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert compiled.trust_ratios() == pytest.approx(eager.trust_ratios(), rel=1e-3)


def test_ratios_are_named_and_only_of_tensors_that_have_one():
    made = groups(rules=["lars", "sgd"])
    made[0]["params"] = [(f"layer{i}", p) for i, p in enumerate(made[0]["params"])]
    made[1]["params"] = [(f"head{i}", p) for i, p in enumerate(made[1]["params"])]
    made[2]["params"] = [(f"bias{i}", p) for i, p in enumerate(made[2]["params"])]
    optimizer = Muon(made, 0.1, adjust_lr_fn="trust_ratio", trust_coefficient=0.01)
    assert optimizer.trust_ratios() == {}
    run(optimizer, range(1))
    names = {f"layer{i}" for i in range(len(SHAPES))} | {"head1"}  # the matrix of that group
    assert optimizer.trust_ratios().keys() == names
    other = make(rules=[])
    run(other, range(1))
    assert other.trust_ratios() == {}


def test_ratios_are_in_the_order_of_the_groups():
    of = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = LARS([{"params": [parameter]} for parameter in of], 0.1)
    for parameter in reversed(of):  # the first one has no gradient in the first step
        parameter.grad = torch.ones(2, 2)
        optimizer.step()
    assert list(optimizer.trust_ratios()) == ["group0.0", "group1.0"]
