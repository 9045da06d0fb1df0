"""State of SGD, timm's Lars and others: converted where that is exact, else refused by name."""

import pytest
import pytorch_optimizer
import timm.optim
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from largebatch.lars import DIALECTS, LARS
from tests.lars.problems import assert_close
from tests.lars.states import (
    assert_continues,
    assert_refuses,
    groups,
    moved,
    parameters,
    run,
    stepped,
)


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


@pytest.mark.parametrize(
    ("momentum", "nesterov", "maximize"),
    [(0.0, False, True), (0.9, False, False), (0.9, True, True)],
)
def test_state_of_sgd_continues_where_tensors_do_not_adapt(momentum, nesterov, maximize):
    theirs = torch.optim.SGD(
        groups(parameters(), weight_decay=0.1),
        0.5,
        momentum=momentum,
        weight_decay=1e-3,
        nesterov=nesterov,
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


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("make", [torch.optim.SGD, timm.optim.Lars])
def test_foreign_state_without_buffers_loads_into_any_dialect(make, dialect):
    """Of a run that was saved before its first step."""
    theirs = make(parameters(), 0.5, momentum=0.9, weight_decay=1e-3)
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
        for name, make, dialect in (
            ("torch.optim.SGD", SGD, "larc"),
            ("timm's Lars", TIMM, "mlperf"),
        )
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
