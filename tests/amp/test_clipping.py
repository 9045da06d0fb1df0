"""Clipping and unscaling gradients: the same as in FP32, in every precision."""

import copy
from functools import partial
from itertools import cycle

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from largebatch.amp import INITIAL_LOSS_SCALE, MasterWeights, Precision
from largebatch.amp.gradients import total_norm
from largebatch.lars import LARS

SHAPES = {"weight": (20, 30), "bias": (7,), "norm.weight": (30,), "norm.bias": (30,)}
FP32_OPTIMIZERS = {
    # Weight decay, because the trust ratio cancels the norm of a gradient without it.
    "lars": lambda ps: LARS(ps, 0.1, trust_coefficient=0.1, weight_decay=0.3),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.1, eps=0.01),
    "fused adamw": lambda ps: torch.optim.AdamW(ps, 0.1, eps=0.01, fused=True),
}


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(SHAPES["weight"], generator=generator))
        self.bias = nn.Parameter(torch.randn(SHAPES["bias"], generator=generator))
        self.norm = nn.LayerNorm(30)
        for p in self.parameters():  # values that every precision holds
            p.data = p.data.bfloat16().half().float()

    def forward(self, gradients):
        return sum((p.float() * gradients[name]).sum() for name, p in self.named_parameters())


def some_gradients(size=1.0, seed=1):
    """Gradients whose norm is ``size``, rounded so that every precision holds them."""
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    norm = torch.cat([v.flatten() for v in values.values()]).norm()
    return {name: (v * size / norm).bfloat16().half().float() for name, v in values.items()}


def optimizer_in(precision, kind, parameters):
    if kind == "lars":
        options = {"trust_coefficient": 0.1, "weight_decay": 0.3}
        return LARS(parameters, 0.1, **options, master_weights=precision.form.masters)
    optimizer = FP32_OPTIMIZERS[kind](parameters)
    return MasterWeights(optimizer) if precision.form.masters else optimizer


class Case:
    """A precision, its model and optimizer, and the same in FP32."""

    def __init__(self, name, kind, loss_scale):
        self.precision = Precision(name, loss_scale=loss_scale)
        self.oracle, self.model = Weights(), self.precision.convert(Weights())
        self.optimizer = optimizer_in(self.precision, kind, self.model.parameters())
        self.theirs = FP32_OPTIMIZERS[kind](self.oracle.parameters())

    def backward(self, gradients, factor=1.0):
        with self.precision.forward():
            loss = self.model(gradients)
        self.precision.backward(loss * factor)
        for name, p in self.oracle.named_parameters():
            gradient = gradients[name] * factor
            p.grad = gradient if p.grad is None else p.grad + gradient

    def clip(self, most, **options):
        ours = self.keeping(self.precision.clip_grad_norm_, self.optimizer, most, **options)
        theirs = clip_grad_norm_(self.oracle.parameters(), most, **options)
        assert (ours.dtype, ours.dim()) == (torch.float32, 0)
        # Where plain SGD clips FP16 gradients in place, it rounds them.
        rounds = self.precision.name == "fp16-pure"
        torch.testing.assert_close(ours, theirs, rtol=1e-3 if rounds else 1e-5, atol=0)

    def keeping(self, call, *arguments, **options):
        """Call what may not change the gradients of LARS and MasterWeights."""
        before = [p.grad.clone() for p in self.model.parameters()]
        result = call(*arguments, **options)
        if hasattr(self.optimizer, "master_weights"):
            after = [p.grad for p in self.model.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        return result

    def step(self, set_to_none=True):
        before = self.values()
        self.keeping(self.precision.step, self.optimizer)
        assert not {"grad_scale", "found_inf"} & vars(self.optimizer).keys()
        self.theirs.step()
        self.compare()
        assert not all(torch.equal(a, b) for a, b in zip(before, self.values(), strict=True))
        self.optimizer.zero_grad(set_to_none)
        self.theirs.zero_grad(set_to_none)

    def values(self):
        state = self.optimizer.state
        return [state.get(p, {}).get("master", p).detach().clone() for p in self.model.parameters()]

    def compare(self):
        for value, p in zip(self.values(), self.oracle.parameters(), strict=True):
            exact = value.dtype == torch.float32
            tolerance = 3e-6 if exact else 2 * torch.finfo(value.dtype).eps
            torch.testing.assert_close(value.float(), p.detach(), rtol=tolerance, atol=tolerance)


#: Every precision with every kind of optimizer and every loss scale, by pairs. Left out are AdamW
#: in fp16-pure, whose squares underflow in FP16, SGD there, which cannot unscale FP16 gradients,
#: and a fused optimizer inside MasterWeights, where it is called without a scale as the others.
CASES = [
    (name, kind, scale)
    for name, scales in {
        "fp32": ("dynamic", 1024.0, "none", "dynamic"),
        "bf16": (1024.0, "none", "dynamic", "none"),
        "fp16": ("none", "dynamic", 1024.0, "dynamic"),
        "bf16-master": ("dynamic", 1024.0, "none"),
        "fp16-master": (1024.0, "dynamic", "none"),
        "fp16-pure": ("dynamic", "none"),
    }.items()
    for kind, scale in zip(FP32_OPTIMIZERS, scales, strict=False)
]
SCALED = [case for case in CASES if case[2] != "none"]


def keeps_fp16_gradients(name, scale):
    """Whether unscaling is refused, since the gradients are in FP16."""
    return name in ("fp16-master", "fp16-pure") and scale != "none"


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
