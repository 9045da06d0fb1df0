"""State dicts: torch's conventions, earlier versions' checkpoints, other optimizers' state."""

import copy
import pickle

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

from largebatch.lars import DIALECTS, LARS, polynomial, split_parameters
from largebatch.lars.options import ADDED_LATER, DENOMINATORS
from tests.lars.problems import assert_close, assert_identical, tensors

SCHEDULE = polynomial(0.5, 40, warmup_steps=10, start=0.01)


def parameters(dtype=torch.float64):
    return [nn.Parameter(t) for t in tensors(0, dtype)]


def run(optimizer, steps):
    """Take steps with learning rates and gradients that depend only on the number of the step."""
    of_groups = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE(step)
        for parameter, gradient in zip(of_groups, tensors(step + 1), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return of_groups


def groups(of, **first):
    """Return two groups of five parameters; ``first`` are options of the first one."""
    return [{"params": of[:3], **first}, {"params": of[3:]}]


def moved(source, target):
    """Give the parameters of one optimizer the values that those of another have."""
    for old, new in zip(source.param_groups, target.param_groups, strict=True):
        for a, b in zip(old["params"], new["params"], strict=True):
            b.data.copy_(a.data)
    return target


def assert_continues(theirs, ours):
    """Load their state after 20 steps, and compare the weights after 20 more in both."""
    run(theirs, range(20))
    moved(theirs, ours).load_state_dict(theirs.state_dict())
    expected = run(theirs, range(20, 40))
    assert_close(run(ours, range(20, 40)), expected, rtol=1e-12, atol=1e-15)


def assert_refuses(optimizer, state_dict, message):
    """Check that the state dict is refused, and that neither it nor the optimizer changes."""
    given = copy.deepcopy(state_dict)
    before = copy.deepcopy(optimizer.state_dict())
    options = copy.deepcopy([{**g, "params": len(g["params"])} for g in optimizer.param_groups])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert_identical(([], before), ([], optimizer.state_dict()))
    assert options == [{**g, "params": len(g["params"])} for g in optimizer.param_groups]
    assert state_dict["param_groups"] == given["param_groups"]
    assert state_dict["state"].keys() == given["state"].keys()
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


def stepped(optimizer):
    run(optimizer, range(3))
    return optimizer


# Conventions of torch


def test_the_state_that_pre_hooks_return_is_loaded_and_post_hooks_see_it_finished():
    saved = stepped(LARS(parameters(torch.float16), 0.1, master_weights=True)).state_dict()
    optimizer = LARS(parameters(torch.float16), 0.1, master_weights=True)
    master = torch.full((3, 5), 1 + 2.0**-20)  # not a number of half precision
    seen = []

    def other(optimizer, state_dict):
        assert state_dict["state"] == {}
        state = {**saved["state"], 3: {**saved["state"][3], "master": master}}
        return {**saved, "state": state}

    def look(optimizer):
        state = optimizer.state[optimizer.param_groups[0]["params"][3]]
        seen.append({key: value.clone() for key, value in state.items()})

    optimizer.register_load_state_dict_pre_hook(other)
    optimizer.register_load_state_dict_post_hook(look)
    empty = LARS(parameters(torch.float16), 0.1, master_weights=True).state_dict()
    optimizer.load_state_dict(empty)
    assert torch.equal(seen[0]["master"], master)
    assert torch.equal(seen[0]["momentum_buffer"], saved["state"][3]["momentum_buffer"])
    assert seen[0]["momentum_buffer"].dtype == torch.float32
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    optimizer.load_state_dict(empty)
    assert len(seen) == 2


def test_a_pre_hook_that_returns_unfit_state_is_refused():
    optimizer = stepped(LARS(parameters(), 0.1))
    before = copy.deepcopy(optimizer.state_dict())
    adam = torch.optim.Adam(parameters())
    handle = optimizer.register_load_state_dict_pre_hook(lambda o, s: stepped(adam).state_dict())
    with pytest.raises(ValueError, match="parameter 0 has 'step'"):
        optimizer.load_state_dict(before)
    assert_identical(([], before), ([], optimizer.state_dict()))
    handle.remove()
    optimizer.load_state_dict(before)


@settings(max_examples=25)
@given(
    st.fixed_dictionaries(
        {
            "momentum": st.sampled_from([0.0, 0.9]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "trust_coefficient": st.sampled_from([1e-3, 0.05]),
            "eps": st.sampled_from([0.0, 0.1]),
            "trust_clip": st.booleans(),
            "denominator": st.sampled_from(DENOMINATORS),
            "decay_at_zero_norm": st.booleans(),
            "maximize": st.booleans(),
            "adapt": st.sampled_from([None, False, True]),
        }
    ),
    st.sampled_from(sorted(DIALECTS)),
    st.sampled_from([(torch.float64, False), (torch.float16, True), (torch.bfloat16, False)]),
)
def test_a_loaded_state_dict_continues_exactly_whatever_the_new_optimizers_options(
    options, dialect, precision
):
    dtype, master_weights = precision
    shared = {
        "dialect": dialect,
        "master_weights": master_weights,
        "implementation": "foreach",
    }
    optimizer = LARS(groups(parameters(dtype), weight_decay=0.01), 0.1, **options, **shared)
    run(optimizer, range(3))
    other = moved(optimizer, LARS(groups(parameters(dtype)), 0.7, 0.5, **shared))
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    expected = run(optimizer, range(3, 6))
    for ours, theirs in zip(run(other, range(3, 6)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_loaded_state_is_a_copy():
    saved = stepped(LARS(parameters(), 0.1, dialect="mlperf-corrected")).state_dict()
    kept = copy.deepcopy(saved)
    optimizer = LARS(parameters(), 0.1, dialect="mlperf-corrected")
    optimizer.load_state_dict(saved)
    run(optimizer, range(3, 5))
    assert_identical(([], kept), ([], saved))
    assert saved["param_groups"][0]["previous_lr"] == kept["param_groups"][0]["previous_lr"]


def test_other_numbers_of_groups_and_tensors_are_refused_without_side_effects():
    optimizer = stepped(LARS(parameters(), 0.1))
    two = LARS(groups(parameters()), 0.1).state_dict()
    assert_refuses(optimizer, two, "different number of parameter groups")
    fewer = LARS(parameters()[:2], 0.1).state_dict()
    assert_refuses(optimizer, fewer, "doesn't match the size")


# Checkpoints of earlier versions


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_checkpoints_without_the_latest_options_resume_exactly(dialect):
    """The first version wrote ``adapt``, and none of the options that were added later."""

    def make():
        return LARS(groups(parameters(), adapt=False), 0.5, weight_decay=0.01, adapt=True,
                    dialect=dialect)  # fmt: skip

    optimizer, resumed = make(), make()
    run(optimizer, range(5))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        for option in ADDED_LATER:
            del group[option]
    moved(optimizer, resumed).load_state_dict(saved)
    assert [group["adapt"] for group in resumed.param_groups] == [False, True]
    assert_close(run(resumed, range(5, 9)), run(optimizer, range(5, 9)), rtol=0, atol=0)
    assert resumed.param_groups[0].keys() == optimizer.param_groups[0].keys()


def test_an_option_that_a_checkpoint_lacks_is_what_it_was_then():
    saved = LARS(parameters(), 0.1).state_dict()
    for option in ADDED_LATER:
        del saved["param_groups"][0][option]
    optimizer = LARS(parameters(), 0.1, denominator="norm-of-sum", maximize=True)
    optimizer.load_state_dict(saved)
    assert {name: optimizer.param_groups[0][name] for name in ADDED_LATER} == ADDED_LATER


def test_a_pickled_optimizer_without_the_latest_options_steps_and_takes_groups():
    def make():
        return stepped(LARS(parameters(), 0.5, dialect="mlperf-corrected"))

    expected, optimizer = make(), make()
    for options in (optimizer.defaults, *optimizer.param_groups):
        for option in ADDED_LATER:
            del options[option]
    optimizer = pickle.loads(pickle.dumps(optimizer))
    assert optimizer.trust_ratios() == expected.trust_ratios()
    assert_close(run(optimizer, range(3, 6)), run(expected, range(3, 6)), rtol=0, atol=0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert optimizer.param_groups[1].keys() == optimizer.param_groups[0].keys()
    LARS([{**optimizer.param_groups[1]}], 0.1)  # no key of torch's that LARS refuses


def test_keys_of_others_in_a_state_dict_are_kept():
    optimizer = LARS(parameters(), 0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["epoch_of_my_loop"] = 3
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["epoch_of_my_loop"] == 3


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


# Other optimizers' state


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
    theirs = timm.optim.Lars(groups(parameters(), weight_decay=decay), 0.5, **options)
    ours = LARS(groups(parameters()), 0.1, dialect="torch", denominator="norm-of-sum", eps=1.0)
    assert_continues(theirs, ours)
    assert "trust_coeff" not in ours.param_groups[0]
    assert ours.param_groups[0]["adapt"] == (options["always_adapt"] or decay > 0)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_of_sgd_continues_where_tensors_do_not_adapt(momentum, nesterov, maximize):
    theirs = torch.optim.SGD(
        groups(parameters(), weight_decay=0.1),
        0.5,
        momentum=momentum,
        weight_decay=1e-3,
        nesterov=nesterov and momentum > 0,
        maximize=maximize,
    )
    # By default, tensors of fewer than two dimensions do not adapt.
    ours = LARS(
        [{"params": (of := parameters())[:3]}, {"params": of[3:], "adapt": False}],
        0.1,
        dialect="torch",
        eps=1.0,
        implementation="foreach",
    )
    assert_continues(theirs, ours)
    assert "dampening" not in ours.param_groups[0]
    assert ours.param_groups[0]["eps"] == 1.0


def test_state_of_an_earlier_sgd_does_not_maximize():
    saved = torch.optim.SGD(parameters(), 0.5).state_dict()
    del saved["param_groups"][0]["maximize"]  # earlier versions of torch had no such option
    ours = LARS(parameters(), 0.1, maximize=True)
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["maximize"] is False


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_foreign_state_without_buffers_loads_into_any_dialect(dialect):
    """Of a run that was saved before its first step, or had no momentum."""

    def untouched(optimizer):
        return optimizer

    def without_momentum(optimizer):
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
        stepped(optimizer)
        for p in optimizer.param_groups[0]["params"]:
            optimizer.state[p]["momentum_buffer"] = None  # as in SGD of earlier torch versions
        return optimizer

    for prepare in (untouched, without_momentum):
        for make in (torch.optim.SGD, timm.optim.Lars):
            theirs = prepare(make(parameters(), 0.5, momentum=0.9, weight_decay=1e-3))
            ours = LARS(parameters(), 0.1, dialect=dialect)
            ours.load_state_dict(theirs.state_dict())
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
    theirs = Larc(torch.optim.SGD(parameters(), 0.5, 0.9, weight_decay=0.1), dialect == "larc")
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
    moved(theirs, ours).load_state_dict(saved)
    assert "dampening" not in ours.param_groups[0]
    expected = run(theirs, range(20, 40))
    assert_close(run(ours, range(20, 40)), expected, rtol=1e-12, atol=1e-15)


SGD, TIMM = torch.optim.SGD, timm.optim.Lars
REFUSED = {
    "adapting": (SGD, {}, {}, "momentum_buffer of parameter 3 is of torch.optim.SGD, without"),
    "sgd's dampening": (SGD, {"dampening": 0.1}, {"adapt": False}, "has dampening 0.1.*valid: 0"),
    "timm's dampening": (TIMM, {"dampening": 0.1}, {}, "has dampening 0.1, which LARS lacks"),
    "growing momentum": (SGD, {"momentum": 1.5}, {"adapt": False}, r"momentum must be in \[0, 1\)"),
    "adam": (torch.optim.Adam, {}, {}, "parameter 0 has 'step', a Tensor; valid: the tensors mom"),
    "pytorch_optimizer": (
        pytorch_optimizer.LARS,
        {},
        {},
        r"param_groups\[0\] of the loaded state has no 'dialect'; valid: state of LARS, torch",
    ),
    **{
        f"{name} in {dialect}": (
            make,
            {"weight_decay": 0.1},
            {"adapt": False, "dialect": dialect},
            f"the loaded state is of {name}, dialect 'torch', this optimizer of dialect "
            f"'{dialect}'; their momentum buffers are not interchangeable",
        )
        for name, make in (("torch.optim.SGD", SGD), ("timm's Lars", TIMM))
        for dialect in sorted(set(DIALECTS) - {"torch"})
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_foreign_state_that_does_not_fit_is_refused_without_side_effects(name):
    make, options, own, message = REFUSED[name]
    if make is not torch.optim.Adam:
        options = {"momentum": 0.9, **options}
    theirs = stepped(make(parameters(), lr=0.5, **options))
    ours = stepped(LARS(parameters(), 0.1, **{"dialect": "torch", **own}))
    assert_refuses(ours, theirs.state_dict(), message)


def test_state_that_is_not_a_tensor_is_refused():
    ours = stepped(LARS(parameters(), 0.1))
    saved = copy.deepcopy(ours.state_dict())
    saved["state"][1]["momentum_buffer"] = 0.5
    assert_refuses(ours, saved, "parameter 1 has 'momentum_buffer', a float; valid: the tensors")


# torch.distributed.checkpoint


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(8, 4, dtype=model[0].weight.dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("dialect", ["torch", "mlperf-corrected"])
def test_torchs_distributed_state_dicts_resume_exactly(dialect, named, flat):
    """They name parameters, and initialise the state by a step at learning rate 0."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def make(master_weights=True):
        model = network(torch.bfloat16)
        return model, LARS(split_parameters(model, 0.01, named=named), 0.5, dialect=dialect,
                           master_weights=master_weights)  # fmt: skip

    model, optimizer = make()
    train(model, optimizer, range(4))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(4, 8))

    resumed, other = make()
    resumed.load_state_dict(weights)
    set_optimizer_state_dict(resumed, other, saved, options=options)
    train(resumed, other, range(4, 8))
    for a, b in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(other.state[a]["master"], optimizer.state[b]["master"])

    # State with masters loads without them, and the other way round.
    without, optimizer = make(master_weights=False)
    set_optimizer_state_dict(without, optimizer, saved, options=options)
    train(without, optimizer, range(1))
    assert set(optimizer.state[without[0].weight]) == {"momentum_buffer"}
    saved = copy.deepcopy(get_optimizer_state_dict(without, optimizer, options=options))
    model, optimizer = make()
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert set(optimizer.state[model[0].weight]) == {"momentum_buffer"}
    train(model, optimizer, range(1))
    assert optimizer.state[model[0].weight]["master"].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"denominator": "norm_of_sum"}, "denominator must be one of"),
        ({"momentum": 2.0}, "in .0, 1"),
    ],
)
def test_options_out_of_range_in_a_state_dict_of_lars_are_refused(options, message):
    optimizer = LARS([nn.Parameter(torch.ones(3, 2))], 0.1)
    state = optimizer.state_dict()
    state["param_groups"][0].update(options)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["momentum"] == 0.9
