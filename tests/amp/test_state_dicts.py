"""State dicts that torch.load reads by default, and refused ones, which change nothing."""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop
from torch.utils._pytree import tree_leaves

from largebatch.amp import MasterWeights, Precision
from largebatch.lars import LARS, Muon, as_scheduler
from tests.lars.muon.training import run

numbers = st.sampled_from([float, np.float64, np.float32, lambda x: np.array(x)[()]])


def half():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s).bfloat16()) for s in ((4, 3), (5,))]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["lars", "corrected", "muon", "sgd"]), numbers, numbers, numbers)
def test_every_value_in_a_state_dict_is_plain(kind, rate, option, scale):
    parameters = half()
    scale = float if kind == "sgd" else scale  # in torch's own, what a user writes is what is saved
    groups = [{"params": [p], "lr_scale": scale(0.5)} for p in parameters]
    if kind == "muon":
        groups[1]["orthogonal"] = False
        others = {"rule": "adamw", "betas": (option(0.9), option(0.99))}
        optimizer = Muon(groups, rate(0.1), option(0.5), others=others, master_weights=True)
    elif kind == "sgd":
        optimizer = SGD(groups, rate(0.1), momentum=0.9)
    else:
        dialect = "mlperf-corrected" if kind == "corrected" else "torch"
        optimizer = LARS(
            groups, rate(0.1), option(0.5), weight_decay=option(0.1), dialect=dialect, eps=option(0)
        )
    precision = Precision("fp16", loss_scale=rate(8.0))
    scheduler = as_scheduler(
        optimizer, lambda step: rate(0.1 / (1 + step)), base_lr=option(0.2), steps_done=np.int64(3)
    )
    states = [copy.deepcopy(optimizer.state_dict())]
    run(optimizer, range(1))
    scheduler.step()
    states += [optimizer.state_dict(), scheduler.state_dict(), precision.state_dict()]
    if kind != "sgd":
        for group in optimizer.param_groups:
            group["lr"] = rate(0.3)
        states.append(optimizer.state_dict())
    file = io.BytesIO()
    torch.save(states, file)
    torch.load(io.BytesIO(file.getvalue()))
    kinds = {type(leaf).__module__ for leaf in tree_leaves(states)}
    assert kinds <= {"builtins", "torch"}


INNER = {
    "sgd": lambda p: SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: AdamW(p, 0.1, amsgrad=True),
    "rmsprop": lambda p: RMSprop(p, 0.1, momentum=0.5, centered=True),
}
FOREIGN = {
    "lars": lambda p: LARS(p, 0.1, master_weights=True),
    "lars like sgd": lambda p: LARS(p, 0.1, dialect="torch", adapt=False),
    "muon": lambda p: Muon([{"params": p, "orthogonal": False}], 0.1, 0.5, master_weights=True),
    **INNER,
    "adagrad": lambda p: Adagrad(p, 0.1),
}


def snapshot(optimizer):
    masters = dict(optimizer._masters)
    content = copy.deepcopy(
        (list(masters.values()), optimizer.state_dict(), optimizer.param_groups)
    )
    return [master.data_ptr() for master in masters.values()], content


def assert_refused(optimizer, state, *names):
    places, content = snapshot(optimizer)
    with pytest.raises(ValueError, match="valid: ") as caught:
        optimizer.load_state_dict(state)
    assert "\n" not in str(caught.value)
    assert all(name in str(caught.value) for name in names), str(caught.value)
    now, after = snapshot(optimizer)
    assert now == places
    torch.testing.assert_close(after, content, rtol=0, atol=0)
    run(optimizer, range(1))


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("stepped", [True, False])
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_state_that_does_not_fit_is_refused_and_changes_nothing(name, stepped, data):
    optimizer = MasterWeights(INNER[name](half()))
    other = MasterWeights(INNER[name](half()))
    run(other, range(3))
    if stepped:
        run(optimizer, range(3))
    state = copy.deepcopy(other.state_dict())
    which = data.draw(st.integers(0, 1))
    of_parameter = state["state"][which]
    tensors = [k for k, v in of_parameter.items() if isinstance(v, torch.Tensor) and v.dim()]
    key = data.draw(st.sampled_from(tensors))
    shape = of_parameter[key].shape
    reversed_ = shape[::-1] if len(shape) > 1 else (7,)
    others = [(1,), (), (2, *shape), (*shape[:-1], shape[-1] + 1), reversed_]
    unfit = [*(torch.ones(other) for other in others), 3.0, torch.ones(shape).int(), "x"]
    of_parameter[key] = data.draw(st.sampled_from(unfit))
    assert_refused(optimizer, state, f"{key} of parameter {which}")


@pytest.mark.parametrize("name", INNER)
def test_the_state_of_another_optimizer_or_model_is_refused(name):
    for foreign, make in FOREIGN.items():
        optimizer, other = MasterWeights(INNER[name](half())), make(half())
        run(optimizer, range(3))
        run(other, range(3))
        if name != foreign:
            assert_refused(optimizer, copy.deepcopy(other.state_dict()), "param_groups[0]")
        else:
            optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
            run(optimizer, range(3))
    saved = optimizer.state_dict()
    assert_refused(optimizer, {"param_groups": saved["param_groups"]}, "'state'")
    (group,) = saved["param_groups"]
    longer = {**group, "params": [*group["params"], 2]}
    assert_refused(optimizer, {**saved, "param_groups": [longer]}, "[3]")
    assert_refused(optimizer, {**saved, "param_groups": [group, group]}, "[2, 2]")


def test_hooks_run_as_in_torch_optimizers_and_may_replace_the_state():
    optimizer = MasterWeights(SGD(half(), 0.1, momentum=0.9))
    run(optimizer, range(3))
    good, calls = copy.deepcopy(optimizer.state_dict()), []
    masters = [state["master"].clone() for state in good["state"].values()]
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "state": good["state"]})
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: calls.extend(state["master"].clone() for state in loaded.state.values())
    )
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": state["state"]})
    run(optimizer, range(3))
    optimizer.load_state_dict({"state": {}, "param_groups": good["param_groups"]})
    assert all(map(torch.equal, calls, masters))
    for parameter, master in zip(optimizer.param_groups[0]["params"], masters, strict=True):
        parameter.data.copy_(master)
    saved = optimizer.state_dict()
    assert calls[2:] == ["before"]
    assert torch.equal(saved["more"][0]["master"], masters[0])
