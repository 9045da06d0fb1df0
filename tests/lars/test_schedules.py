"""Schedules are functions of the step alone, with the values that their formula says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from largebatch.lars import Span, as_scheduler, polynomial

runs = st.integers(1, 5000).flatmap(
    lambda total: st.tuples(st.just(total), st.integers(0, total), st.integers(0, total - 1))
)


@given(runs, st.floats(0.5, 4), st.floats(0.01, 50))
def test_polynomial_is_its_formula(run, power, peak):
    total, warmup, step = run
    schedule = polynomial(peak, total, warmup_steps=warmup, power=power, end=1e-4)
    if step < warmup:
        expected = peak * step / warmup
    else:
        expected = 1e-4 + (peak - 1e-4) * (1 - (step - warmup) / (total - warmup)) ** power
    assert schedule(step) == pytest.approx(expected, rel=1e-12)


@given(runs)
def test_polynomial_rises_to_its_peak_and_falls_to_its_end(run):
    total, warmup, _ = run
    schedule = polynomial(3.0, total, warmup_steps=warmup, start=0.5, end=0.25)
    rates = [schedule(step) for step in range(total + 2)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if warmup < total:
        assert max(rates) == rates[warmup] == 3.0
    assert rates[0] == (0.5 if warmup else 3.0)
    assert rates[-1] == rates[-2] == 0.25


def test_a_decay_that_ends_early_stays_at_its_end():
    schedule = polynomial(2.0, 100, warmup_steps=10, decay_steps=40, power=1, end=0.1)
    assert schedule(30) == pytest.approx(0.1 + 1.9 * 0.5)
    assert schedule(50) == schedule(99) == 0.1


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="warm-up of 11 steps does not fit 10 steps"):
        polynomial(1.0, 10, warmup_steps=11)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("31ep", 606),
        ("500", 500),
        (500, 500),
        ("0.1dur", 174),
        ("2.5ep", 49),
        ("0", 0),
        ("1dur", 1740),
    ],
)
def test_spans(text, steps):
    span = Span.parse(text)
    assert span.steps(1281167 / 65536, 1740) == steps
    assert Span.parse(str(span)) == span


@given(st.floats(min_value=0, allow_infinity=False))
def test_a_span_comes_back_from_its_text_exactly(value):
    assert Span.parse(str(Span(value, "ep"))) == Span(value, "ep")


@pytest.mark.parametrize("text", ["31ep", "12.3456789ep", "0.1dur", "100", "0", "0.00001ep"])
def test_a_span_is_written_short(text):
    assert str(Span.parse(text)) == text


@pytest.mark.parametrize("text", ["", "ep", "-1ep", "1.5", "5 ep", "2dur", "1e3", "5epochs", "nan"])
def test_what_is_not_a_span_is_refused(text):
    with pytest.raises(ValueError, match="is not a length: write epochs as '5ep'"):
        Span.parse(text)


def test_scheduler_sets_every_group_and_starts_anywhere():
    schedule = polynomial(2.0, 20, warmup_steps=5)
    model = nn.Linear(2, 2)

    def rates(steps_done, count):
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        optimizer = torch.optim.SGD(groups, lr=9.0)
        scheduler = as_scheduler(optimizer, schedule, steps_done=steps_done)
        seen = []
        for _ in range(count):
            seen.append({group["lr"] for group in optimizer.param_groups})
            optimizer.step()
            scheduler.step()
        return seen

    assert rates(0, 20) == [{schedule(step)} for step in range(20)]
    assert rates(7, 13) == rates(0, 20)[7:]
