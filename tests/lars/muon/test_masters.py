"""FP32 masters, loss scales, overflows and waits for the device, in every rule of Muon."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from largebatch.lars import ADJUST_LR_FNS, newton_schulz
from largebatch.lars.implementations import IMPLEMENTATIONS
from largebatch.lars.muon import optimizer as of_muon
from largebatch.lars.muon.reference import Hyper
from largebatch.lars.muon.step import directions_of, update
from tests.host_reads import NoHostReads
from tests.lars.muon.training import (
    SHAPES,
    assert_equal,
    make,
    parameters,
    run,
    set_gradients,
    tensors,
)
from tests.replay import Recording

FORMS = [
    *({"adjust_lr_fn": name} for name in ADJUST_LR_FNS),
    {"norm_projection": True, "nesterov": False},
    {"conv_mode": "batched", "adjust_lr_fn": "trust_ratio", "maximize": True},
]


def bits(optimizer):
    """Return parameters, gradients and state as integers, which tell -0 and NaN apart."""
    of = parameters(optimizer)
    states = [value for parameter in of for value in optimizer.state[parameter].values()]
    found = [*of, *(parameter.grad for parameter in of), *states]
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [t.detach().clone().view(integers[t.element_size()]) for t in found]


def overflowed(optimizer, step, scale):
    set_gradients(optimizer, step, scale)
    for number, parameter in enumerate(parameters(optimizer)):
        parameter.grad.view(-1)[0] = torch.nan if number % 2 else torch.inf
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.ones(())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_a_loss_scale_is_divided_out_and_an_overflow_changes_nothing(form, dtype):
    """Before the first step, too, whose state is then that of no step."""
    scaled, plain = (make(dtype, master_weights=True, **form) for _ in range(2))
    for optimizer in (scaled, plain):
        parameters(optimizer)[1].data[0, 0] = -0.0
    for step in range(3):
        if step:
            before, ratios = bits(scaled), scaled.trust_ratios()
            overflowed(scaled, 99, 2.0**4)
            after = [parameter.grad.clone() for parameter in parameters(scaled)]
            scaled.step()
            assert ratios == scaled.trust_ratios()
            for gradient, parameter in zip(after, parameters(scaled), strict=True):
                assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)
            set_gradients(scaled, step - 1, 2.0**4)  # those of ``before``
            assert all(map(torch.equal, before, bits(scaled)))
        else:
            overflowed(scaled, 99, 2.0**4)
            scaled.step()
            for parameter in parameters(scaled):
                state = scaled.state[parameter]
                assert not any(v.any() for name, v in state.items() if name != "master")
        set_gradients(scaled, step, 2.0**4)
        scaled.grad_scale, scaled.found_inf = torch.tensor(2.0**4), torch.zeros(())
        kept = [parameter.grad.clone() for parameter in parameters(scaled)]
        scaled.step()
        assert all(
            torch.equal(parameter.grad, gradient)
            for gradient, parameter in zip(kept, parameters(scaled), strict=True)
        )
        set_gradients(plain, step)
        plain.step()
    for ours, theirs in zip(parameters(scaled), parameters(plain), strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    steps = {float(state["step"]) for state in scaled.state.values() if "step" in state}
    assert steps == {3.0}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_no_step_waits_for_the_device(form, tensor_lr, monkeypatch):
    """Runs the GPU's code on the CPU, where every read of a tensor's value can be caught."""
    monkeypatch.setattr(of_muon, "implementation_for", lambda *_: IMPLEMENTATIONS["foreach"])
    lr = torch.tensor(0.1) if tensor_lr else 0.1
    optimizer = make(torch.float16, lr=lr, master_weights=True, **form)
    for group in optimizer.param_groups[1:]:
        group["lr"] = lr
    for step in range(3):
        set_gradients(optimizer, step)
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.found_inf = torch.tensor(float(step == 1))
        with NoHostReads(), monkeypatch.context() as patch:
            patch.setattr(Tensor, "tolist", None)  # reads CPU memory without an operator
            optimizer.step()


class NoCopies(TorchDispatchMode):
    """Fail on operators that take a tensor on the CPU beside one on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        leaves = tree_leaves((args, kwargs, result))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
        assert devices <= {"meta"}, f"{function} copies to the device, and waits for it"
        return result


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_no_step_copies_numbers_to_the_device(form, tensor_lr, monkeypatch):
    """The host waits for copies from its pageable memory, and no CUDA graph can hold them."""
    lr = torch.tensor(0.1, device="meta") if tensor_lr else 0.1
    hyper = Hyper(**{"lr": lr, "momentum": 0.5, "weight_decay": 0.1, **form})
    weights, gradients, buffers = (
        [t.to("meta") for t in tensors(number, SHAPES)] for number in range(3)
    )
    scale, found_inf = (torch.ones((), device="meta") for _ in range(2))
    halves = [weight.half() for weight in weights]
    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (Tensor, "new_tensor")):
        monkeypatch.setattr(owner, name, None)  # copies without an operator
    with NoCopies():
        update(
            weights,
            gradients,
            buffers,
            hyper,
            scale,
            found_inf,
            halves,
            lambda moves: directions_of(moves, hyper.conv_mode, newton_schulz),
        )


def test_state_is_not_made_in_the_capture_of_a_cuda_graph(monkeypatch):
    monkeypatch.setattr("largebatch.lars.capture.captures", lambda device: True)
    for rule in (None, "sgd", "adamw"):
        optimizer = make(rules=[] if rule is None else [rule])
        if rule is not None:
            del optimizer.param_groups[0]
        set_gradients(optimizer, 0)
        with pytest.raises(
            RuntimeError, match=r"the optimizer has no .* valid: take a step before"
        ):
            optimizer.step()
        assert not any(optimizer.state.values())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_a_recorded_step_can_be_replayed_like_a_cuda_graph(form, monkeypatch):
    """With other gradients, learning rates and overflow flags in the same tensors."""
    monkeypatch.setattr(of_muon, "implementation_for", lambda *_: IMPLEMENTATIONS["foreach"])

    def build():
        lr = torch.tensor(0.1)
        optimizer = make(lr=lr, **form)
        for group in optimizer.param_groups[1:]:
            group["lr"] = lr
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.zeros(())
        run(optimizer, range(1))
        return optimizer, lr

    def change(optimizer, lr, step):
        into = [parameter.grad for parameter in parameters(optimizer)]
        set_gradients(optimizer, step)
        for parameter, gradient in zip(parameters(optimizer), into, strict=True):
            parameter.grad = gradient.copy_(parameter.grad)
        lr.fill_(0.1 / (step + 1))
        optimizer.found_inf.fill_(float(step == 2))

    (replayed, of_replayed), (eager, of_eager) = build(), build()
    recording = Recording()
    with recording:
        replayed.step()
    recording.rewind()
    for step in range(1, 4):
        change(replayed, of_replayed, step)
        recording.replay()
        change(eager, of_eager, step)
        eager.step()
    assert_equal(replayed, eager)
