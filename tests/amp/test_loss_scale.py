"""Loss scaling: skipped steps on one rank and on several, and the bound that stops a run."""

import statistics
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp import GradScaler

from largebatch.amp import INITIAL_LOSS_SCALE, GradientOverflowError, Precision
from tests.amp.nets import Loop


@pytest.mark.parametrize("most", [1, 3])
def test_too_many_skipped_steps_in_a_row_raise_and_name_the_layers(most):
    loop = Loop("fp16-master", max_skipped_steps=most)
    for _ in range(2):  # overflows up to one below the bound, then a good step
        for _ in range(most - 1):
            loop.step(1e30)
        loop.step()
    for _ in range(most - 1):
        loop.step(1e30)
    message = f"{most} steps in a row .*, from the loss backwards: fc.bias, fc.weight, norm3.bias"
    with pytest.raises(GradientOverflowError, match=message):
        loop.step(1e30)


def test_the_state_dict_has_the_scale_and_the_counts():
    loop = Loop("fp16", max_skipped_steps=4).step().step(1e30).step(1e30).step(1e30)
    state = loop.precision.state_dict()
    again = Loop("fp16", max_skipped_steps=4)
    again.precision.load_state_dict(state)
    assert again.precision.state_dict() == state
    assert again.precision.loss_scale == INITIAL_LOSS_SCALE / 8
    with pytest.raises(GradientOverflowError, match="4 steps in a row"):
        again.step(1e30)
    assert Precision("bf16").state_dict() == {}
    Precision("bf16").load_state_dict(state)
    other = Precision("fp16")
    other.load_state_dict(Precision("bf16").state_dict())
    assert other.loss_scale == INITIAL_LOSS_SCALE
    static = Precision("fp16", loss_scale=128)
    static.load_state_dict(state)
    assert static.loss_scale == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": "big"}, "loss_scale 'big' is not one of auto, dynamic, none or a positive"),
        ({"loss_scale": 0.0}, "loss_scale must be positive and finite, not 0.0"),
        ({"loss_scale": 1e-50}, "loss_scale must be positive and finite, not 1e-50; valid: 1.2e-3"),
        ({"min_loss_scale": 1e39}, "min_loss_scale must be positive and finite, not 1e\\+39"),
        ({"max_skipped_steps": 0}, "max_skipped_steps must be at least 1, not 0"),
    ],
)
def test_an_invalid_loss_scale_or_bound_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Precision("fp16", **options)


class Weight:
    """A weight whose gradients overflow above a limit of the scale, and where a batch is bad."""

    def __init__(self, limit=2.0**20, **options):
        self.precision = Precision("fp16", **options)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.SGD([self.weight], 2.0**-120)
        self.factor = 2.0**127 / limit  # times twice the limit is more than FP32 holds

    def run(self, batches):
        return [self.step(bad) for bad in batches]

    def step(self, bad):
        scale = self.precision.loss_scale
        loss = self.weight * (float("nan") if bad else self.factor)
        self.precision.backward(loss)
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad()
        return scale


@settings(max_examples=5, deadline=None)
@given(
    limit=st.integers(5, 14).map(lambda power: 2.0**power),
    positions=st.lists(st.integers(0, 19), min_size=1, max_size=5),
    grows=st.booleans(),
)
def test_one_bad_batch_per_epoch_does_not_drain_the_scale(limit, positions, grows):
    bad = [step == p for _ in range(6) for p in (positions * 5)[:5] for step in range(20)]
    loop = Weight(limit)
    extra = 16  # from the first scale down to the limit
    if grows:  # from far below the limit, and faster than usual
        loop.step(False)
        state = {**loop.precision.state_dict(), "scale": limit / 16, "growth_interval": 30}
        loop.precision.load_state_dict(state)
        extra = len(bad) // 30 + 1  # growth beyond the limit
    found = loop.run(bad)
    adjacent = sum(a and b for a, b in pairwise(bad))  # two in a row are taken for a limit
    least = limit / (16 if grows and len(positions) > 1 else 4) / 4**adjacent
    assert least <= statistics.median(found[-100:]) <= limit
    assert loop.precision.skipped_steps <= sum(bad) + extra
    assert loop.weight.isfinite()


@settings(max_examples=30, deadline=None)
@given(
    bad=st.lists(st.sampled_from([0, 0, 1, 5]), min_size=2, max_size=40),
    least=st.sampled_from([1.0, 2.0**10, 2.0**-126, 2.0**17]),
    split=st.integers(0, 40),
)
def test_the_scale_never_falls_below_its_floor_and_resumes_exactly(bad, least, split):
    batches = [one for run in bad for one in [True] * run + [False]]
    whole, first, second = (Weight(min_loss_scale=least, max_skipped_steps=6) for _ in range(3))
    expected = whole.run(batches)
    found = first.run(batches[:split])
    state = first.precision.state_dict()
    second.precision.load_state_dict(state)
    assert found + second.run(batches[split:]) == expected
    assert min(expected) >= least
    assert second.precision.state_dict() == whole.precision.state_dict()
    GradScaler("cpu").load_state_dict(state)
    assert GradScaler("cpu").state_dict().keys() == state.keys() - {"skipped_steps"}


@pytest.mark.parametrize("least", [1.0, 2.0**-126])
def test_skips_at_the_floor_count_and_weights_stay_finite(least):
    loop = Weight(min_loss_scale=least, max_skipped_steps=200)
    with pytest.raises(GradientOverflowError, match=f"200 steps in a row .* scale {least:g};"):
        loop.run([True] * 200)
    old = Weight()
    old.step(False)
    old.precision.load_state_dict({**old.precision.state_dict(), "scale": 0.0})
    assert old.run([False] * 3) == [1.0] * 3
    assert old.weight.isfinite()
