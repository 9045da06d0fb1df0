"""Several optimizers in one iteration: one update of the loss scale, and skips of each its own."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.amp import INITIAL_LOSS_SCALE, GradientOverflowError, MasterWeights, Precision
from largebatch.lars import LARS

KINDS = [("fp16", "sgd"), ("fp16", "lars"), ("fp16-master", "sgd")]


class Affine(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), value))

    def forward(self, x):
        return x * self.weight


def optimizer_in(precision, kind, model):
    masters, options = precision.form.masters, {"lr": 1.0, "momentum": 0.5}
    if kind == "lars":
        return LARS(model.parameters(), adapt=False, master_weights=masters, **options)
    sgd = torch.optim.SGD(model.parameters(), **options)
    return MasterWeights(sgd) if masters else sgd


class Pair:
    """Two models and two optimizers with shared losses, as in torch's recipe, and an FP32 oracle.

    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#working-with-multiple-models-losses-and-optimizers
    """

    def __init__(self, name, kind, **options):
        self.precision = Precision(name, **options)
        self.models = [self.precision.convert(Affine(value)) for value in (1.0, 2.0)]
        self.optimizers = [optimizer_in(self.precision, kind, model) for model in self.models]
        fp32 = Precision("fp32")
        self.oracles = [Affine(value) for value in (1.0, 2.0)]
        self.theirs = [optimizer_in(fp32, kind, model) for model in self.oracles]

    def losses(self, models):
        a, b = (model(torch.ones(4, 4)).float().sum() / 32 for model in models)
        return 2 * a + 3 * b, 3 * a - 5 * b

    def backward(self, overflows=()):
        with self.precision.forward():
            losses = self.losses(self.models)
        self.precision.backward(losses[0], retain_graph=True)
        self.precision.backward(losses[1])
        for loss in self.losses(self.oracles):
            loss.backward(retain_graph=True)
        for index in overflows:
            self.models[index].weight.grad[0, 0] = float("inf")

    def step(self, overflows=()):
        self.backward(overflows)
        return self.update(overflows)

    def update(self, overflows=()):
        self.precision.step(*self.optimizers)
        for index, theirs in enumerate(self.theirs):
            if index not in overflows:
                theirs.step()
        for optimizer in (*self.optimizers, *self.theirs):
            optimizer.zero_grad()
        of = zip(self.models, self.optimizers, self.oracles, strict=True)
        for model, optimizer, oracle in of:
            value = optimizer.state.get(model.weight, {}).get("master", model.weight.float())
            torch.testing.assert_close(value, oracle.weight, rtol=1e-5, atol=1e-6)
        return self


@pytest.mark.parametrize(("of", "first"), [*zip(KINDS, [(0,), (1,), (1,)], strict=True)])
def test_only_the_optimizers_whose_gradients_overflowed_are_skipped(of, first):
    """Iterations are counted, however many optimizers overflow."""
    pair = Pair(*of, loss_scale="dynamic", max_skipped_steps=3).step()
    assert (pair.precision.loss_scale, pair.precision.skipped_steps) == (INITIAL_LOSS_SCALE, 0)
    pair.step(first)
    assert (pair.precision.loss_scale, pair.precision.skipped_steps) == (INITIAL_LOSS_SCALE / 2, 1)
    pair.step((0, 1)).step().step((1,)).step((0, 1))
    assert pair.precision.skipped_steps == 4
    pair.backward(overflows=(1,))
    with pytest.raises(GradientOverflowError, match=r"3 steps in a row .* backwards: weight$"):
        pair.precision.step(*pair.optimizers)


def test_each_optimizer_is_clipped_by_its_own_norm():
    pair = Pair("fp16", "lars")
    pair.backward()
    norms = [pair.precision.clip_grad_norm_(o, 0.2).item() for o in pair.optimizers]
    expected = [nn.utils.clip_grad_norm_(model.parameters(), 0.2).item() for model in pair.oracles]
    assert norms == pytest.approx(expected, rel=1e-5)
    pair.update()


@pytest.mark.parametrize(("name", "kind"), KINDS[1:])
def test_a_second_call_without_a_backward_is_refused_and_changes_nothing(name, kind):
    pair = Pair(name, kind)
    pair.backward(overflows=(0,))
    pair.precision.step(pair.optimizers[0])
    before = pair.models[1].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"^step: no precision\.backward .*\.step\(a, b"):
        pair.precision.step(pair.optimizers[1])
    assert torch.equal(pair.models[1].weight, before)
    assert pair.precision.loss_scale == INITIAL_LOSS_SCALE / 2
    # Alternating losses, as of a GAN, are iterations of their own.
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    for optimizer in pair.optimizers:
        pair.backward()
        pair.precision.step(optimizer)
    assert pair.precision.skipped_steps == 1


def test_an_optimizer_without_gradients_does_nothing():
    pair = Pair("fp16-master", "sgd")
    loss = pair.models[0](torch.ones(4, 4)).float().sum() / 16
    pair.precision.backward(loss)
    before = [model.weight.detach().clone() for model in pair.models]
    pair.precision.step(*pair.optimizers)
    assert not torch.equal(pair.models[0].weight, before[0])
    assert torch.equal(pair.models[1].weight, before[1])
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.precision.step(*pair.optimizers)  # no gradients at all
    assert pair.precision.skipped_steps == 0


def test_no_optimizer_and_the_same_one_twice_are_refused():
    pair = Pair("fp32", "sgd")
    for optimizers in ((), (pair.optimizers[0], pair.optimizers[0])):
        with pytest.raises(ValueError, match=r"each optimizer of the iteration once; valid: prec"):
            pair.precision.step(*optimizers)


def net_of_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8))


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["bf16-master", "fp16-master", "fp16-pure"]),
    st.lists(st.integers(0, 2), min_size=8, max_size=8),
)
@example("bf16-master", [0, 0, 1, 1, 0, 0, 2, 2])  # norm layers, which stay in FP32, by themselves
def test_any_share_of_a_converted_models_parameters_may_have_its_own_optimizer(name, shares):
    results = []
    for split in (shares, [0] * 8):
        precision = Precision(name, loss_scale=8.0)
        model = precision.convert(net_of_layers())
        parameters = list(zip(split, model.parameters(), strict=True))
        optimizers = [
            LARS([p for i, p in parameters if i == n], 0.5, master_weights=precision.form.masters)
            for n in sorted(set(split))
        ]
        for seed in range(3):
            torch.manual_seed(seed)
            precision.backward(model(torch.randn(16, 4)).square().mean())
            for optimizer in optimizers:
                precision.clip_grad_norm_(optimizer, 1e9)
            precision.step(*optimizers)
            model.zero_grad()
        results.append(model.state_dict())
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "other"), [("bf16-master", nn.LayerNorm(4)), ("fp16-pure", nn.Linear(4, 4))]
)
def test_the_optimizer_of_a_model_that_was_not_converted_is_refused(name, other):
    """Alone, and beside one that was; a norm layer stays in FP32 either way."""
    precision = Precision(name)
    model = precision.convert(nn.Linear(4, 4))
    masters = precision.form.masters
    optimizers = [LARS(m.parameters(), 0.1, master_weights=masters) for m in (model, other)]
    precision.backward(other(model(torch.ones(2, 4)).float()).sum())
    for refused in (optimizers, optimizers[1:]):
        with pytest.raises(ValueError, match=r"call precision.convert\(model\)$"):
            precision.step(*refused)
    precision.convert(other)
    precision.step(*optimizers)
