"""The underflow report agrees with casting each value to FP16."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.amp import (
    LOSS_SCALE_HEADROOM,
    LayerUnderflow,
    MasterWeights,
    Precision,
    underflow_report,
)
from largebatch.amp.underflow import TOLERATED_FLUSHED, _count
from largebatch.lars import LARS
from tests.amp.nets import HALF, loss_of, net_and_batch, optimizer_for


def share(flags):
    return pytest.approx(flags.double().mean().nan_to_num().item(), abs=1e-12)


@settings(deadline=None, max_examples=80)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50),
    exponents=st.lists(st.integers(-149, 127), max_size=20),
    scale=st.integers(-10, 30),
)
def test_the_fraction_flushed_equals_that_of_a_cast(values, exponents, scale):
    # Ties occur at powers of two.
    x = torch.tensor([*values, *(2.0**e for e in exponents)], dtype=torch.float32)
    layer = LayerUnderflow("", gradients=_count(x))
    nonzero = x[x != 0].double()
    assert layer.gradients_flushed(2.0**scale) == share((nonzero * 2.0**scale).half() == 0)


def test_a_scale_between_powers_of_two_counts_as_the_one_below():
    layer = LayerUnderflow("", gradients=_count(torch.rand(1000) * 1e-9))
    assert layer.gradients_flushed(1000) == layer.gradients_flushed(512)
    assert layer.gradients_flushed(1024) < layer.gradients_flushed(1000)


class Oracle:
    def __init__(self, model):
        self.on, self.gradients, self.before, self.after = False, [], [], []
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_hook(self._watch)

    def _watch(self, module, args, output):
        if self.on:
            output.register_hook(lambda gradient: self.gradients.append(gradient.flatten()))

    def step(self, model, optimizer):
        self.gradients += [p.grad.flatten().clone() for p in model.parameters()]
        self.before += [p.detach().clone().flatten() for p in model.parameters()]
        optimizer.step()
        self.after += [p.detach().clone().flatten() for p in model.parameters()]


def test_a_report_counts_every_gradient_and_update_of_the_steps_inside():
    model, x, labels = net_and_batch()
    optimizer = LARS(model.parameters(), 1e-3, trust_coefficient=0.05)
    oracle = Oracle(model)
    fp32 = Precision("fp32")
    loss_of(fp32, model, x, labels).backward()
    optimizer.step()  # before the report
    optimizer.zero_grad()
    oracle.on = True
    with underflow_report(model, optimizer) as report:
        for _ in range(3):
            (1e-4 * loss_of(fp32, model, x, labels)).backward()
            oracle.step(model, optimizer)
            optimizer.zero_grad()
    oracle.on = False
    assert all(len(m._forward_hooks) <= 1 for m in model.modules())  # the oracle's
    loss_of(fp32, model, x, labels).backward()
    optimizer.step()  # after the report
    assert report.steps == 3
    assert [layer.name for layer in report.layers] == [
        "conv1", "bn1", "conv2", "norm2", "norm3", "fc"]  # fmt: skip
    gradients, total = torch.cat(oracle.gradients), report.total
    nonzero = gradients[gradients != 0].double()
    for scale in (1.0, 2.0**10, 2.0**24):
        assert total.gradients_flushed(scale) == share((nonzero * scale).half() == 0)
    assert 0 < total.gradients_flushed(1.0) < 1
    assert report.largest_gradient == gradients.abs().max().item()
    old, new = torch.cat(oracle.before), torch.cat(oracle.after)
    moved = new != old
    update, half = (new - old)[moved].half(), old[moved].half()
    assert total.changed == int(moved.sum())
    assert total.updates_flushed == share(update == 0)
    assert total.updates_lost == share(half + update == half)
    assert 0 < total.updates_lost < 1


@pytest.mark.parametrize(
    ("name", "kind", "call"),
    [
        *(("fp16", "sgd", "clip"), ("fp16", "lars", "unscale clip clip")),
        *(("bf16-master", "sgd", "unscale clip clip"), ("bf16-master", "lars", "clip")),
        *(("fp16-master", "sgd", "clip clip"), ("fp16-master", "lars", "")),
    ],
)
def test_gradients_are_counted_without_the_loss_scale_and_clipping(name, kind, call):
    largest = []
    for scale in ("none", 2.0**8):
        model, x, labels = net_and_batch()
        precision = Precision(name, loss_scale=scale)
        optimizer = optimizer_for(precision, precision.convert(model), kind)
        with underflow_report(model, optimizer, precision) as report:
            precision.backward(loss_of(precision, model, x, labels))
            if "unscale" in call and scale != "none":
                precision.unscale_(optimizer)
            for _ in range(call.count("clip") if scale != "none" else 0):
                precision.clip_grad_norm_(optimizer, 0.01)
            precision.step(optimizer)
        largest.append(report.largest_gradient)
        assert report.total.changed > 300
    assert largest[0] == pytest.approx(largest[1], rel=0.02)


def test_updates_are_those_of_the_masters():
    model, x, labels = net_and_batch()
    precision = Precision("bf16-master")
    optimizer = MasterWeights(torch.optim.SGD(precision.convert(model).parameters(), 1e-4))
    with underflow_report(model, optimizer, precision) as report:
        for _ in range(2):
            precision.backward(loss_of(precision, model, x, labels))
            precision.step(optimizer)
    second = sum(p.numel() for p in model.parameters())
    assert report.total.changed > second  # most masters change, though BF16 weights do not
    assert report.total.updates_lost > 0.3


def report_with(gradients):
    model = nn.Linear(2, 2)
    with underflow_report(model, torch.optim.SGD(model.parameters(), 0.1)) as report:
        pass
    report.layers[0].gradients += _count(gradients)
    report.largest_gradient = gradients.abs().max().item() if gradients.numel() else 0.0
    return report


@settings(deadline=None)
@given(low=st.integers(-60, 10), span=st.integers(0, 40), seed=st.integers(0, 9))
def test_the_best_scale_is_the_smallest_that_flushes_hardly_more_than_the_largest(low, span, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 2.0 ** (low + span * torch.rand(500, generator=generator, dtype=torch.float64))
    report = report_with(x.float())
    best, largest, total = report.best_loss_scale, report.largest_loss_scale, report.layers[0]
    assert best <= largest
    assert x.max().item() * largest * LOSS_SCALE_HEADROOM <= 65504 * (1 + 1e-6)
    allowed = total.gradients_flushed(largest) + TOLERATED_FLUSHED
    assert total.gradients_flushed(best) <= allowed
    assert best <= 1 or total.gradients_flushed(best / 2) > allowed


@pytest.mark.parametrize("name", HALF)
def test_a_step_that_overflows_is_not_counted(name):
    model, x, labels = net_and_batch()
    precision = Precision(name, loss_scale=1.0)
    optimizer = optimizer_for(precision, precision.convert(model))
    with underflow_report(model, optimizer, precision) as report:
        precision.backward(1e38 * loss_of(precision, model, x, labels) * 1e38)
        precision.step(optimizer)
    assert report.total.changed == 0
    assert report.largest_gradient < float("inf")
