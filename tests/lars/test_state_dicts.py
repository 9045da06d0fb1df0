"""State dicts of LARS: torch's conventions, torch.distributed.checkpoint, and other optimizers."""

import copy
import pickle
from itertools import product

import pytest
import pytorch_optimizer
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
from torch.optim import SGD

from largebatch.lars import DIALECTS, LARS, Muon, hidden_weights, split_parameters
from tests.lars.muon.training import assert_equal, follow
from tests.lars.problems import ADAPT, OPTIONS, assert_close
from tests.lars.states import assert_continues, assert_refuses, groups, parameters, run, stepped

TIMM = timm.optim.Lars


def test_the_state_that_pre_hooks_return_is_loaded_and_post_hooks_see_it_finished():
    saved = stepped(LARS(parameters(torch.float16), 0.1, master_weights=True)).state_dict()
    optimizer = LARS(parameters(torch.float16), 0.1, master_weights=True)
    master = torch.full((3, 5), 1 + 2.0**-20)  # not a number of half precision
    saved["state"][3] = {**saved["state"][3], "master": master}
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: saved)
    optimizer.register_load_state_dict_post_hook(
        lambda optimizer: seen.append(copy.deepcopy([*optimizer.state.values()][3]))
    )
    empty = LARS(parameters(torch.float16), 0.1, master_weights=True).state_dict()
    for _ in range(2):  # the hooks are not used up
        optimizer.load_state_dict(empty)
    assert len(seen) == 2
    for name, value in saved["state"][3].items():
        assert seen[0][name].dtype == torch.float32
        assert torch.equal(seen[0][name], value)


@settings(max_examples=25)
@given(
    OPTIONS,
    ADAPT,
    st.sampled_from(sorted(DIALECTS)),
    st.sampled_from([(torch.float64, False), (torch.float16, True), (torch.bfloat16, False)]),
)
def test_a_loaded_state_dict_continues_exactly_whatever_the_new_optimizers_options(
    options, adapt, dialect, precision
):
    dtype, master_weights = precision
    shared = {"dialect": dialect, "master_weights": master_weights, "implementation": "foreach"}
    of_groups = groups(parameters(dtype), weight_decay=0.01)
    optimizer = LARS(of_groups, 0.1, adapt=adapt, **options, **shared)
    run(optimizer, range(3))
    other = follow(optimizer, LARS(groups(parameters(dtype)), 0.7, 0.5, **shared))
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    state["param_groups"][0]["epoch_of_my_loop"] = 3
    other.load_state_dict(state)
    assert other.param_groups[0]["epoch_of_my_loop"] == 3
    expected = run(optimizer, range(3, 6))
    for ours, theirs in zip(run(other, range(3, 6)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("previous", [0.25, torch.tensor(0.25)])
def test_the_previous_learning_rate_is_loaded_as_a_tensor_and_needed_with_buffers(previous):
    optimizer = stepped(LARS(parameters(), 0.1, dialect="mlperf-corrected"))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["previous_lr"] = previous
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["previous_lr"] == torch.tensor(0.25)
    run(optimizer, range(3, 5))
    del saved["param_groups"][0]["previous_lr"]
    assert_refuses(optimizer, saved, r"param_groups\[0\] .* has no 'previous_lr'.*valid: a number")
    saved["state"] = {}
    optimizer.load_state_dict(saved)
    run(optimizer, range(2))


def lars(of=None, **options):
    return LARS(parameters() if of is None else of, 0.1, **{"dialect": "torch", **options})


def of(make, **options):
    return stepped(make(parameters(), lr=0.5, **options)).state_dict()


def with_a_number():
    state = copy.deepcopy(stepped(lars()).state_dict())
    state["state"][1]["momentum_buffer"] = 0.5
    return state


REFUSED = {
    "different number of parameter groups": lambda: lars(groups(parameters())).state_dict(),
    "doesn't match the size": lambda: lars(parameters()[:2]).state_dict(),
    "parameter 1 has 'momentum_buffer', a float; valid: the tensors": with_a_number,
    "momentum_buffer of parameter 3 is of torch.optim.SGD": lambda: of(SGD, momentum=0.9),
    "has dampening 0.1, which LARS lacks": lambda: of(TIMM, momentum=0.9, dampening=0.1),
    "parameter 0 has 'step', a Tensor; valid: the tens": lambda: of(torch.optim.Adam),
    r"param_groups\[0\] of the loaded state has no 'dialect'; valid: state of LARS, torch": (
        lambda: of(pytorch_optimizer.LARS, momentum=0.9)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_state_that_does_not_fit_is_refused_without_side_effects(message):
    assert_refuses(stepped(lars()), REFUSED[message](), message)


def test_state_of_another_dialect_or_out_of_range_is_refused_where_nothing_adapts():
    state, message = of(SGD, momentum=1.5), r"momentum must be in \[0, 1\)"
    assert_refuses(stepped(lars(adapt=False)), state, message)
    state, message = of(TIMM, momentum=0.9), "of timm's Lars, dialect 'torch', this .* 'mlperf'; "
    assert_refuses(stepped(lars(adapt=False, dialect="mlperf")), state, message)


@settings(max_examples=20)
@given(
    st.fixed_dictionaries(
        {
            "momentum": st.sampled_from([0.0, 0.9]),
            "weight_decay": st.sampled_from([0.0, 1e-2]),
            "trust_coeff": st.sampled_from([1e-3, 0.02]),
            "eps": st.sampled_from([0.0, 1e-8, 0.1]),
            "nesterov": st.booleans(),
            "trust_clip": st.booleans(),
            "always_adapt": st.booleans(),
            "foreach": st.booleans(),
        }
    ).map(lambda o: o | {"nesterov": o["nesterov"] and o["momentum"] > 0}),
    st.sampled_from([0.0, 1e-3]),
)
def test_state_of_timms_lars_continues_in_dialect_torch(options, decay):
    theirs = TIMM(groups(parameters(), weight_decay=decay), 0.5, **options)
    ours = LARS(groups(parameters()), 0.1, dialect="torch", denominator="norm-of-sum", eps=1.0)
    assert_continues(theirs, ours)
    assert "trust_coeff" not in ours.param_groups[0]
    assert ours.param_groups[0]["adapt"] == (options["always_adapt"] or decay > 0)


@pytest.mark.parametrize(
    ("momentum", "nesterov", "maximize"),
    [(0.0, False, True), (0.9, False, False), (0.9, True, True)],
)
def test_state_of_sgd_continues_where_tensors_do_not_adapt(momentum, nesterov, maximize):
    options = {"momentum": momentum, "nesterov": nesterov, "maximize": maximize}
    theirs = SGD(groups(parameters(), weight_decay=0.1), 0.5, weight_decay=1e-3, **options)
    # By default, tensors of fewer than two dimensions do not adapt.
    first, second = groups(parameters())
    ours = LARS([first, second | {"adapt": False}], 0.1, dialect="torch", eps=1.0)
    assert_continues(theirs, ours)
    assert "dampening" not in ours.param_groups[0]
    assert ours.param_groups[0]["eps"] == 1.0


def test_foreign_state_without_buffers_loads_into_any_dialect():
    """Of a run that was saved before its first step."""
    for make, dialect in product((SGD, TIMM), DIALECTS):
        ours = lars(dialect=dialect)
        ours.load_state_dict(make(parameters(), 0.5, weight_decay=1e-3).state_dict())
        assert ours.param_groups[0]["dialect"] == dialect
        assert ours.param_groups[0]["weight_decay"] == 1e-3
        assert not any(ours.state.values())
        run(ours, range(2))


class Larc:
    """apex LARC around SGD: replace the gradient, then call SGD without its weight decay."""

    def __init__(self, sgd, clip):
        self.sgd, self.clip, self.param_groups = sgd, clip, sgd.param_groups
        self.state_dict = sgd.state_dict

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        decay, group["weight_decay"] = group["weight_decay"], 0.0
        for p in group["params"]:
            ratio = 0.02 * p.norm() / (p.grad.norm() + p.norm() * decay + 1e-8)
            p.grad = (p.grad + decay * p) * (min(ratio / group["lr"], 1) if self.clip else ratio)
        self.sgd.step()
        group["weight_decay"] = decay


@pytest.mark.parametrize("dialect", ["larc", "torch"])
def test_state_of_sgd_in_a_wrapper_continues_when_its_dialect_is_added(dialect):
    theirs = Larc(SGD(parameters(), 0.5, 0.9, weight_decay=0.1), dialect == "larc")
    options = {"trust_coefficient": 0.02, "eps": 1e-8, "adapt": True, "dialect": dialect}
    ours = LARS(parameters(), 0.1, **options)
    run(theirs, range(20))
    saved = theirs.state_dict()
    if dialect == "torch":
        message = "is of torch.optim.SGD, without the trust ratios.*valid: .*'dialect': 'larc' or"
    else:
        message = "of torch.optim.SGD, dialect 'torch', this optimizer of dialect 'larc'"
        assert_refuses(LARS(parameters(), 0.1, **options | {"adapt": False}), saved, message)
        message = "momentum_buffer of parameter 0 is of torch.optim.SGD"
    assert_refuses(ours, saved, message)
    saved["param_groups"][0]["dialect"] = dialect
    follow(theirs, ours).load_state_dict(saved)
    assert "dampening" not in ours.param_groups[0]
    expected = run(theirs, range(20, 40))
    assert_close(run(ours, range(20, 40)), expected, rtol=1e-12, atol=1e-15)


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
