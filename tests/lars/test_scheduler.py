"""The torch scheduler of a schedule: rates of groups, groups added later, and its state."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.optim import Lamb
from timm.optim._param_groups import param_groups_layer_decay
from timm.scheduler import PolyLRScheduler
from torch import nn
from torch.optim import SGD, lr_scheduler

from largebatch.lars import LARS, as_scheduler, constant, cosine, polynomial

SCHEDULE = polynomial(2.0, 40, warmup_steps=5, start=0.25, end=1e-4)


def parameter():
    return nn.Parameter(torch.ones(3, 2))


def made(rates, default, *, tensors=False, kind=SGD):
    """Return an optimizer with a group for each rate; None leaves it to the optimizer's own."""
    as_rate = torch.tensor if tensors else float
    groups = [
        {"params": [parameter()]} | ({} if rate is None else {"lr": as_rate(rate)})
        for rate in rates
    ]
    return kind(groups, lr=as_rate(default))


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def step(optimizer, scheduler, times=1):
    """Return the rates before each of some updates."""
    seen = []
    for _ in range(times):
        seen.append(rates_of(optimizer))
        optimizer.step()
        scheduler.step()
    return seen


def through_a_file(state):
    """Save a state dict as frameworks do, and load it without unpickling any code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


positive = st.floats(1e-4, 100)
some_rates = st.lists(st.none() | positive, min_size=1, max_size=4)


@given(some_rates, positive, st.integers(0, 30), st.booleans())
def test_groups_keep_their_ratio_to_the_optimizers_own_rate(rates, default, done, tensors):
    optimizer = made(rates, default, tensors=tensors)
    given_rates = rates_of(optimizer)
    own = float(optimizer.defaults["lr"])
    base = own if own in given_rates else max(given_rates)
    scheduler = as_scheduler(optimizer, SCHEDULE, steps_done=done)
    for number, found in enumerate(step(optimizer, scheduler, 3)):
        wanted = [SCHEDULE(done + number) * rate / base for rate in given_rates]
        assert found == pytest.approx(wanted, rel=1e-6 if tensors else 1e-15)
    if tensors:
        assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)


@given(positive, positive, st.integers(1, 4), st.integers(0, 39))
def test_one_rate_takes_the_schedule_itself_whatever_it_was(rate, default, count, done):
    """Bit for bit, as the schedule alone decides the rates of every run with one rate."""
    for rates in ([rate] * count, [None] * count):
        optimizer = made(rates, default)
        scheduler = as_scheduler(optimizer, SCHEDULE, steps_done=done)
        assert step(optimizer, scheduler) == [[SCHEDULE(done)] * count]
        assert rates_of(optimizer) == scheduler.get_last_lr() == [SCHEDULE(done + 1)] * count


@pytest.mark.parametrize(
    ("rates", "default", "options", "factors"),
    [
        ([0.2, 0.0048], 0.2, {}, [1, 0.024]),  # Barlow Twins
        ([0.2, 0.0048], 1e-3, {}, [1, 0.024]),  # no group has the optimizer's own rate
        ([None, 0.1], 0.01, {}, [1, 10]),  # the backbone's rate is the optimizer's own
        ([None, 0.1], 0.01, {"base_lr": 0.1}, [0.1, 1]),
        ([0.0, 0.1], 0.1, {}, [0, 1]),  # a frozen group
        ([None, 0.1], 0.0, {}, [0, 1]),
        ([0.0, 0.0], 0.0, {}, [1, 1]),  # as in VICReg, whose loop sets the rates
        ([0.0, 0.0], 0.5, {}, [1, 1]),
        ([0.0, 0.0], 0.5, {"base_lr": 0.5}, [0, 0]),
    ],
)
def test_the_factor_of_each_group(rates, default, options, factors):
    optimizer = made(rates, default, kind=LARS)
    as_scheduler(optimizer, SCHEDULE, steps_done=9, **options)
    assert rates_of(optimizer) == pytest.approx([SCHEDULE(9) * f for f in factors], rel=1e-15)


@pytest.mark.parametrize("base_lr", [0, -1.0, float("nan")])
def test_a_base_rate_that_is_not_above_zero_is_refused(base_lr):
    optimizer = made([None], 0.1)
    with pytest.raises(ValueError, match="base_lr must be above 0, not"):
        as_scheduler(optimizer, SCHEDULE, base_lr=base_lr)
    assert rates_of(optimizer) == [0.1]


def test_the_lr_scale_of_timms_groups_is_followed_as_by_timms_scheduler():
    def optimizer():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model.group_matcher = lambda coarse: lambda name: int(name.split(".")[0])
        model.no_weight_decay = set
        groups = param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.5)
        return Lamb(groups, lr=2.0)

    ours, theirs = optimizer(), optimizer()
    assert len({group["lr_scale"] for group in ours.param_groups}) == 3
    scheduler = as_scheduler(ours, polynomial(2.0, 20, power=1.5))
    timms = PolyLRScheduler(theirs, 20, power=1.5, t_in_epochs=False)
    for number in range(1, 20):
        step(ours, scheduler)
        timms.step_update(number)
        assert rates_of(ours) == pytest.approx(rates_of(theirs), rel=1e-12)


@given(some_rates, positive, st.integers(0, 12), st.integers(0, 12), st.booleans())
def test_a_loaded_scheduler_continues_bit_for_bit(rates, default, before, after, first):
    """In the order that torch recommends, and in the other one, in which torch's do not."""

    def rebuilt():
        optimizer = made(rates, default)
        return optimizer, as_scheduler(optimizer, SCHEDULE)

    optimizer, scheduler = rebuilt()
    step(optimizer, scheduler, before)
    saved = through_a_file([optimizer.state_dict(), scheduler.state_dict()])
    wanted = step(optimizer, scheduler, after)

    if first:
        other, resumed = rebuilt()
        other.load_state_dict(saved[0])
    else:
        other = made(rates, default)
        other.load_state_dict(saved[0])
        resumed = as_scheduler(other, SCHEDULE)
    resumed.load_state_dict(saved[1])
    assert step(other, resumed, after) == wanted
    assert resumed.get_last_lr() == scheduler.get_last_lr()


def test_the_scheduler_alone_restores_the_rates():
    optimizer, other = made([0.2, 0.0048], 0.2), made([0.2, 0.0048], 0.2, tensors=True)
    scheduler, resumed = (as_scheduler(o, SCHEDULE) for o in (optimizer, other))
    step(optimizer, scheduler, 7)
    held = [group["lr"] for group in other.param_groups]
    resumed.load_state_dict(through_a_file(scheduler.state_dict()))
    assert rates_of(other) == pytest.approx(rates_of(optimizer), rel=1e-7)
    assert all(a is g["lr"] for a, g in zip(held, other.param_groups, strict=True))  # in place


def test_loading_leaves_rates_alone_that_something_else_sets():
    """Such as the schedulers of a sequence, of which only one is active."""

    def rebuilt():
        optimizer = made([None], 2.0)
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5), as_scheduler(optimizer, cosine(2.0, 20))]
        return optimizer, lr_scheduler.SequentialLR(optimizer, parts, [4])

    optimizer, scheduler = rebuilt()
    step(optimizer, scheduler, 2)
    states = copy.deepcopy([optimizer.state_dict(), scheduler.state_dict()])
    other, resumed = rebuilt()
    other.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    assert step(other, resumed, 6) == step(optimizer, scheduler, 6)


def test_the_state_has_neither_the_schedule_nor_the_optimizer_and_does_not_change_later():
    optimizer = made([0.2, 0.1], 0.2)
    scheduler = as_scheduler(optimizer, SCHEDULE)
    state = scheduler.state_dict()
    assert not {"optimizer", "_schedule"} & state.keys()
    kept = copy.deepcopy(state)
    optimizer.add_param_group({"params": [parameter()], "lr": 0.4})
    step(optimizer, scheduler, 2)
    assert state == kept


def test_groups_that_share_a_tensor_as_their_rate_get_their_own_where_their_scales_differ():
    rate = torch.tensor(1.0)
    groups = [{"params": [parameter()], "lr_scale": scale} for scale in (1.0, 0.1, 1.0)]
    optimizer = LARS(groups, rate)
    scheduler = as_scheduler(optimizer, constant(2.0))
    assert rates_of(optimizer) == pytest.approx([2.0, 0.2, 2.0])
    assert optimizer.param_groups[0]["lr"] is rate
    assert optimizer.param_groups[2]["lr"] is rate
    optimizer.add_param_group({"params": [parameter()], "lr_scale": 0.5})
    step(optimizer, scheduler)
    assert rates_of(optimizer) == pytest.approx([2.0, 0.2, 2.0, 1.0])
