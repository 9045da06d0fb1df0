"""Clipping and unscaling gradients: the same as in FP32, in every precision."""

import copy
from functools import partial
from itertools import cycle

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_value_

from largebatch.amp import INITIAL_LOSS_SCALE, Precision
from largebatch.amp.gradients import total_norm
from tests.amp.clipping import CASES, SCALED, Case, Weights, keeps_fp16_gradients, some_gradients


@settings(deadline=None, max_examples=60)
@given(
    of=st.sampled_from(CASES),
    order=st.sampled_from(["clip", "clip clip", "unscale", "unscale clip", "clip unscale clip"]),
    sizes=st.lists(st.sampled_from([1.0, 0.3, 0.05]), min_size=1, max_size=3),
    clears=st.booleans(),
)
@example(("fp16-master", "lars", 1024.0), "clip unscale clip", [1.0, 0.05], False)
@example(("fp16", "sgd", "dynamic"), "clip unscale clip", [1.0], True)
@example(("fp16", "adamw", 1024.0), "unscale", [1.0, 0.3], False)
def test_gradients_may_be_clipped_and_unscaled_in_any_order_as_in_fp32(of, order, sizes, clears):
    (name, _, scale), case = of, Case(*of)
    divides = hasattr(case.optimizer, "_step_supports_amp_scaling")
    for seed, size in enumerate(sizes):
        case.backward(some_gradients(size, seed))
        most = 0.4
        for place, call in enumerate(order.split()):
            if call == "clip":
                case.clip(most)
                most /= 3
            elif case.precision.scales and place and not divides:
                with pytest.raises(RuntimeError, match="are unscaled already"):
                    case.precision.unscale_(case.optimizer)
            elif keeps_fp16_gradients(name, scale):
                with pytest.raises(ValueError, match=r"are in FP16, .*valid: precision\.clip_grad"):
                    case.precision.unscale_(case.optimizer)
            else:
                case.precision.unscale_(case.optimizer)
                if order == "unscale":  # and changed by hand
                    for parameters in (case.model.parameters(), case.oracle.parameters()):
                        clip_grad_value_(parameters, 2**-5)
                    pairs = zip(case.model.parameters(), case.oracle.parameters(), strict=True)
                    for ours, theirs in pairs:
                        close = {"rtol": 1e-6, "atol": 0}
                        torch.testing.assert_close(ours.grad.float(), theirs.grad, **close)
        case.step(set_to_none=clears)


@pytest.mark.parametrize(
    ("of", "call"), [*zip(SCALED, cycle(["clip", "unscale clip", "clip clip"]))]
)
def test_an_overflow_skips_the_step_and_changes_nothing(of, call):
    (name, _, scale), case = of, Case(*of)
    for skipped in (1, 2):  # before the first step, which makes the state, and after it
        state = copy.deepcopy(case.optimizer.state_dict()["state"])
        before = case.values()
        case.backward({name: 1e38 * v for name, v in some_gradients(1e4).items()})
        for part in call.split():
            if part == "clip":
                assert not case.precision.clip_grad_norm_(case.optimizer, 0.1).isfinite()
            elif not keeps_fp16_gradients(name, scale):
                case.precision.unscale_(case.optimizer)
        case.precision.step(case.optimizer)
        assert case.precision.skipped_steps == skipped
        halved = INITIAL_LOSS_SCALE / 2**skipped
        assert case.precision.loss_scale == (scale if scale == 1024.0 else halved)
        assert all(torch.equal(a, b) for a, b in zip(before, case.values(), strict=True))
        if skipped == 2:
            torch.testing.assert_close(case.optimizer.state_dict()["state"], state, rtol=0, atol=0)
        case.optimizer.zero_grad()
        case.theirs.zero_grad()
        case.backward(some_gradients(0.1))
        case.step()
    case.backward(some_gradients(1.0, seed=2))
    case.clip(0.1)
    case.step()


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    dtypes=st.permutations([torch.float16, torch.bfloat16, torch.float32, torch.float64] * 2),
    norm_type=st.sampled_from([1.0, 2.0, 2.5, float("inf")]),
    exponent=st.integers(-14, 10),
)
def test_the_norm_is_that_of_one_vector_in_fp64(sizes, dtypes, norm_type, exponent):
    assume(any(sizes) or norm_type < float("inf"))  # the maximum of nothing
    generator = torch.Generator().manual_seed(sum(sizes))
    tensors = [
        (torch.randn(n, generator=generator) * 2.0**exponent).to(d)
        for n, d in zip(sizes, dtypes, strict=False)
    ]
    whole = torch.cat([t.double() for t in tensors])
    expected = torch.linalg.vector_norm(whole, norm_type)
    ours = total_norm(tensors, norm_type)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected.double(), rtol=2e-6, atol=0)


def test_calls_without_a_backward_pass_are_refused_in_one_line():
    case = Case("bf16-master", "lars", "dynamic")
    for _ in range(2):  # before the first one, and after a step
        with pytest.raises(RuntimeError, match=r"^unscale_: no precision\.backward since"):
            case.precision.unscale_(case.optimizer)
        with pytest.raises(RuntimeError, match=r"^clip_grad_norm_: no precision\.backward since"):
            case.precision.clip_grad_norm_(case.optimizer, 0.1)
        case.backward(some_gradients(0.1))
        case.step()


@pytest.mark.parametrize(
    ("name", "kind", "call", "clears"),
    [
        *(("fp16", "sgd", "clip", "not"), ("fp16", "sgd", "unscale", "to None")),
        *(("bf16", "lars", "clip", "to None"), ("bf16", "lars", "unscale", "in place")),
        *(("bf16-master", "sgd", "clip", "in place"), ("bf16-master", "sgd", "unscale", "not")),
    ],
)
def test_a_backward_pass_after_clipping_or_unscaling_is_refused(name, kind, call, clears):
    """Whether it adds to these gradients or the caller has left out the step."""
    case = Case(name, kind, "dynamic")
    case.backward(some_gradients(0.1))
    if call == "clip":
        case.clip(0.05)
    else:
        case.precision.unscale_(case.optimizer)
    if clears != "not":
        case.optimizer.zero_grad(set_to_none=clears == "to None")
    before = case.values()
    case.precision.backward(case.model(some_gradients(0.1)))
    clip = partial(case.precision.clip_grad_norm_, max_norm=0.1)
    for following in (clip, case.precision.unscale_, case.precision.step):
        with pytest.raises(RuntimeError, match=r"backward pass has followed .*valid: unscale and"):
            following(case.optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, case.values(), strict=True))
    if name == "fp16":
        case.precision.load_state_dict(case.precision.state_dict())  # which abandons it, too
    else:
        case.precision.abandon()
    case.optimizer.zero_grad()
    case.theirs.zero_grad()
    case.backward(some_gradients(0.1))
    case.clip(0.05)
    case.step()


@pytest.mark.parametrize(
    ("name", "kind", "set_to_none"),
    [("fp32", "lars", True), ("bf16-master", "sgd", False), ("bf16", "sgd", True)],
)
def test_without_loss_scaling_a_step_may_be_left_out(name, kind, set_to_none):
    case = Case(name, kind, "none")
    case.backward(some_gradients(1.0))
    case.clip(0.1)
    case.optimizer.zero_grad(set_to_none)
    case.theirs.zero_grad(set_to_none)
    case.backward(some_gradients(0.5, seed=2))
    if kind == "lars":  # a factor that its step would apply to these gradients
        with pytest.raises(RuntimeError, match=r"backward pass has followed .* LARS were unscaled"):
            case.precision.step(case.optimizer)
    case.clip(0.1)
    case.step()


def test_an_optimizer_that_cannot_unscale_fp16_gradients_is_refused_by_name():
    precision = Precision("fp16-pure")
    model = precision.convert(Weights())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    precision.backward(model(some_gradients(0.1)))
    for call in (precision.step, precision.unscale_):
        with pytest.raises(ValueError, match=r"SGD cannot unscale FP16 gradients; valid: LARS"):
            call(optimizer)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_norm_that_is_not_positive_is_refused(value):
    case = Case("fp32", "sgd", "none")
    for arguments, name in (((value,), "max_norm"), ((1.0, value), "norm_type")):
        with pytest.raises(ValueError, match=f"{name} must be > 0, not"):
            case.precision.clip_grad_norm_(case.optimizer, *arguments)


@pytest.mark.parametrize(("name", "kind"), [("fp32", "sgd"), ("bf16-master", "lars")])
def test_an_infinite_bound_does_not_spread_an_infinite_gradient(name, kind):
    case = Case(name, kind, "none")
    case.backward(some_gradients(1.0))
    case.model.bias.grad[0] = float("inf")
    assert case.precision.clip_grad_norm_(case.optimizer, float("inf")).isinf()
    case.precision.step(case.optimizer)
    assert case.values()[0].isfinite().all()
    case.optimizer.zero_grad()
    case.backward(some_gradients(1.0))
    case.precision.clip_grad_norm_(case.optimizer, float("inf"))
    case.backward(some_gradients(1.0))  # an infinite bound only measures, so this may add to them
