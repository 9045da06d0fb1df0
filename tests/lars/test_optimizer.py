"""LARS and Muon as optimizers of torch: options, groups, gradients, compilation, and errors."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from largebatch.lars import LARS, Muon
from tests.lars.muon.training import groups, make, parameters, run
from tests.lars.problems import IMPLEMENTATIONS, SHAPES, made, tensors


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_not_modified_and_missing_ones_skipped(implementation):
    of = [nn.Parameter(t) for t in tensors(0)]
    optimizer = LARS(of, 1.0, weight_decay=0.1, implementation=implementation)
    gradients = tensors(1)
    for parameter, gradient in zip(of[1:], gradients[1:], strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    assert torch.equal(of[0], tensors(0)[0])
    for parameter, gradient in zip(of[1:], gradients[1:], strict=True):
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


def matrix(**options):
    return {"params": [nn.Parameter(torch.ones(3, 4))], **options}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LARS, {"lr": -1.0}, "^lr must be >= 0, not -1.0"),
        (
            LARS,
            {"lr": torch.ones(1)},
            r"^lr must be a 0-d tensor, .* lr.squeeze\(\), .* \[1\]",
        ),
        (LARS, {"lr": "0.1"}, "^lr must be >= 0, not '0.1'"),
        (LARS, {"momentum": 1.0}, r"^momentum must be in \[0, 1\), not 1.0"),
        (LARS, {"trust_coefficient": 0.0}, "^trust_coefficient must be > 0"),
        (LARS, {"eps": -1e-9}, "^eps must be >= 0"),
        (
            LARS,
            {"dialect": "adam"},
            "^dialect must be one of mlperf, .*, simclr-popular, not 'ad",
        ),
        (LARS, {"implementation": "cuda"}, "'cuda' is not one of auto, reference, foreach, fused"),
        (LARS, {"nesterov": True, "momentum": 0.0}, "^nesterov must be False unless momentum > 0"),
        (Muon, {"adjust_lr_fn": "rms"}, "^adjust_lr_fn must be one of original, match_rms_adamw"),
        (Muon, {"others": {"momentum": "high"}}, r"^others: momentum must be in .*, not 'high'"),
        (Muon, {"others": {"betas": 0.9}}, r"^others: betas must be two in \[0, 1\), not 0.9"),
        (Muon, {"others": {"momentum": 0}}, "^others: nesterov must be False unless momentum > 0"),
        (Muon, {"others": {"orthogonal": True}}, "^others: 'orthogonal' is not an option"),
        (Muon, {"others": {"lr_scale": 2, "lr": 1}}, "^others: lr_scale must be >= 0, and without"),
    ],
)
def test_options_out_of_range_are_refused_by_name(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind([matrix()], **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("kind", "group", "message"),
    [
        (LARS, matrix(adpat=True), "'adpat' is not an option .*; did you mean 'adapt'. valid: lr"),
        (LARS, matrix(trust_coeff=1), "did you mean 'trust_coefficient'. valid: lr, .*, adapt$"),
        (LARS, matrix(is_skipped=True), "'is_skipped' is not an option .*; valid: lr, mom"),
        (LARS, matrix(master_weights=True), r"valid: LARS\(..., master_weights=...\), for all gr"),
        (Muon, matrix(master_weights=True), r"valid: Muon\(..., master_weights="),
        (Muon, {"params": [nn.Parameter(torch.ones(3))]}, r"group1.0 has 1 dim.*hidden_wei"),
        (Muon, {"params": [nn.Parameter(torch.ones(2, 2).cfloat())]}, "group1.0 is complex; Muon"),
        (Muon, matrix(ns_step=3), "'ns_step' is not an opt.*did you mean 'ns_st"),
        (Muon, matrix(ns_steps=0), "ns_steps must be a whole number >= 1, not 0"),
        (Muon, matrix(others={"lr": 1.0}), "others is not an option of a param"),
        (Muon, matrix(rule="adamw"), "rule 'adamw' has no effect .* valid: orthogonal=False"),
    ],
)
def test_unfit_groups_are_refused_and_not_added(kind, group, message):
    optimizer = kind([matrix()], 0.1)
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    run(optimizer, range(1))
    with pytest.raises((TypeError, ValueError), match=message.replace("group1", "group0")):
        kind([group], 0.1)


def test_keys_of_a_group_that_are_for_others_are_accepted():
    """By torch's schedulers, timm, and loops that scale the learning rate of each layer."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = LARS([parameter], 0.1, master_weights=True)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=5)
    torch.optim.swa_utils.SWALR(optimizer, 0.1)
    again = {**optimizer.param_groups[0], "lr_scale": 0.5, "name": "stem", "master_weights": True}
    assert LARS([again], 0.2, master_weights=True).param_groups[0]["lr_scale"] == 0.5


def test_sparse_gradients_are_refused_without_side_effects():
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
    for of, implementation, dialect, message in (
        ([on_cpu], "triton", "mlperf", "'triton' does not run on cpu: .* CUDA "),
        ([on_cpu], "triton", "simclr-popular", "it has no dialect 'simclr-popular'"),
        ([on_cpu, on_meta], "fused", "mlperf", "'fused' does not run on meta: .* CPU"),
    ):
        optimizer = LARS(of, 0.1, dialect=dialect, implementation=implementation)
        with pytest.raises(ValueError, match=f"{message}.*; valid there: auto"):
            optimizer.step()
        assert torch.equal(on_cpu, torch.ones(3))
        assert not optimizer.state
    with pytest.raises(ValueError, match="'foreahc' is not one of auto, reference, foreach, fused"):
        optimizer.implementation = "foreahc"
    assert optimizer.implementation == "fused"


def test_muons_other_groups_have_the_options_of_others_and_a_multiple_of_the_rate():
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


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("auto", {"dialect": "torch", "denominator": "norm-of-sum", "maximize": True}),
        ("auto", {"dialect": "simclr-popular", "trust_clip": True, "decay_at_zero_norm": False}),
        pytest.param(
            "muon",
            {"rules": ["lars"], "adjust_lr_fn": "trust_ratio"},
            marks=pytest.mark.slow("compiles the step of Muon"),
        ),
    ],
)
def test_a_compiled_step_matches_an_eager_one(kind, form):
    """In one graph, of LARS, and with a changing learning rate in a tensor."""
    torch.compiler.reset()

    def trained(compiles):
        lr = torch.tensor(0.05)
        optimizer = made(kind, lr=lr, **form)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if compiles:
            whole = kind != "muon"
            optimizer.step = torch.compile(optimizer.step, fullgraph=whole, backend="eager")
        for number in range(4):
            lr.fill_(0.05 * (number + 1))
            run(optimizer, [number])
        return optimizer

    eager, compiled = trained(False), trained(True)
    assert_close(parameters(compiled), parameters(eager), rtol=1e-4, atol=1e-5)
    assert compiled.trust_ratios() == pytest.approx(eager.trust_ratios(), rel=1e-3)


def test_muons_ratios_are_named_and_only_of_tensors_that_have_one():
    of_groups = groups(rules=["lars", "sgd"])
    for name, group in zip(("layer", "head", "bias"), of_groups, strict=True):
        group["params"] = [(f"{name}{i}", p) for i, p in enumerate(group["params"])]
    optimizer = Muon(of_groups, 0.1, adjust_lr_fn="trust_ratio", trust_coefficient=0.01)
    assert optimizer.trust_ratios() == {}
    run(optimizer, range(1))
    names = {"layer0", "layer1", "layer2", "head1"}  # head1 is the matrix of that group
    assert optimizer.trust_ratios().keys() == names
    without = make(rules=[])
    run(without, range(1))
    assert without.trust_ratios() == {}
