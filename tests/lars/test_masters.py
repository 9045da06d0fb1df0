"""FP32 masters, loss scales, overflows and waits for the device, in LARS and every rule of Muon."""

from itertools import cycle

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from largebatch.lars import ADJUST_LR_FNS, LARS
from tests.host_reads import NoHostReads
from tests.lars.muon.training import (
    assert_equal,
    make,
    parameters,
    run,
    set_gradients,
)
from tests.lars.problems import FORMS, made
from tests.replay import Recording

OPTIONS = [
    {"denominator": "norm-of-sum", "maximize": True},
    {"nesterov": True},
    {"decay_at_zero_norm": False, "momentum": 0.5},
]
OF_LARS = [
    (implementation, {"dialect": dialect, **options})
    for (implementation, dialect), options in zip(FORMS, cycle(OPTIONS))
    if implementation != "triton" or dialect in ("larc", "mlperf-corrected")  # it is slow
]
OF_MUON = [
    *({"adjust_lr_fn": name} for name in ADJUST_LR_FNS),
    {"norm_projection": True, "nesterov": False},
    {"conv_mode": "batched", "adjust_lr_fn": "trust_ratio", "maximize": True},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [*OF_LARS, *(("muon", form) for form in OF_MUON)]


def bits(optimizer):
    """Return all that a step may change as integers, which tell -0 and NaN apart."""
    of, groups = parameters(optimizer), optimizer.param_groups
    states = [value for parameter in of for value in optimizer.state[parameter].values()]
    previous = [group["previous_lr"] for group in groups if "previous_lr" in group]
    found = [*of, *(parameter.grad for parameter in of), *states, *previous]
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [t.detach().clone().view(integers[t.element_size()]) for t in found]


def set_rates(optimizer, rates):
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def step_that_overflows(optimizer, scale):
    """Take a step at another rate, whose gradients are put back where they are as it left them."""
    of, rates = parameters(optimizer), [group["lr"] for group in optimizer.param_groups]
    given = [parameter.grad for parameter in of]
    set_gradients(optimizer, 99, scale)
    for number, parameter in enumerate(of):
        parameter.grad.view(-1)[0] = torch.nan if number % 2 else torch.inf
    kept = [parameter.grad.clone() for parameter in of]
    set_rates(optimizer, [7.0] * len(rates))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.ones(())
    optimizer.step()
    assert_close([parameter.grad for parameter in of], kept, rtol=0, atol=0, equal_nan=True)
    for parameter, gradient in zip(of, given, strict=True):
        parameter.grad = gradient
    set_rates(optimizer, rates)


@pytest.mark.parametrize(
    ("implementation", "form", "dtype"),
    [
        *((*case, dtype) for case, dtype in zip(OF_LARS, cycle([torch.float32, torch.float16]))),
        *(("muon", form, dtype) for form, dtype in zip(OF_MUON, cycle(DTYPES))),
    ],
    ids=str,
)
def test_a_loss_scale_is_divided_out_and_an_overflow_changes_nothing(implementation, form, dtype):
    """Before the first step, too, whose state is then that of no step."""
    options, scale = {"master_weights": True, **form}, 2.0**4
    scaled, plain = (made(implementation, dtype, **options) for _ in range(2))
    for optimizer in (scaled, plain):
        parameters(optimizer)[1].data[0, 0] = -0.0
    step_that_overflows(scaled, scale)
    states = [state[name] for state in scaled.state.values() for name in {*state} - {"master"}]
    assert not any(value.any() for value in states)
    for step in range(3):
        for optimizer in (scaled, plain):
            set_rates(optimizer, [0.1 / (step + 1)] * len(optimizer.param_groups))
        set_gradients(scaled, step, scale)
        scaled.grad_scale, scaled.found_inf = torch.tensor(scale), torch.zeros(())
        kept = [parameter.grad.clone() for parameter in parameters(scaled)]
        scaled.step()
        assert all(map(torch.equal, kept, [parameter.grad for parameter in parameters(scaled)]))
        set_gradients(plain, step)
        plain.step()
        before, ratios = bits(scaled), scaled.trust_ratios()
        step_that_overflows(scaled, scale)
        assert ratios == scaled.trust_ratios()
        assert all(map(torch.equal, before, bits(scaled)))
    for ours, theirs in zip(parameters(scaled), parameters(plain), strict=True):
        values = [o.state[p].get("master", p) for o, p in ((scaled, ours), (plain, theirs))]
        assert_close(*values, rtol=1e-5, atol=1e-5)
    steps = {float(state["step"]) for state in scaled.state.values() if "step" in state}
    assert steps == ({3.0} if implementation == "muon" else set())


@pytest.mark.parametrize(
    ("implementation", "form", "tensor_lr"),
    [(*c, lr) for c, lr in zip([c for c in CASES if c[0] != "fused"], cycle([False, True]))],
    ids=str,
)
def test_no_step_waits_for_the_device(implementation, form, tensor_lr, monkeypatch):
    """Runs the GPU's code on the CPU, where every read of a tensor's value can be caught."""
    lr = torch.tensor(0.1) if tensor_lr else 0.1
    optimizer = made(implementation, torch.float16, lr, master_weights=True, **form)
    if implementation == "muon":
        optimizer.implementation = "foreach"
    set_rates(optimizer, [lr] * len(optimizer.param_groups))
    for step in range(3):
        set_gradients(optimizer, step)
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.found_inf = torch.tensor(float(step == 1))
        with NoHostReads(), monkeypatch.context() as patch:
            patch.setattr(Tensor, "tolist", None)  # reads CPU memory without an operator
            optimizer.step()


def test_state_is_not_made_in_the_capture_of_a_cuda_graph(monkeypatch):
    half = nn.Parameter(torch.ones(2, 2, dtype=torch.float16))
    optimizers = [LARS([half], 1.0), LARS([half], 1.0, momentum=0.0, master_weights=True)]
    optimizers += [make(rules=[]), make(rules=["sgd"]), make(rules=["adamw"])]
    for optimizer in optimizers:
        optimizer.param_groups = optimizer.param_groups[-1:]
        set_gradients(optimizer, 0)
        with monkeypatch.context() as patch:
            patch.setattr("largebatch.lars.capture.captures", lambda device: True)
            with pytest.raises(RuntimeError, match=r"optimizer has no .* valid: take a step befor"):
                optimizer.step()
        assert not any(optimizer.state.values())
        optimizer.step()


@pytest.mark.parametrize("form", OF_MUON, ids=str)
def test_a_recorded_step_can_be_replayed_like_a_cuda_graph(form):
    """With other gradients, learning rates and overflow flags in the same tensors."""

    def build():
        lr = torch.tensor(0.1)
        optimizer = make(lr=lr, **form)
        optimizer.implementation = "foreach"
        for group in optimizer.param_groups[1:]:
            group["lr"] = lr
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.zeros(())
        run(optimizer, range(1))
        return optimizer, lr

    (replayed, rate), (eager, rate_of_eager) = build(), build()
    with Recording() as recording:
        replayed.step()
    recording.rewind()
    for step in range(1, 4):
        for optimizer, lr in ((replayed, rate), (eager, rate_of_eager)):
            into = [parameter.grad for parameter in parameters(optimizer)]
            set_gradients(optimizer, step)
            for parameter, gradient in zip(parameters(optimizer), into, strict=True):
                parameter.grad = gradient.copy_(parameter.grad)
            lr.fill_(0.1 / (step + 1))
            optimizer.found_inf.fill_(float(step == 2))
        recording.replay()
        eager.step()
    assert_equal(replayed, eager)
