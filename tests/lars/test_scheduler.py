"""The torch scheduler of a schedule: rates of groups, those that are added in a run, and state."""

import copy

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, lr_scheduler

from largebatch.amp import MasterWeights
from largebatch.lars import LARS, Muon, as_scheduler, constant, polynomial

STEPS = 40
SCHEDULE = polynomial(2.0, STEPS, warmup_steps=5, start=0.25, end=1e-4)
FROM_ZERO = polynomial(2.0, STEPS, warmup_steps=5)  # and to 0

positive = st.floats(1e-3, 10)
some_rates = st.lists(st.none() | positive, min_size=1, max_size=4)
kinds = st.sampled_from([SGD, LARS, Muon, lambda *args: MasterWeights(SGD(*args))])


def group(lr=None, tensors=False, **options):
    options["params"] = [nn.Parameter(torch.ones(3, 2))]
    return options if lr is None else options | {"lr": torch.tensor(lr) if tensors else lr}


def made(rates, default, *, tensors=False, kind=SGD):
    """Return an optimizer with a group for each rate; None leaves it to the optimizer's own."""
    return kind([group(rate, tensors) for rate in rates], group(default, tensors)["lr"])


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def step(optimizer, scheduler, times=1):
    seen = []
    for _ in range(times):
        optimizer.step()
        scheduler.step()
        seen.append(rates_of(optimizer))
    return seen


@given(some_rates, positive, st.integers(0, 30), st.booleans())
def test_groups_keep_their_ratio_to_the_optimizers_own_rate(rates, default, done, tensors):
    optimizer = made(rates, default, tensors=tensors)
    given_rates = rates_of(optimizer)
    own = float(optimizer.defaults["lr"])
    base = own if own in given_rates else max(given_rates)
    scheduler = as_scheduler(optimizer, SCHEDULE, steps_done=done)
    for number, found in enumerate([rates_of(optimizer), *step(optimizer, scheduler, 2)]):
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
        assert rates_of(optimizer) == [SCHEDULE(done)] * count
        assert step(optimizer, scheduler) == [[SCHEDULE(done + 1)] * count]
        assert rates_of(optimizer) == scheduler.get_last_lr()


def test_a_base_rate_and_rates_of_zero():
    for rates, default, options, factors in (
        ([None, 0.1], 0.01, {"base_lr": 0.1}, [0.1, 1]),
        ([0.0, 0.1], 0.1, {}, [0, 1]),  # a frozen group
        ([None, 0.1], 0.0, {}, [0, 1]),
        ([0.0, 0.0], 0.0, {}, [1, 1]),  # as in VICReg, whose loop sets the rates
        ([0.0, 0.0], 0.5, {"base_lr": 0.5}, [0, 0]),
    ):
        optimizer = made(rates, default, kind=LARS)
        as_scheduler(optimizer, SCHEDULE, steps_done=9, **options)
        expected = [SCHEDULE(9) * factor for factor in factors]
        assert rates_of(optimizer) == pytest.approx(expected, rel=1e-15), rates
    for base_lr in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="base_lr must be above 0, not"):
            as_scheduler(made([None], 0.1), SCHEDULE, base_lr=base_lr)


@given(
    some_rates,
    st.none() | positive,
    positive,
    st.integers(0, 12),
    st.integers(0, 2),
    st.sampled_from(["in order", "made last", "scheduler first", "from the optimizer", "copied"]),
)
@example([0.2, 0.0048], 0.1, 0.2, 7, 2, "from the optimizer")
def test_a_resumed_run_has_the_rates_of_one_without_a_break(
    first, share, default, done, since, way
):
    """Bit for bit, whatever is loaded first, where a group was added ``since`` some updates."""

    def started():
        optimizer = made([None, *first], default, kind=LARS)
        return optimizer, as_scheduler(optimizer, SCHEDULE)

    def added(optimizer):
        optimizer.add_param_group(group(share and share * rates_of(optimizer)[0]))

    optimizer, scheduler = started()
    step(optimizer, scheduler, done)
    added(optimizer)
    step(optimizer, scheduler, since)
    state, of_scheduler = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))

    if way == "copied":
        other, resumed = copy.deepcopy((optimizer, scheduler))
    elif way in ("in order", "scheduler first"):
        other, resumed = started()
        if way == "scheduler first":
            resumed.load_state_dict(of_scheduler)
        added(other)
        other.load_state_dict(state)
    else:
        other = made([None, *first, None], default, kind=LARS)
        other.load_state_dict(state)
        alone = way == "from the optimizer"
        resumed = as_scheduler(other, SCHEDULE, **({"steps_done": done + since} if alone else {}))
    if way in ("in order", "made last"):
        resumed.load_state_dict(of_scheduler)
    wanted = step(optimizer, scheduler, 3)
    for seen, rates in zip(step(other, resumed, 3), wanted, strict=True):
        rel = 1e-12 if way == "from the optimizer" else 0
        assert seen == pytest.approx(rates, rel=rel, abs=0)


def test_the_scheduler_alone_restores_the_rates():
    """Its state has neither the schedule nor the optimizer, and does not change later."""
    optimizer, other = made([0.2, 0.0048], 0.2), made([0.2, 0.0048], 0.2, tensors=True)
    scheduler, resumed = (as_scheduler(o, SCHEDULE) for o in (optimizer, other))
    step(optimizer, scheduler, 7)
    held, rates = [group["lr"] for group in other.param_groups], rates_of(optimizer)
    state = scheduler.state_dict()
    assert not {"optimizer", "_schedule"} & state.keys()
    optimizer.add_param_group(group(0.4))
    step(optimizer, scheduler)
    resumed.load_state_dict(state)
    assert rates_of(other) == pytest.approx(rates, rel=1e-7)
    assert all(a is g["lr"] for a, g in zip(held, other.param_groups, strict=True))  # in place


def test_groups_that_share_a_tensor_as_their_rate_get_their_own_where_their_scales_differ():
    rate = torch.tensor(1.0)
    groups = [group(lr_scale=scale) for scale in (1.0, 0.1, 1.0)]
    optimizer = LARS(groups, rate)
    scheduler = as_scheduler(optimizer, constant(2.0))
    assert rates_of(optimizer) == pytest.approx([2.0, 0.2, 2.0])
    assert optimizer.param_groups[0]["lr"] is rate
    assert optimizer.param_groups[2]["lr"] is rate
    optimizer.add_param_group(group(lr_scale=0.5))
    step(optimizer, scheduler)
    assert rates_of(optimizer) == pytest.approx([2.0, 0.2, 2.0, 1.0])


class Multiplicative(lr_scheduler.LRScheduler):
    """Multiplies the rates as torch's chainable schedulers do, such as PolynomialLR."""

    def get_lr(self):
        step = self.last_epoch
        factor = SCHEDULE(step) / SCHEDULE(step - 1) if step else 1.0
        return [group["lr"] * factor for group in self.optimizer.param_groups]


@given(some_rates, positive, kinds, st.integers(0, 20), st.data())
def test_a_group_keeps_its_ratio_to_the_others_as_under_a_multiplicative_scheduler(
    first, default, kind, done, data
):
    ours = made(first, default, kind=kind)
    scheduler = as_scheduler(ours, SCHEDULE)
    theirs = made(rates_of(ours), default, kind=kind)
    other = Multiplicative(theirs)
    for _ in range(2):
        step(ours, scheduler, done // 2)
        step(theirs, other, done // 2)
        lr = data.draw(st.sampled_from(rates_of(ours))) / data.draw(positive)
        ours.add_param_group(group(lr))
        theirs.add_param_group(group(lr))
        assert rates_of(ours) == pytest.approx(rates_of(theirs), rel=1e-9)
    for seen, wanted in zip(step(ours, scheduler, 9), step(theirs, other, 9), strict=True):
        assert seen == pytest.approx(wanted, rel=1e-9)


@given(some_rates, positive, kinds, st.integers(0, STEPS), st.booleans(), st.booleans())
def test_a_group_without_a_rate_has_that_of_the_other_groups_without_one(
    first, default, kind, done, tensors, from_zero
):
    """From the update on before which it was added: bit for bit, also where that rate is 0."""
    optimizer = made([None, *first], default, tensors=tensors, kind=kind)
    scheduler = as_scheduler(optimizer, FROM_ZERO if from_zero else SCHEDULE)
    step(optimizer, scheduler, done)
    for scale in (1.0, 0.5):
        optimizer.add_param_group(group(lr_scale=scale))
    for of_first, *_, whole, half in [rates_of(optimizer), *step(optimizer, scheduler, 5)]:
        assert whole == pytest.approx(of_first, rel=1e-6 if tensors else 1e-14)
        assert half == pytest.approx(of_first / 2, rel=1e-6)
    held = [group["lr"] for group in optimizer.param_groups]
    assert not tensors or len(set(map(id, held[-2:]))) == 2


def test_muons_other_groups_keep_their_scale():
    optimizer = Muon([group(), group(orthogonal=False)], 2.0, others={"lr_scale": 0.3})
    scheduler = as_scheduler(optimizer, SCHEDULE)
    step(optimizer, scheduler, 9)
    optimizer.add_param_group(group(orthogonal=False))
    assert scheduler.get_last_lr() == rates_of(optimizer)
    for first, second, third in [rates_of(optimizer), *step(optimizer, scheduler, 3)]:
        assert third == pytest.approx(second) == pytest.approx(0.3 * first)
