"""Parameter groups that are added in the middle of a run, as for layers that are unfrozen."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, lr_scheduler

from largebatch.amp import MasterWeights
from largebatch.lars import LARS, Muon, as_scheduler, cosine, polynomial, warmup
from largebatch.lars.groups import named as names_of
from tests.lars.test_scheduler import rates_of

STEPS = 30
SCHEDULE = polynomial(2.0, STEPS, warmup_steps=5, start=0.25, end=1e-4)
FROM_ZERO = polynomial(2.0, STEPS, warmup_steps=5)  # and to 0

positive = st.floats(1e-3, 10)
rates = st.lists(st.none() | positive, min_size=1, max_size=3)
kinds = st.sampled_from([SGD, LARS, Muon, lambda *args: MasterWeights(SGD(*args))])


def group(lr=None, tensors=False, **options):
    options["params"] = [nn.Parameter(torch.ones(3, 2))]
    return options if lr is None else options | {"lr": torch.tensor(lr) if tensors else lr}


def step(optimizer, scheduler, times=1):
    """Return the rates after each of some updates."""
    seen = []
    for _ in range(times):
        optimizer.step()
        scheduler.step()
        seen.append(rates_of(optimizer))
    return seen


class Multiplicative(lr_scheduler.LRScheduler):
    """Multiplies the rates as torch's chainable schedulers do, such as PolynomialLR."""

    def get_lr(self):
        step = self.last_epoch
        factor = SCHEDULE(step) / SCHEDULE(step - 1) if step else 1.0
        return [group["lr"] * factor for group in self.optimizer.param_groups]


@given(rates, positive, kinds, st.integers(0, 20), st.data())
def test_a_group_keeps_its_ratio_to_the_others_as_under_a_multiplicative_scheduler(
    first, default, kind, done, data
):
    ours = kind([group(lr) for lr in first], default)
    scheduler = as_scheduler(ours, SCHEDULE)
    theirs = kind([group(lr) for lr in rates_of(ours)], default)
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


@given(rates, positive, kinds, st.integers(0, STEPS), st.booleans(), st.booleans())
def test_a_group_without_a_rate_has_that_of_the_other_groups_without_one(
    first, default, kind, done, tensors, from_zero
):
    """From the update on before which it was added: bit for bit, also where that rate is 0."""
    optimizer = kind([group(lr, tensors) for lr in [None, *first]], group(default, tensors)["lr"])
    scheduler = as_scheduler(optimizer, FROM_ZERO if from_zero else SCHEDULE)
    step(optimizer, scheduler, done)
    for scale in (1.0, 0.5):
        optimizer.add_param_group(group(lr_scale=scale))
    for of_first, *_, whole, half in [rates_of(optimizer), *step(optimizer, scheduler, 5)]:
        assert whole == pytest.approx(of_first, rel=1e-6 if tensors else 1e-14)
        assert half == pytest.approx(of_first / 2, rel=1e-6)
    held = [group["lr"] for group in optimizer.param_groups]
    assert not tensors or len(set(map(id, held[-2:]))) == 2


@given(rates, st.none() | positive, positive, st.integers(0, 12), st.sampled_from("abcd"))
@example([0.2, 0.0048], 0.1, 0.2, 7, "d")
def test_a_resumed_run_keeps_the_ratio(first, share, default, done, way):
    def started():
        optimizer = LARS([group(lr) for lr in [None, *first]], default)
        return optimizer, as_scheduler(optimizer, SCHEDULE)

    def added(optimizer):
        lr = share and share * rates_of(optimizer)[0]
        optimizer.add_param_group(group(lr))

    optimizer, scheduler = started()
    step(optimizer, scheduler, done)
    added(optimizer)
    steps = done
    if way != "a":  # saved before the scheduler has made its next step
        step(optimizer, scheduler, 2)
        steps += 2
    state, of_scheduler = copy.deepcopy([optimizer.state_dict(), scheduler.state_dict()])

    if way == "d":  # from the optimizer's state alone
        other = LARS([group(lr) for lr in [None, *first, None]], default)
        other.load_state_dict(state)
        resumed = as_scheduler(other, SCHEDULE, steps_done=steps)
    else:
        other, resumed = started()
        if way == "b":  # the group is added when the scheduler has its state
            resumed.load_state_dict(of_scheduler)
            added(other)
            other.load_state_dict(state)
        else:
            added(other)
            other.load_state_dict(state)
            resumed.load_state_dict(of_scheduler)
    wanted = step(optimizer, scheduler, 3)
    rel = 1e-12 if way == "d" else 0
    for seen, rates in zip(step(other, resumed, 3), wanted, strict=True):
        assert seen == pytest.approx(rates, rel=rel, abs=0)


def test_the_rates_of_another_scheduler_or_of_the_user_are_the_current_ones():
    optimizer = LARS([group()], 2.0)
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.25),
        as_scheduler(optimizer, warmup(cosine(2.0, 20), 4)),
        as_scheduler(optimizer, SCHEDULE),
    ]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, [4, 12])
    for lr in (0.05, None):
        step(optimizer, scheduler)
        optimizer.add_param_group(group(lr))
    assert rates_of(optimizer) == pytest.approx([0.5, 0.05, 0.5])
    for seen in step(optimizer, scheduler, 12):
        assert seen == pytest.approx([seen[0], seen[0] / 10, seen[0]], rel=1e-12)
    for of_group in optimizer.param_groups:
        of_group["lr"] /= 4
    optimizer.add_param_group(group(optimizer.param_groups[0]["lr"]))
    seen = step(optimizer, scheduler)[0]
    assert seen[3] == pytest.approx(seen[0], rel=1e-12)


def test_muons_other_groups_keep_their_scale():
    optimizer = Muon([group(), group(orthogonal=False)], 2.0, others={"lr_scale": 0.3})
    scheduler = as_scheduler(optimizer, SCHEDULE)
    step(optimizer, scheduler, 9)
    optimizer.add_param_group(group(orthogonal=False))
    assert scheduler.get_last_lr() == rates_of(optimizer)
    for first, second, third in [rates_of(optimizer), *step(optimizer, scheduler, 3)]:
        assert third == pytest.approx(second) == pytest.approx(0.3 * first)


def test_copies_have_schedules_of_their_own_and_nothing_outlives_its_use():
    optimizer = LARS([group()], 2.0)
    scheduler = as_scheduler(optimizer, SCHEDULE)
    step(optimizer, scheduler, 9)
    other, of_other = copy.deepcopy((optimizer, scheduler))
    other.add_param_group(group())
    assert rates_of(other) == [SCHEDULE(9)] * 2
    assert len(step(optimizer, scheduler)[0]) == 1
    assert step(other, of_other) == [[SCHEDULE(10)] * 2]
    left = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer, scheduler
        assert left() is None
    finally:
        gc.enable()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=2, max_size=4))
@example([(False, 0), (True, 1)])
def test_groups_with_and_without_names_go_together(groups):
    """As where Lightning unfreezes a layer beside the named groups of split_parameters."""

    def made():
        every = [
            [(f"name{i}.{j}" if named else None, nn.Parameter(torch.ones(2, 3))) for j in range(n)]
            for i, (named, n) in enumerate(groups)
        ]
        plain = [{"params": [pair if pair[0] else pair[1] for pair in of]} for of in every]
        return [parameter for of in every for _, parameter in of], plain

    def steps(optimizer, parameters):
        for parameter in parameters:
            parameter.grad = parameter.detach() + 1
        optimizer.step()
        groups = enumerate(optimizer.param_groups)
        return parameters, {name for i, group in groups for name, _ in names_of(group, i)}

    named = any(with_names and count for with_names, count in groups)
    wanted = {
        f"name{i}.{j}" if with_names else f"group{i}.{j}"
        for i, (with_names, count) in enumerate(groups)
        for j in range(count)
    }
    for kind in (LARS, Muon):
        parameters, plain = made()
        at_once = kind(plain, 0.1)
        first, names = steps(at_once, parameters)
        assert names == wanted
        parameters, plain = made()
        later = kind(plain[:1], 0.1)
        for added in plain[1:]:
            later.add_param_group(added)
        assert all(("param_names" in group) is named for group in later.param_groups)
        second, names = steps(later, parameters)
        assert names == wanted
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        later.load_state_dict(copy.deepcopy(at_once.state_dict()))


def test_a_refused_group_leaves_the_others_without_names():
    optimizer = LARS([torch.ones(2, 2, requires_grad=True)], 0.1)
    for wrong in (torch.ones(2, 2, dtype=torch.cfloat), torch.ones(2).mul(torch.ones(2))):
        with pytest.raises((TypeError, ValueError)):
            optimizer.add_param_group({"params": [("a", wrong.requires_grad_() * 1)]})
    assert len(optimizer.param_groups) == 1
    assert "param_names" not in optimizer.param_groups[0]
