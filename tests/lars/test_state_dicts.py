"""State dicts of LARS: torch's conventions, and torch.distributed.checkpoint."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from largebatch.lars import DIALECTS, LARS, Muon, hidden_weights, split_parameters
from largebatch.lars.options import DENOMINATORS
from tests.lars.states import (
    assert_refuses,
    groups,
    moved,
    parameters,
    run,
    stepped,
)


def test_the_state_that_pre_hooks_return_is_loaded_and_post_hooks_see_it_finished():
    saved = stepped(LARS(parameters(torch.float16), 0.1, master_weights=True)).state_dict()
    optimizer = LARS(parameters(torch.float16), 0.1, master_weights=True)
    master = torch.full((3, 5), 1 + 2.0**-20)  # not a number of half precision
    saved["state"][3] = {**saved["state"][3], "master": master}
    seen = []

    def look(optimizer):
        state = optimizer.state[optimizer.param_groups[0]["params"][3]]
        seen.append({key: value.clone() for key, value in state.items()})

    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: saved)
    optimizer.register_load_state_dict_post_hook(look)
    empty = LARS(parameters(torch.float16), 0.1, master_weights=True).state_dict()
    for loads in (1, 2):  # the hooks are not used up
        optimizer.load_state_dict(empty)
        assert len(seen) == loads
    for name, value in saved["state"][3].items():
        assert seen[0][name].dtype == torch.float32
        assert torch.equal(seen[0][name], value)


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


def test_other_numbers_of_groups_and_tensors_are_refused_without_side_effects():
    optimizer = stepped(LARS(parameters(), 0.1))
    two = LARS(groups(parameters()), 0.1).state_dict()
    assert_refuses(optimizer, two, "different number of parameter groups")
    fewer = LARS(parameters()[:2], 0.1).state_dict()
    assert_refuses(optimizer, fewer, "doesn't match the size")


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


def test_state_that_is_not_a_tensor_is_refused():
    ours = stepped(LARS(parameters(), 0.1))
    saved = copy.deepcopy(ours.state_dict())
    saved["state"][1]["momentum_buffer"] = 0.5
    assert_refuses(ours, saved, "parameter 1 has 'momentum_buffer', a float; valid: the tensors")


# torch.distributed.checkpoint


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
    for a, b in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert other.state[a].keys() == optimizer.state[b].keys() >= {"master"}
        for name, value in other.state[a].items():
            assert torch.equal(value, optimizer.state[b][name]), name

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
