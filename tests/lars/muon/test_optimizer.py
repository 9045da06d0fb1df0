"""Muon as an optimizer of torch: options, groups that are added, compilation, trust ratios."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from largebatch.lars import Muon, as_scheduler, polynomial
from tests.lars.muon.training import SHAPES, groups, make, parameters, run


def matrix(**options):
    return {"params": [nn.Parameter(torch.ones(3, 4))], **options}


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": [nn.Parameter(torch.ones(3))]}, r"group4.0 has 1 dim.*hidden_wei"),
        ({"params": [nn.Parameter(torch.ones(2, 2).cfloat())]}, "group4.0 is complex; Muon takes"),
        (matrix(ns_step=3), "'ns_step' is not an opt.*did you mean 'ns_st"),
        (matrix(ns_steps=0), "ns_steps must be a whole number >= 1, not 0"),
        (matrix(master_weights=True), r"valid: Muon\(..., master_weights="),
        (matrix(others={"lr": 1.0}), "others is not an option of a param"),
        (matrix(rule="adamw"), "rule 'adamw' has no effect .* valid: orthogonal=False"),
    ],
)
def test_unfit_groups_are_refused_and_not_added(group, message):
    optimizer = make()
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 4
    run(optimizer, range(1))


def test_other_groups_have_the_options_of_others_and_a_multiple_of_the_rate():
    others = {"rule": "adamw", "lr": 0.3, "betas": (0.5, 0.9)}
    optimizer = Muon([matrix()], 0.1, others=others)
    for options in ({"orthogonal": False}, {"orthogonal": False, "rule": "sgd", "lr": 1.0}, {}):
        optimizer.add_param_group(matrix(**options))
    # The groups of one optimizer, which have all keys, may be given to another.
    copied = Muon([dict(group) for group in optimizer.param_groups], 0.1)
    for one in (optimizer, copied):
        found = [(g["orthogonal"], g["rule"], g["lr"]) for g in one.param_groups]
        of_others = [(False, "adamw", 0.3), (False, "sgd", 1.0)]
        assert found == [(True, "sgd", 0.1), *of_others, (True, "sgd", 0.1)]
        assert one.param_groups[1]["betas"] == (0.5, 0.9)
    for rate in (0.2, torch.tensor(0.2)):
        given = matrix(orthogonal=False, lr=0.4)
        scaled = Muon([matrix(), matrix(orthogonal=False), given], rate, others={"lr_scale": 1.5})
        assert [float(g["lr"]) for g in scaled.param_groups] == pytest.approx([0.2, 0.3, 0.4])


@pytest.mark.slow("compiles the step")
def test_a_compiled_step_matches_an_eager_one():
    """With a back end that needs no C++ compiler, and a changing learning rate in a tensor."""
    torch.compiler.reset()

    def trained(compiles):
        lr = torch.tensor(0.05)
        optimizer = make(lr=lr, rules=["lars"], adjust_lr_fn="trust_ratio")
        optimizer.param_groups[1]["lr"] = lr
        scheduler = as_scheduler(optimizer, polynomial(0.3, 6, warmup_steps=2))
        if compiles:  # after the scheduler, which wraps a method of any torch optimizer
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        for number in range(4):
            run(optimizer, [number])
            scheduler.step()
        return optimizer

    eager, compiled = trained(False), trained(True)
    assert_close(parameters(compiled), parameters(eager), rtol=1e-4, atol=1e-5)
    assert compiled.trust_ratios() == pytest.approx(eager.trust_ratios(), rel=1e-3)


def test_ratios_are_named_and_only_of_tensors_that_have_one():
    made = groups(rules=["lars", "sgd"])
    for name, group in zip(("layer", "head", "bias"), made, strict=True):
        group["params"] = [(f"{name}{i}", p) for i, p in enumerate(group["params"])]
    optimizer = Muon(made, 0.1, adjust_lr_fn="trust_ratio", trust_coefficient=0.01)
    assert optimizer.trust_ratios() == {}
    run(optimizer, range(1))
    names = {f"layer{i}" for i in range(len(SHAPES))} | {"head1"}  # the matrix of that group
    assert optimizer.trust_ratios().keys() == names
    other = make(rules=[])
    run(other, range(1))
    assert other.trust_ratios() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adjust_lr_fn": "rms"}, "^adjust_lr_fn must be one of original, match_rms_adamw, "),
        ({"momentum": 1.0}, r"^momentum must be in \[0, 1\), not 1.0"),
        ({"others": {"momentum": "high"}}, r"^others: momentum must be in \[0, 1\), not 'high'"),
        ({"others": {"betas": 0.9}}, r"^others: betas must be two in \[0, 1\), not 0.9"),
        ({"others": {"momentum": 0}}, "^others: nesterov must be False unless momentum > 0"),
        ({"others": {"orthogonal": True}}, "^others: 'orthogonal' is not an option"),
        ({"others": {"lr_scale": 2, "lr": 1}}, "^others: lr_scale must be >= 0, and without lr"),
    ],
)
def test_a_wrong_option_is_named_with_its_place(options, message):
    with pytest.raises(ValueError, match=message):
        Muon([matrix()], 0.1, **options)
