"""Claims of docs/guides/lars.md: which tensors decay and adapt, and steps beside timm's."""

import pytest
import timm
import timm.optim
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from largebatch.lars import (
    LARS,
    is_bias_or_norm,
    is_vector,
    is_vector_or_position,
    split_parameters,
)
from tests.lars.test_groups import by_timm, difference, fit

PREDICATES = {"no_decay": is_vector_or_position, "no_adapt": is_vector}


def choices(groups):
    """Return whether each parameter decays and adapts, by its name."""
    return {
        name: (group["weight_decay"] > 0, group["adapt"])
        for group in groups
        for name, _ in group["params"]
    }


def by_rule(model, special):
    """Return what the guide says: matrices and convolutions do both, the rest neither."""
    return {
        name: special.get(name.rpartition(".")[2], (parameter.ndim > 1, parameter.ndim > 1))
        for name, parameter in model.named_parameters()
    }


def test_convnext():
    model = timm.create_model("test_convnext")
    assert choices(split_parameters(model, 0.05, **PREDICATES)) == by_rule(model, {})
    plain = by_rule(model, {"gamma": (True, True)})
    assert choices(split_parameters(model, 0.05)) == plain
    assert sum(name.endswith("gamma") for name in plain) > 3


def test_vit():
    model = timm.create_model("test_vit")
    special = {"cls_token": (False, False), "pos_embed": (False, True)}
    assert choices(split_parameters(model, 0.05, **PREDICATES)) == by_rule(model, special)
    assert {*special} < {name for name, _ in model.named_parameters()}
    # Both predicates leave out of weight decay what timm's model does.
    decays = choices(split_parameters(model, 0.05, **PREDICATES))
    assert not any(decays[name][0] for name in model.no_weight_decay() & decays.keys())
    # By default the two have three dimensions like any others.
    assert choices(split_parameters(model, 0.05)) == by_rule(model, {})


def steps(model, optimizer):
    """Return the parameters after some updates by gradients that depend on the step alone."""
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_groups_of_timm_make_timms_steps():
    """Without naming which adapt; for a ViT, whose tokens do not decay, by its convention."""

    def after(name, make):
        torch.manual_seed(0)
        model = timm.create_model(name).double()
        exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=exempt)
        return steps(model, make(groups))

    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}

    def close(ours, theirs):
        return all(
            torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(ours, theirs, strict=True)
        )

    def plain(groups):
        return LARS(groups, dialect="torch", eps=1e-8, **options)

    for name in ("test_convnext", "test_vit"):
        theirs = after(name, lambda groups: timm.optim.Lars(groups, **options))
        assert close(after(name, plain), theirs) == (name == "test_convnext")
        assert close(after(name, lambda groups: LARS.like("timm", groups, **options)), theirs)


def test_the_same_rate_moves_weights_differently_than_in_timms_lars_unless_like_it():
    theirs = fit(lambda m: timm.optim.Lars(by_timm(m), momentum=0.9))
    assert 0.35 < difference(fit(lambda m: LARS(by_timm(m), lr=0.5)), theirs) < 0.45
    like = fit(lambda m: LARS.like("timm", by_timm(m), lr=0.5, momentum=0.9))
    assert difference(like, theirs) < 1e-12


def of(module, shape, name="alpha"):
    """Return a module with a parameter of its own, and the parameter's name."""
    setattr(module, name, nn.Parameter(torch.ones(shape)))
    return module, name


class Layer(nn.Module):
    """Neither a norm layer nor called one."""


class MyNorm(nn.Module):
    """Called a norm layer."""


@pytest.mark.parametrize(
    ("module", "name", "answers"),
    [
        (nn.Linear(3, 3), "bias", (True, True, True)),
        (nn.LayerNorm((2, 3, 4)), "weight", (True, True, True)),
        (*of(nn.GroupNorm(1, 3), (3, 4)), (True, True, True)),
        (*of(timm.layers.RmsNorm(3), (1, 3, 4)), (True, True, True)),
        (*of(MyNorm(), (1, 3, 1, 1), "weight"), (True, True, True)),
        (*of(MyNorm(), (3, 1)), (True, True, True)),
        (*of(MyNorm(), (3, 2)), (False, False, False)),
        (nn.Linear(3, 1), "weight", (False, False, False)),
        (nn.Conv2d(1, 1, (3, 1)), "weight", (False, False, False)),
        (nn.Conv2d(3, 3, 3, groups=3), "weight", (False, False, False)),
        (nn.PReLU(3), "weight", (False, True, True)),
        (timm.layers.LayerScale(3), "gamma", (False, True, True)),
        (*of(Layer(), (3, 1, 1), "layer_scale"), (False, True, True)),
        (*of(Layer(), (1, 1, 3), "cls_token"), (False, True, True)),
        (*of(Layer(), (1, 4, 3), "pos_embed"), (False, False, True)),
    ],
)
def test_the_guides_table_of_predicates(module, name, answers):
    predicates = (is_bias_or_norm, is_vector, is_vector_or_position)
    parameter = getattr(module, name)
    assert tuple(p(module, f"layer.{name}", parameter) for p in predicates) == answers
