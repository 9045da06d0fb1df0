"""GradientNoise: unbiased, exact against gradients of single examples, and in training loops."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from largebatch.lars import GradientNoise
from tests.host_reads import NoHostReads
from tests.ranks import run_ranks


def moments(gradients, unbiased):
    """|mean|² and the total variance of gradients, shape ``[n, parameters]``."""
    return gradients.mean(0).square().sum().item(), gradients.var(0, unbiased).sum().item()


class Weights(nn.Module):
    """Parameters whose gradient by ``model(x).mean()`` is the mean of x, shape ``[n, 3]``."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, dtype=dtype))
        self.b = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, x):
        return x[:, :2] @ self.a + x[:, 2] * self.b


def pass_of(model, x, factor=1.0):
    (factor * model(x).mean()).backward()


values = st.floats(-4, 4).filter(lambda v: v == 0 or abs(v) > 1e-3)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(values, values, values), min_size=2, max_size=3),
    st.sampled_from([(1, 2), (2, 2), (1, 3)]),
    st.sampled_from(["divided", "summed"]),
)
def test_the_estimates_are_unbiased(gradients, sizes, loss):
    """Over all draws with replacement their mean is that of the examples' gradients, exactly."""
    (batch_size, passes), singles = sizes, torch.tensor(gradients, dtype=torch.float64)
    norm2, trace = moments(singles, unbiased=False)
    draws = [*product(range(len(singles)), repeat=batch_size * passes)]
    model = Weights()
    noise = GradientNoise(model.parameters(), batch_size, window=len(draws))
    factor = 1 / passes if loss == "divided" else 1.0
    for draw in draws:
        for batch in torch.tensor(draw).split(batch_size):
            pass_of(model, singles[batch], factor)
        noise.step()
        model.zero_grad()
    found, unit = noise.estimate(), (factor * passes) ** 2
    size = 1e-9 * singles.square().sum().item()
    assert found.gradient_norm2 / unit == pytest.approx(norm2, abs=size)
    assert found.trace / unit == pytest.approx(trace, abs=size)
    if norm2 > 1e-3 * (norm2 + trace):
        assert found.noise_scale == pytest.approx(trace / norm2, rel=1e-4, abs=1e-9)


def test_steps_that_are_not_watched_have_no_hooks_and_are_not_measured():
    model = Weights()
    noise = GradientNoise(model.parameters(), 1)
    pass_of(model, torch.ones(1, 3, dtype=torch.float64))  # of a step that is given up
    model.zero_grad()
    noise.watch(False)
    assert not any(p._backward_hooks for p in model.parameters())
    for _ in range(2):
        pass_of(model, torch.ones(1, 3, dtype=torch.float64))
    noise.step()
    model.zero_grad()
    assert noise.estimate().steps == 0
    noise.watch()
    for x in (1.0, 3.0):
        pass_of(model, torch.full((1, 3), x, dtype=torch.float64), 1 / 2)
    noise.step()
    found = noise.estimate()
    assert found.steps == 1
    assert found.trace == pytest.approx(6)  # three times the variance of 1 and 3
    assert math.isnan(found.standard_error)


def test_a_gradient_that_drowns_in_noise_has_no_noise_scale():
    x = torch.ones(1, 3, dtype=torch.float64)
    found = two_steps(Weights(), torch.stack([x, -x]).expand(2, -1, -1, -1))
    assert found.gradient_norm2 == pytest.approx(-3)
    assert math.isnan(found.noise_scale)
    assert math.isnan(found.standard_error)


XS = 1 + torch.randn(2, 4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def two_steps(model, xs):
    """Measure two steps whose backward passes are of ``xs``, shape ``[2, passes, examples, 3]``."""
    noise = GradientNoise(model.parameters(), xs.shape[2])
    for of_step in xs:
        for place, x in enumerate(of_step):
            if isinstance(model, DistributedDataParallel):  # as no_sync does
                model.require_backward_grad_sync = place == len(of_step) - 1
            pass_of(model, x, 1 / len(of_step))
        with NoHostReads():
            noise.step()
        model.zero_grad()
    return noise.estimate()


def overflow_on_one_rank():
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(Weights())
    noise = GradientNoise(model.parameters(), 1)
    for step in range(3):
        x = torch.tensor([[1.0 + rank, 2.0, step]], dtype=torch.float64)
        pass_of(model, x * math.inf if step == rank == 1 else x)
        noise.step()
        model.zero_grad()
    return noise.estimate()


def on_a_rank():
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"params are sharded over ranks.*; valid: Distributed"):
        GradientNoise(model.parameters(), 1)
    found = []
    for passes in (1, 2):
        model = DistributedDataParallel(Weights(), gradient_as_bucket_view=True)
        found.append(two_steps(model, XS[:, torch.distributed.get_rank() : 2 * passes : 2]))
    return found, overflow_on_one_rank()


@pytest.mark.slow("starts ranks")
def test_ranks_under_ddp_agree_with_one_process_that_accumulates():
    """An overflow on one rank leaves the step out on all, and sharded parameters are refused."""
    (ours, first), (theirs, second) = run_ranks(2, on_a_rank)
    assert first == second
    assert (first.steps, first.left_out) == (2, 1)
    assert first.trace == pytest.approx(0.5)  # the variance of 1 and 2
    assert first.gradient_norm2 == pytest.approx((6 + 6 + 2**2) / 2)  # of steps 0 and 2
    assert ours == theirs
    for passes, of_ranks in zip((1, 2), ours, strict=True):
        alone = two_steps(Weights(), XS[:, : 2 * passes])
        assert vars(of_ranks) == pytest.approx(vars(alone), rel=1e-9)


def test_half_precision_with_a_changing_scale_agrees_with_fp64():
    """An overflow halves the scale and is left out; no step waits for the device."""
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(6, 2, 4, 3, generator=generator) + 1
    xs[2, 1, 0, 0] = 1e5  # beyond FP16 at any scale
    exact, half = Weights(), Weights(torch.float16)
    expected = GradientNoise(exact.parameters(), 4)
    noise = GradientNoise(half.parameters(), 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2)
    scales = []
    for step, batches in enumerate(xs):
        for x in batches:
            scale = scaler.scale(torch.ones(()))
            pass_of(half, x.half(), (scale / 2).half())
            if step != 2:
                pass_of(exact, x.double(), 1 / 2)
        scales.append(scale.item())
        with NoHostReads():
            noise.step(scale)
        if step != 2:
            expected.step()
        half.zero_grad()
        exact.zero_grad()
        scaler._scale.mul_(0.5 if step == 2 else 1.5)
    found, wanted = noise.estimate(), expected.estimate()
    assert len({*scales}) == 6
    assert vars(found) == pytest.approx({**vars(wanted), "left_out": 1}, rel=0.02)


def test_hooks_see_unused_shared_and_frozen_parameters_as_autograd_does():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(3, 3)
            self.unused = nn.Linear(2, 2)
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.sometimes = nn.Parameter(torch.ones(3))

        def forward(self, x, more):
            x = self.shared(self.frozen(self.shared(x)))
            return (x * self.sometimes if more else x).square()

    torch.manual_seed(0)
    model = Odd().double()
    model.frozen.weight.grad = torch.ones_like(model.frozen.weight)  # from before it was frozen
    x = torch.randn(2, 1, 3, dtype=torch.float64)
    noise = GradientNoise([*model.parameters(), *model.shared.parameters()], 1)
    gradients = []
    trained = [p for p in model.parameters() if p.requires_grad]
    for one, more in zip(x, (False, True), strict=True):
        loss = model(one, more).mean()
        parts = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
        gradients.append(torch.cat([g.flatten() for g in parts])[None])
    noise.watch()  # torch.autograd.grad called the hooks too
    for one, more in zip(x, (False, True), strict=True):
        (model(one, more).mean() / 2).backward()
    noise.step()
    norm2, trace = moments(torch.cat(gradients), unbiased=True)
    found = noise.estimate()
    assert found.trace == pytest.approx(trace, rel=1e-9)
    assert found.gradient_norm2 == pytest.approx(norm2 - trace / 2, rel=1e-9)


def test_what_cannot_be_measured_is_refused_in_one_line():
    model = Weights()
    for params, batch_size, window, message in (
        ([], 1, 2, "params is empty; pass parameters"),
        (model.parameters(), 0, 2, "batch_size must be at least 1, not 0"),
        (model.parameters(), 1, 1, "window must be at least 2, not 1"),
    ):
        with pytest.raises(ValueError, match=message):
            GradientNoise(params, batch_size, window=window)
    noise = GradientNoise(model.parameters(), 1)
    with pytest.raises(RuntimeError, match=r"no backward pass .*; valid: call step after backward"):
        noise.step()
    x = torch.ones(1, 3, dtype=torch.float64)
    pass_of(model, x)
    with pytest.raises(RuntimeError, match=r"one backward pass on one rank .*; valid: two or more"):
        noise.step()
    model.zero_grad()
    embedding = nn.Embedding(3, 2, sparse=True)
    noise = GradientNoise(embedding.parameters(), 1)
    with pytest.raises(ValueError, match="takes no sparse gradients; valid: sparse=False"):
        embedding(torch.tensor([1])).sum().backward()
    assert noise.estimate().steps == 0
