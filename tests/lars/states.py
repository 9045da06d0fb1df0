"""Runs that load the state of other runs, for tests of state dicts."""

import copy

import pytest
import torch
from torch import nn

from largebatch.lars import polynomial
from tests.lars.muon.training import follow
from tests.lars.problems import assert_close, tensors

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
    return [{"params": of[:3], **first}, {"params": of[3:]}]


def assert_continues(theirs, ours):
    """Load their state after 20 steps, and compare the weights after 20 more in both."""
    run(theirs, range(20))
    follow(theirs, ours).load_state_dict(theirs.state_dict())
    expected = run(theirs, range(20, 40))
    assert_close(run(ours, range(20, 40)), expected, rtol=1e-12, atol=1e-15)


def assert_refuses(optimizer, state_dict, message):
    """Check that the state dict is refused, and that neither it nor the optimizer changes."""
    given = copy.deepcopy(state_dict)
    before = copy.deepcopy(optimizer.state_dict())
    options = copy.deepcopy([{**g, "params": len(g["params"])} for g in optimizer.param_groups])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
    assert options == [{**g, "params": len(g["params"])} for g in optimizer.param_groups]
    assert state_dict["param_groups"] == given["param_groups"]
    assert state_dict["state"].keys() == given["state"].keys()
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


def stepped(optimizer):
    run(optimizer, range(3))
    return optimizer
