"""State dicts of Muon: resuming, older and foreign ones, and copies of the optimizer."""

import copy
import pickle

import pytest
import timm.optim
import torch
from torch import nn
from torch.testing import assert_close

from largebatch.lars import Muon
from tests.lars.muon.training import SHAPES, assert_equal, follow, make, run, tensors
from tests.lars.states import assert_refuses

FORMS = [
    (torch.float32, {"adjust_lr_fn": "trust_ratio", "others": {"rule": "adamw"}}),
    (torch.float64, {"norm_projection": True, "conv_mode": "batched"}),
    (torch.bfloat16, {"master_weights": True, "ns_coefficients": ((3.0, -4.0, 2.0),)}),
]


@pytest.mark.parametrize(("dtype", "options"), FORMS)
def test_a_loaded_state_dict_and_a_copy_continue_bit_for_bit(dtype, options):
    optimizer = make(dtype, **options)
    run(optimizer, range(3))
    shared = {name: value for name, value in options.items() if name == "master_weights"}
    other = follow(optimizer, make(dtype, lr=0.7, momentum=0.5, **shared))
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    kept = copy.deepcopy(saved)
    other.load_state_dict(saved)
    copies = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    assert all(one.trust_ratios() == optimizer.trust_ratios() for one in copies)
    run(optimizer, range(3, 6))
    for one in (other, *copies):
        run(one, range(3, 6))
        assert_equal(one, optimizer)
    for index, state in kept["state"].items():  # what was loaded is a copy
        assert all(torch.equal(value, saved["state"][index][n]) for n, value in state.items())
    for one in copies:
        one.add_param_group({"params": [nn.Parameter(torch.ones(2))], "orthogonal": False})
        assert one.param_groups[-1]["rule"] == options.get("others", {"rule": "sgd"})["rule"]


def test_state_of_another_rule_or_optimizer_is_refused_before_anything_changes():
    optimizer = make(rules=["sgd"])
    run(optimizer, range(2))
    other = make(rules=["adamw"])
    run(other, range(2))
    of = [nn.Parameter(t) for t in tensors(0, SHAPES)]
    adamw = Muon([{"params": of, "orthogonal": False, "rule": "adamw"}], 0.1)
    run(adamw, range(2))
    refused = r"param_groups\[1\] of the loaded state is updated by adamw, .* by sgd; their state"
    assert_refuses(optimizer, other.state_dict(), refused)
    for of, part, key, value, message in (
        (optimizer, "param_groups", "orthogonal", False, "updated by sgd, .* by orthogonal steps"),
        (optimizer, "param_groups", "ns_steps", 0, "ns_steps must be a whole number >= 1, not 0"),
        (optimizer, "state", "momentum_buffer", torch.ones(3), r"0 has shape \(3,\) in the loaded"),
        (adamw, "state", "exp_avg_sq", None, "parameter 0 has no 'exp_avg_sq'; valid: step, "),
        (adamw, "state", "step", torch.zeros(3), r"shape \(3,\) in .*valid: one number"),
    ):
        saved = copy.deepcopy(of.state_dict())
        saved[part][0][key] = value
        assert_refuses(of, saved, message)
    theirs = timm.optim.Muon([{"params": list(g["params"])} for g in make(rules=[]).param_groups])
    message = "'orthogonal'; valid: state of largebatch's Muon or of torch.optim.Muon"
    assert_refuses(make(rules=[]), theirs.state_dict(), message)


def test_without_state_groups_keep_their_rule():
    optimizer, other = make(rules=["sgd"]), make(rules=["adamw"], lr=0.3)
    optimizer.load_state_dict(other.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.05]
    assert optimizer.param_groups[1]["rule"] == "sgd"
    assert [group["orthogonal"] for group in optimizer.param_groups] == [True, False]


@pytest.mark.parametrize(
    "options",
    [
        {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "momentum": 0.8},
        {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 4, "weight_decay": 0.01},
    ],
)
def test_training_goes_on_as_in_torchs_muon(options):
    def matrices():
        return [nn.Parameter(t) for t in tensors(0, SHAPES[:2])]

    theirs, ours = torch.optim.Muon(matrices(), 0.05, **options), Muon(matrices(), 7.0)
    run(theirs, range(4))
    follow(theirs, ours).load_state_dict(theirs.state_dict())
    for a, b in zip(run(ours, range(4, 6)), run(theirs, range(4, 6)), strict=True):
        assert_close(a, b, rtol=0, atol=5e-3)  # torch's Newton-Schulz is in BF16
        buffers = (of.state[p]["momentum_buffer"] for of, p in ((ours, a), (theirs, b)))
        assert_close(*buffers, rtol=1e-6, atol=1e-7)
    again = Muon(matrices(), 0.1)
    again.load_state_dict(ours.state_dict())


def test_options_that_torchs_muon_lacks_stay_as_they_are():
    kept = {"maximize": True, "norm_projection": True, "conv_mode": "batched"}
    optimizer = Muon([nn.Parameter(torch.ones(2, 3))], 0.1, momentum=0.6, **kept)
    optimizer.load_state_dict(torch.optim.Muon([nn.Parameter(torch.ones(2, 3))]).state_dict())
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in kept} == kept
    assert (group["momentum"], group["weight_decay"]) == (0.95, 0.1)
