"""State dicts of LARS and Muon: resuming, torch's own forms, copies, and those that are refused."""

import copy
import pickle

import pytest
import timm.optim
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.testing import assert_close

from largebatch.lars import DIALECTS, LARS, Muon, hidden_weights, polynomial, split_parameters
from tests.lars.muon.training import (
    assert_equal,
    follow,
    make,
    parameters,
    set_gradients,
)
from tests.lars.problems import ADAPT, OPTIONS, made

SCHEDULE = polynomial(0.5, 40, warmup_steps=10, start=0.01)
OF_LARS = st.builds(
    lambda options, **more: ("foreach", {**options, **more}),
    OPTIONS,
    adapt=ADAPT,
    dialect=st.sampled_from(sorted(DIALECTS)),
)
OF_MUON = st.sampled_from(
    [
        ("muon", {"adjust_lr_fn": "trust_ratio", "others": {"rule": "adamw"}}),
        ("muon", {"norm_projection": True, "conv_mode": "batched"}),
        ("muon", {"ns_coefficients": ((3.0, -4.0, 2.0),)}),
    ]
)


def run(optimizer, steps):
    """Take steps whose learning rates and gradients depend only on the number of the step."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE(step)
        set_gradients(optimizer, step)
        optimizer.step()
    return optimizer


@settings(max_examples=15, deadline=None)
@given(
    OF_LARS | OF_MUON,
    st.sampled_from([(torch.float64, False), (torch.float16, True), (torch.bfloat16, False)]),
)
def test_a_loaded_state_dict_and_copies_continue_exactly_whatever_the_options(of, precision):
    (kind, options), (dtype, master_weights) = of, precision
    shared = {"dialect": options["dialect"]} if "dialect" in options else {}
    shared["master_weights"] = master_weights
    optimizer = run(made(kind, dtype, **{**options, **shared}), range(3))
    other = follow(optimizer, made(kind, dtype, 0.7, momentum=0.5, **shared))
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    saved["param_groups"][0]["epoch_of_my_loop"] = 3
    kept = copy.deepcopy(saved)
    other.load_state_dict(saved)
    assert other.param_groups[0]["epoch_of_my_loop"] == 3
    copies = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    assert str([one.trust_ratios() for one in copies]) == str([optimizer.trust_ratios()] * 2)
    run(optimizer, range(3, 6))
    for one in (other, *copies):
        assert one.implementation == optimizer.implementation
        assert_equal(run(one, range(3, 6)), optimizer)
    # What was loaded is a copy.
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    assert_close(saved["state"], kept["state"], **exactly)
    for one in copies if kind == "muon" else ():
        one.add_param_group({"params": [nn.Parameter(torch.ones(2))], "orthogonal": False})
        assert one.param_groups[-1]["rule"] == options.get("others", {"rule": "sgd"})["rule"]


def test_the_state_that_pre_hooks_return_is_loaded_and_post_hooks_see_it_finished():
    optimizer, empty = (made("foreach", torch.float16, master_weights=True) for _ in range(2))
    saved = copy.deepcopy(run(optimizer, range(3)).state_dict())
    saved["state"][0]["master"].fill_(1 + 2.0**-20)  # not a number of half precision
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: saved)
    optimizer.register_load_state_dict_post_hook(
        lambda optimizer: seen.append(copy.deepcopy(optimizer.state[parameters(optimizer)[0]]))
    )
    for _ in range(2):  # the hooks are not used up
        optimizer.load_state_dict(empty.state_dict())
    for state in seen:
        assert_close(state, saved["state"][0], rtol=0, atol=0)
    assert len(seen) == 2


@pytest.mark.parametrize("previous", [0.25, torch.tensor(0.25)])
def test_the_previous_learning_rate_is_loaded_as_a_tensor_and_needed_only_with_buffers(previous):
    optimizer = run(made("fused", dialect="mlperf-corrected"), range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["previous_lr"] = previous
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["previous_lr"] == torch.tensor(0.25)
    run(optimizer, range(3, 5))
    del saved["param_groups"][0]["previous_lr"]
    optimizer.load_state_dict({**saved, "state": {}})
    run(optimizer, range(2))


def states_that_do_not_fit():
    """Yield optimizers, state dicts that each refuses, and a part of the message."""
    lars, corrected, muon, adamw, sgd = (
        run(optimizer, range(2))
        for optimizer in (
            made("fused"),
            made("fused", dialect="mlperf-corrected"),
            made("muon"),
            *(
                Muon([{"params": parameters(make()), "orthogonal": False, "rule": rule}], 0.1)
                for rule in ("adamw", "sgd")
            ),
        )
    )

    def edited(optimizer, part, key, value=None):
        saved = copy.deepcopy(optimizer.state_dict())
        saved[part][0][key] = value
        if value is None:
            del saved[part][0][key]
        return saved

    def of(optimizer, theirs, steps=2):
        """Return the state of another optimizer of such groups."""
        groups = copy.deepcopy([{"params": g["params"]} for g in optimizer.param_groups])
        return run(theirs(groups), range(steps)).state_dict()

    yield lars, adamw.state_dict(), "different number of parameter groups"
    short = of(lars, lambda groups: LARS([{"params": g["params"][:2]} for g in groups], 0.1))
    yield lars, short, "doesn't match the size"
    buffer, step = "momentum_buffer", torch.zeros(3)
    message = "parameter 0 has 'momentum_buffer', a float; valid: the tensors"
    yield lars, edited(lars, "state", buffer, 0.5), message
    yield lars, edited(lars, "state", buffer, step), r"0 has shape \(3,\) in the loaded"
    yield lars, of(lars, torch.optim.Adam), "parameter 0 has 'step', a Tensor; valid: the tensors"
    message = r"param_groups\[0\] .* has no 'dialect'; valid: state of largebatch's LARS"
    for theirs in (torch.optim.SGD, timm.optim.Lars):
        yield lars, of(lars, lambda groups, kind=theirs: kind(groups, 0.1, momentum=0.9)), message
    other = of(lars, lambda groups: LARS(groups, 0.1, dialect="torch"))
    yield lars, other, "of dialect 'torch', this optimizer of dialect 'mlperf'"
    yield lars, edited(lars, "param_groups", "momentum", 1.5), r"momentum must be in \[0, 1\)"
    message = r"param_groups\[0\] .* has no 'previous_lr'.*valid: a number"
    yield corrected, edited(corrected, "param_groups", "previous_lr"), message
    message = r"param_groups\[0\] .* is updated by adamw, .* by sgd; their state"
    yield sgd, adamw.state_dict(), message
    message = "updated by sgd, .* by orthogonal steps"
    yield muon, edited(muon, "param_groups", "orthogonal", False), message
    message = "ns_steps must be a whole number >= 1, not 0"
    yield muon, edited(muon, "param_groups", "ns_steps", 0), message
    message = "parameter 0 has no 'exp_avg_sq'; valid: step, "
    yield adamw, edited(adamw, "state", "exp_avg_sq"), message
    yield adamw, edited(adamw, "state", "step", step), r"shape \(3,\) in .*valid: one number"
    message = "has no 'orthogonal'; valid: state of largebatch's Muon"
    yield muon, of(muon, timm.optim.Muon, steps=0), message


def test_state_that_does_not_fit_is_refused_without_side_effects():
    for optimizer, saved, message in states_that_do_not_fit():
        given, before = copy.deepcopy(saved), copy.deepcopy(optimizer.state_dict())
        options = [{**g, "params": len(g["params"])} for g in optimizer.param_groups]
        options = copy.deepcopy(options)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
        assert options == [{**g, "params": len(g["params"])} for g in optimizer.param_groups]
        assert saved["param_groups"] == given["param_groups"]
        assert saved["state"].keys() == given["state"].keys()
        assert not optimizer._optimizer_load_state_dict_pre_hooks
        assert not optimizer._optimizer_load_state_dict_post_hooks


def test_without_state_groups_keep_their_rule():
    optimizer, other = make(rules=["sgd"]), make(rules=["adamw"], lr=0.3)
    optimizer.load_state_dict(other.state_dict())
    found = [(g["lr"], g["orthogonal"], g["rule"]) for g in optimizer.param_groups]
    assert found == [(0.3, True, "sgd"), (0.05, False, "sgd")]


def network(dtype):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 2)
    return nn.Sequential(*layers).to(dtype)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(8, 4, dtype=model[0].weight.dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("dialect", "named", "flat"),
    [
        *(("torch", True, False), ("mlperf-corrected", False, False)),
        *(("mlperf-corrected", True, True), ("muon", True, False), ("muon", False, True)),
    ],
)
def test_torchs_distributed_state_dicts_resume_exactly(dialect, named, flat):
    """They name parameters, and initialise the state by a step at learning rate 0."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def make(master_weights=True):
        model = network(torch.bfloat16)
        if dialect != "muon":
            groups = split_parameters(model, 0.01, named=named)
            return model, LARS(groups, 0.5, dialect=dialect, master_weights=master_weights)
        groups = split_parameters(model, 0.01, orthogonal=hidden_weights(model), named=named)
        options = {"norm_projection": True, "others": {"rule": "adamw"}}
        return model, Muon(groups, 0.1, master_weights=master_weights, **options)

    model, optimizer = make()
    train(model, optimizer, range(4))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(4, 8))

    resumed, other = make()
    resumed.load_state_dict(weights)
    set_optimizer_state_dict(resumed, other, saved, options=options)
    train(resumed, other, range(4, 8))
    assert_equal(other, optimizer)
    assert all("master" in state for state in other.state.values())

    # State with masters loads without them, and the other way round.
    without, optimizer = make(master_weights=False)
    set_optimizer_state_dict(without, optimizer, saved, options=options)
    train(without, optimizer, range(1))
    assert set(optimizer.state[without[2].weight]) == {"momentum_buffer"}
    saved = copy.deepcopy(get_optimizer_state_dict(without, optimizer, options=options))
    model, optimizer = make()
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert set(optimizer.state[model[2].weight]) == {"momentum_buffer"}
    train(model, optimizer, range(1))
    assert optimizer.state[model[2].weight]["master"].dtype == torch.float32
