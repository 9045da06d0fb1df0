"""Optimizers of recipes: LARS, those of torch, and custom factories."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from largebatch.amp import MasterWeights, Precision
from largebatch.lars import LARS
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.models.optimizers import build_optimizer, place_state
from largebatch.recipes.schema.load import load

BASE = ["precision=fp32", "optimizer.lr=0.1", "optimizer.weight_decay=0"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def recipe(*keys):
    return load("digits", [*BASE, *keys]).recipe


def updated(name, precision, *keys):
    """Return a network's weights before and after three updates, and its optimizer."""
    model = net()
    optimizer = build_optimizer(recipe(f"optimizer.name={name}", *keys), model)
    amp = Precision(precision, loss_scale="none")
    model = amp.convert(model)
    place_state(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        amp.backward(model(torch.randn(5, 3)).square().sum())
        amp.step(optimizer)
        optimizer.zero_grad()
    return before, list(model.parameters()), optimizer


def test_an_optimizer_of_torch_updates_all_weights_and_gets_masters():
    before, after, optimizer = updated("NAdam", "fp32")
    assert type(optimizer) is torch.optim.NAdam
    assert all((a != b).any() for a, b in zip(after, before, strict=True))
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}
    before, after, optimizer = updated("NAdam", "bf16-master", "precision=bf16-master")
    assert isinstance(optimizer, MasterWeights)
    assert after[0].dtype == torch.bfloat16
    assert optimizer.state[after[0]]["master"].dtype == torch.float32
    assert all((a != b).any() for a, b in zip(after, before, strict=True))
    # Its state is made with it.
    with pytest.raises(RecipeError, match=r"has state before its first step.*; valid: fp32"):
        updated("Adagrad", "bf16-master", "precision=bf16-master")


@pytest.mark.parametrize(("name", "also"), [("lars", "false"), ("AdamW", "true")])
def test_biases_and_norms_take_their_share_of_the_learning_rate(name, also):
    """Whether or not they decay and adapt as the other parameters do."""
    keys = [f"optimizer.{key}={also}" for key in ("decay_bias_and_norm", "adapt_bias_and_norm")]
    keys += [f"optimizer.name={name}", "optimizer.weight_decay=0.3", "optimizer.bias_lr_scale=0.25"]
    matrices, others = build_optimizer(recipe(*keys), net()).param_groups
    assert (matrices["lr"], {p.ndim for p in matrices["params"]}) == (0.1, {2})
    assert (others["lr"], len(others["params"])) == (0.025, 4)
    decays = 0.3 if also == "true" else 0
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, decays)


def test_a_model_without_a_classifier_has_no_rate_of_its_body():
    message = r"^optimizer.body_lr_scale: resnet\w+ has no classifier, .*; valid: 1$"
    with pytest.raises(RecipeError, match=message):
        build_optimizer(recipe("optimizer.body_lr_scale=0.1"), nn.Conv2d(3, 4, 3))


def test_biases_and_norms_can_be_frozen_by_their_factor():
    keys = ["precision=bf16-master", "optimizer.bias_lr_scale=0"]
    before, after, _ = updated("sgd", "bf16-master", *keys)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new) == (old.ndim == 1)


def test_args_are_those_that_have_no_key_of_their_own():
    forms = {"denominator": "norm-of-sum", "trust_clip": True}
    for name, keys, args in (
        ("sgd", [], {"fused": True, "dampening": 0.5}),
        ("AdamW", [], {"betas": [0.8, 0.9]}),
        ("lars", ["optimizer.dialect=simclr-popular"], forms | {"implementation": "reference"}),
    ):
        keys = [f"optimizer.name={name}", f"optimizer.args={json.dumps(args)}", *keys]
        optimizer = build_optimizer(recipe(*keys), net())
        given = optimizer.param_groups[0] | {
            "implementation": getattr(optimizer, "implementation", 0)
        }
        assert json.dumps({key: given[key] for key in args}) == json.dumps(args)  # tuples as lists
    assert given["dialect"] == "simclr-popular"


def test_a_factory_may_keep_its_own_master_weights():
    path = f"{__name__}:lars_with_masters"
    optimizer = build_optimizer(recipe(f"optimizer.name={path}", "precision=bf16-master"), net())
    assert type(optimizer) is LARS


def lars_with_masters(groups, lr):
    return LARS(groups, lr, master_weights=True)


def no_optimizer(groups, lr):
    return groups


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("name=ADAMW", "optimizer.name: no optimizer 'ADAMW'; did you mean 'adamw'? Valid: lars"),
        ("name=LBFGS", "optimizer.name: LBFGS evaluates the loss several times in a step; "),
        ("name=SparseAdam", "optimizer.name: SparseAdam takes sparse gradients only"),
        ("name=Optimizer", "optimizer.name: no optimizer 'Optimizer'"),
        (
            "name=AdamW args.beta=1",
            "AdamW has no such argument; did you mean 'betas'? Valid: betas",
        ),
        ("name=adamw args.eps=-1", "args: torch.optim.AdamW does not take lr=0.1 and {'ep"),
        ("name=Muon", "optimizer.args: torch.optim.Muon does not take lr=0.1 and {}: ValueError"),
        ("name=Muon", "; valid: optimizer.name=muon"),
        ("name=AdamW args.lr=1", "optimizer.args.lr: set by optimizer.lr; valid: leave it"),
        ("args.adapt=true", "optimizer.args.adapt: set by the trainer; valid: leave it out"),
        ("name=sgd args.nesterov=true", "args.nesterov: set by optimizer.nesterov; valid: "),
        (f"name={__name__}:lars_with_masters args.depth=1", "has no such argument; valid: none"),
        ("name=Rprop weight_decay=0.1", "weight_decay: torch.optim.Rprop has none; valid: 0"),
        (f"name={__name__}:no_optimizer", "no_optimizer makes a list; valid: a factory of torch"),
    ],
)
def test_invalid_optimizers_are_refused_by_their_key(keys, message):
    with pytest.raises(RecipeError) as caught:
        build_optimizer(recipe(*(f"optimizer.{key}" for key in keys.split())), net())
    assert message in str(caught.value)


def test_fp16_pure_needs_an_optimizer_that_unscales():
    for name, message in (
        ("AdamW", "AdamW cannot unscale FP16 gradients"),
        ("timm.optim:Adan", r"fp16-pure: optimizer\.name lars or muon, or loss_scale none"),
        (f"{__name__}:lars_with_masters", ""),
    ):
        keys = [f"optimizer.name={name}", "precision=fp16-pure"]
        refused = pytest.raises(RecipeError, match=message) if message else nullcontext()
        with refused:
            build_optimizer(recipe(*keys), net())
        assert build_optimizer(recipe(*keys, "loss_scale=none"), net())
