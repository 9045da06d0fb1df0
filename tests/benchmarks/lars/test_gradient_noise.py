"""The benchmark of GradientNoise counts what a measured step does, and times nothing else."""

import itertools

import torch
from torch import nn

from benchmarks.lars import gradient_noise


def test_operators_and_bytes_are_those_of_the_gradients():
    gradients = [torch.ones(3, 4), torch.ones(5), torch.ones(4, 4, dtype=torch.bfloat16)]
    size = (12 + 5) * 4 + 16 * 2
    one, four = (gradient_noise.counted(gradients, passes) for passes in (2, 4))
    assert one.of_pass == four.of_pass == 3  # one norm each
    assert (one.bytes, four.bytes) == (3 * size, 5 * size)  # norms of norms do not count
    more = gradient_noise.counted(gradients * 10, 2)
    assert more.of_pass == 30
    assert more.of_step == one.of_step < 40  # multi-tensor operators and sums


def test_steps_take_turns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    batch = torch.randn(5, 4), torch.randint(2, (5,))
    times = gradient_noise.timed(model, lambda: batch, 2, 2)
    assert len(times.plain) == len(times.measuring) == 2
    assert min(*times.plain, *times.measuring) > 0
    assert "share of a measured step" in gradient_noise.table(
        gradient_noise.Cost(1, 2, 10**6), times, 2
    )


def test_a_step_that_is_not_measured_counts_whole(monkeypatch):
    """By a clock that ticks when it is read: the share of hooks and step() is that of both."""
    clock = itertools.count()
    monkeypatch.setattr(gradient_noise.time, "perf_counter", lambda: next(clock))
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))  # 4 parameters
    batch = torch.randn(5, 4), torch.randint(2, (5,))
    times = gradient_noise.timed(model, lambda: batch, 2, 2)
    assert times.plain == [3, 3]  # from its begin to its end, with step() between
    assert times.measuring == [2 * 4 + 1] * 2
