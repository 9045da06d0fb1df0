"""``lr_range_test`` finds where training diverges, and leaves no trace of having run."""

import copy
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.amp import MasterWeights
from largebatch.lars import (
    LARS,
    Muon,
    as_scheduler,
    constant,
    hidden_weights,
    lr_range_test,
    split_parameters,
)


class Net(nn.Module):
    """Batch norm, dropout, a buffer that no state dict holds, and one that is replaced."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.hidden, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, images):
        self.seen += 1
        self.passes = self.passes + 1
        values = self.norm(self.conv(images)).mean((2, 3)).relu()
        return self.head(nn.functional.dropout(self.hidden(values), 0.3, self.training))


MAKERS = {
    "lars": lambda net, lr: LARS(
        net.bfloat16().parameters(), lr, dialect="mlperf-corrected", master_weights=True
    ),
    "muon": lambda net, lr: Muon(
        split_parameters(net, 0.01, orthogonal=hidden_weights(net)), lr, others={"rule": "adamw"}
    ),
    # The state has another dtype than the parameters, which loading a state dict would change.
    "nadam bf16": lambda net, lr: torch.optim.NAdam(net.bfloat16().parameters(), float(lr)),
    "masters": lambda net, lr: MasterWeights(
        torch.optim.SGD(net.bfloat16().parameters(), lr, momentum=0.9)
    ),
}


def trained(maker, steps, *, tensor_lr=False):
    torch.manual_seed(0)
    net = Net()
    optimizer = MAKERS[maker](net, torch.tensor(0.05) if tensor_lr else 0.05)
    dtype = net.conv.weight.dtype

    def step():
        images, labels = torch.randn(8, 3, 5, 5), torch.randint(3, (8,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images.to(dtype)).float(), labels)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(steps):
        step()
    return net, optimizer, step


def everything(net, optimizer):
    parameters = {name: (p, p.grad) for name, p in net.named_parameters()}
    modes = [module.training for module in net.modules()]
    state = optimizer.state_dict()["state"]
    parts = parameters, dict(net.named_buffers()), modes, state, torch.get_rng_state()
    return copy.deepcopy([*parts, [group["lr"] for group in optimizer.param_groups]])


same = partial(torch.testing.assert_close, rtol=0, atol=0)


@settings(max_examples=16, deadline=None)
@given(
    maker=st.sampled_from([*MAKERS]),
    before=st.integers(0, 2),
    tensor_lr=st.booleans(),
    evaluating=st.booleans(),
    fails=st.booleans(),
)
def test_everything_is_put_back_and_training_goes_on_as_without(
    maker, before, tensor_lr, evaluating, fails
):
    tensor_lr = tensor_lr and not maker.startswith("nadam")
    net, optimizer, step = trained(maker, before, tensor_lr=tensor_lr)
    twin, theirs, step_of_twin = trained(maker, before, tensor_lr=tensor_lr)
    random = torch.get_rng_state()
    net.norm.train(not evaluating), twin.norm.train(not evaluating)
    was, rates = everything(net, optimizer), [group["lr"] for group in optimizer.param_groups]
    updates = []

    def stepping():
        net.train()
        updates.append(step())
        if fails and len(updates) > 3:
            raise KeyError
        return updates[-1]

    with pytest.raises(KeyError) if fails else nullcontext():
        found = lr_range_test(net, optimizer, stepping, steps=20)
    if not fails:
        assert len(found.lrs) == len(found.losses) == len(updates)
        assert found.lrs[0] == pytest.approx(0.05 / 100)
        assert found.lrs[-1] < 0.05 * 100
    if (maker, before) != ("masters", 0):  # which makes its masters when it loads a state dict
        same(everything(net, optimizer), was)
    if tensor_lr:
        assert all(a["lr"] is b for a, b in zip(optimizer.param_groups, rates, strict=True))
    losses = [step() for _ in range(2)]
    torch.set_rng_state(random)
    same(losses, [step_of_twin() for _ in range(2)])
    same(everything(net, optimizer), everything(twin, theirs))


def parabola(curvature=2.0):
    """Gradient descent on curvature / 2 x w^2 per weight, which diverges above 2 / curvature."""
    net = nn.Linear(1, 4, bias=False)
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)

    def step():
        optimizer.zero_grad()
        loss = curvature / 2 * net.weight.square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return net, optimizer, step


@pytest.mark.parametrize("curvature", [0.5, 40.0])
def test_it_diverges_above_the_rate_that_theory_gives_and_suggests_a_tenth(curvature):
    limit = 2 / curvature
    net, optimizer, step = parabola(curvature)
    found = lr_range_test(net, optimizer, step, low=limit / 1e3, high=limit * 1e3, steps=200)
    assert found.diverged
    assert limit < found.lrs[-1] < 100 * limit
    assert found.suggested_lr == found.lrs[-1] / 10
    factors = [b / a for a, b in zip(found.lrs, found.lrs[1:], strict=False)]
    assert factors == pytest.approx([1e6 ** (1 / 200)] * len(factors))
    below = lr_range_test(net, optimizer, step, low=limit / 1e3, high=limit / 2, steps=20)
    assert not below.diverged
    assert below.suggested_lr is None
    assert len(below.lrs) == 20
    assert list(below.losses) == sorted(below.losses, reverse=True)
    found = lr_range_test(net, optimizer, iter([2.0, 1.0, math.inf, 0.5]).__next__)
    assert found.diverged
    assert found.losses == (2.0, 1.0, math.inf)


def test_groups_keep_the_ratio_of_their_rates():
    """Also at the start of a warm-up, where the present rates are 0."""
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups = [{"params": [first]}, {"params": [second], "lr": torch.tensor(0.01)}]
    optimizer = torch.optim.SGD(groups, lr=0.1, foreach=False)
    as_scheduler(optimizer, constant(0.0))
    assert float(optimizer.param_groups[0]["lr"]) == 0
    seen = []

    def step():
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        return 1.0

    found = lr_range_test(nn.Identity(), optimizer, step, low=1e-3, high=1.0, steps=20)
    assert seen == [pytest.approx([lr, lr / 10]) for lr in found.lrs]


def test_ranges_without_a_curve_are_refused():
    for options, message in (
        ({"low": 1.0, "high": 1.0}, "^low, high: 1, 1 is no range; valid: 0 < low < high$"),
        ({"high": math.inf}, "^low, high: 0.01, inf is no range"),
        ({"steps": 19}, "^steps: 19 updates give no curve; valid: at least 20$"),
    ):
        with pytest.raises(ValueError, match=message):
            lr_range_test(*parabola(), **options)
