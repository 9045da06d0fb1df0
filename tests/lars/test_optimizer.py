"""LARS: its implementations against each other, and against optimizers that are not ours."""

import copy
import pickle

import pytest
import timm.optim
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from largebatch.lars import LARS, polynomial
from largebatch.lars.reference import DIALECTS

IMPLEMENTATIONS = ["reference", "foreach"]
SHAPES = [(), (1,), (7,), (3, 5), (4, 3, 3, 3)]


def tensors(seed, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def train(make, steps=12, *, dtype=torch.float64, schedule=None, edit=None, gradient_scale=1.0):
    """Parameters after some steps on gradients that depend on nothing but the step."""
    parameters = [nn.Parameter(t) for t in tensors(0, dtype)]
    if edit:
        edit(parameters)
    optimizer = make(parameters)
    for step in range(steps):
        for parameter, gradient in zip(parameters, tensors(step + 1, dtype), strict=True):
            parameter.grad = gradient * gradient_scale
        if schedule:
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
        optimizer.step()
    return parameters


def assert_equal(ours, theirs, rtol=1e-10, atol=1e-14):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


options = st.fixed_dictionaries(
    {
        "dialect": st.sampled_from(sorted(DIALECTS)),
        "momentum": st.sampled_from([0.0, 0.9, 0.99]),
        "weight_decay": st.sampled_from([0.0, 1e-4, 0.1]),
        "trust_coefficient": st.sampled_from([1e-3, 0.05]),
        "eps": st.sampled_from([0.0, 1e-8, 0.1]),
        "trust_clip": st.booleans(),
        "nesterov": st.booleans(),
    }
).map(lambda o: o | {"nesterov": o["nesterov"] and o["momentum"] > 0})


@settings(deadline=None, max_examples=60)
@given(options, st.booleans(), st.sampled_from([1e-12, 1.0, 1e12]), st.booleans())
def test_foreach_is_the_reference(options, adapt, gradient_scale, tensor_lr):
    schedule = polynomial(3.0, 12, warmup_steps=4, start=0.1, end=0.01)
    if tensor_lr:
        rate = schedule
        schedule = lambda step: torch.tensor(rate(step), dtype=torch.float64)  # noqa: E731

    def run(implementation):
        def make(parameters):
            groups = [
                {"params": parameters[:2], "weight_decay": 0.0, "adapt": adapt},
                {"params": parameters[2:]},
            ]
            return LARS(groups, 3.0, implementation=implementation, **options)

        return train(make, schedule=schedule, gradient_scale=gradient_scale)

    assert_equal(run("foreach"), run("reference"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_zero_weights_and_zero_gradients_take_the_plain_rate(implementation, dialect):
    weights = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    gradients = [torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    parameters = [nn.Parameter(w.clone()) for w in weights]
    optimizer = LARS(
        parameters, 0.5, weight_decay=0.1, dialect=dialect, implementation=implementation
    )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    for parameter, w, g in zip(parameters, weights, gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), w - 0.5 * (g + 0.1 * w))
    assert list(optimizer.trust_ratios().values()) == [1.0, 1.0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("trust_clip", [False, True])
def test_dialect_torch_is_timms_lars(implementation, nesterov, trust_clip):
    schedule = polynomial(2.0, 12, warmup_steps=4, start=0.1)
    shared = {"momentum": 0.9, "weight_decay": 1e-3, "nesterov": nesterov, "trust_clip": trust_clip}
    ours = train(
        lambda p: LARS(p, 1.0, eps=1e-8, dialect="torch", implementation=implementation, **shared),
        schedule=schedule,
    )
    theirs = train(lambda p: timm.optim.Lars(p, 1.0, **shared), schedule=schedule)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_without_adaptation_it_is_torchs_sgd(implementation, momentum, nesterov):
    shared = {"momentum": momentum, "weight_decay": 1e-2, "nesterov": nesterov and momentum > 0}
    schedule = polynomial(0.2, 12, warmup_steps=4, start=0.1)
    theirs = train(lambda p: torch.optim.SGD(p, 0.1, **shared), schedule=schedule)

    def ours(dialect, schedule):
        return train(
            lambda p: LARS(
                [{"params": p, "adapt": False}],
                0.1,
                dialect=dialect,
                implementation=implementation,
                **shared,
            ),
            schedule=schedule,
        )

    assert_equal(ours("torch", schedule), theirs)
    # With one learning rate throughout, it does not matter whether the buffer holds it.
    constant = train(lambda p: torch.optim.SGD(p, 0.1, **shared))
    assert_equal(ours("mlperf", None), constant)


def test_dialects_part_when_the_learning_rate_changes():
    schedule = polynomial(2.0, 12, warmup_steps=6, start=0.1)
    mlperf = train(lambda p: LARS(p, 1.0, dialect="mlperf"), schedule=schedule)
    torch_style = train(lambda p: LARS(p, 1.0, dialect="torch"), schedule=schedule)
    assert not torch.allclose(mlperf[3], torch_style[3], rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_left_as_they_are_and_missing_ones_skipped(implementation):
    parameters = [nn.Parameter(t) for t in tensors(0)]
    optimizer = LARS(parameters, 1.0, weight_decay=0.1, implementation=implementation)
    gradients = tensors(1)
    for parameter, gradient in zip(parameters[1:], gradients[1:], strict=True):
        parameter.grad = gradient.clone()
    before = parameters[0].detach().clone()
    optimizer.step()
    assert torch.equal(parameters[0].detach(), before)
    for parameter, gradient in zip(parameters[1:], gradients[1:], strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert set(optimizer.trust_ratios()) == {f"group0.{i}" for i in range(1, len(SHAPES))}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_keep_updates_that_half_precision_loses(implementation, dtype):
    """Updates below half a unit in the last place add up in the masters and are lost without."""

    def move(master_weights):
        parameter = nn.Parameter(torch.ones(16, dtype=dtype))
        optimizer = LARS(
            [{"params": [parameter], "adapt": False}],
            1e-5,
            momentum=0.0,
            master_weights=master_weights,
            implementation=implementation,
        )
        for _ in range(2000):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameter.detach().float()

    assert torch.equal(move(master_weights=False), torch.ones(16))
    torch.testing.assert_close(
        move(master_weights=True), torch.full((16,), 0.98), rtol=0, atol=4e-3
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler_unscales_before_the_norms_and_skips_overflows(implementation, dtype):
    masters = dtype == torch.float16

    def steps(scaled):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        parameters = [nn.Parameter(t.to(dtype)) for t in tensors(0)]
        optimizer = LARS(
            parameters,
            0.5,
            weight_decay=1e-3,
            master_weights=masters,
            implementation=implementation,
        )
        for step in range(6):
            overflow = scaled and step % 2 == 1
            if overflow:
                before = copy.deepcopy((parameters, optimizer.state_dict()))
            gradient_of = tensors(step + 1 if not scaled else step // 2 + 1, torch.float32, 0.1)
            for parameter, gradient in zip(parameters, gradient_of, strict=True):
                gradient = gradient.to(dtype) * (2.0**10 if scaled else 1)
                parameter.grad = gradient
            if overflow:
                parameters[2].grad[0] = float("nan") if step == 1 else float("inf")
            scaler.scale(torch.ones(()))  # makes the scale, as scaling a loss does
            ratios = optimizer.trust_ratios()
            scaler.step(optimizer)
            if overflow:
                assert optimizer.trust_ratios() == ratios
                assert_identical(before, (parameters, optimizer.state_dict()))
            scaler.update(2.0**10 if scaled else None)
            if not scaled and step == 2:
                break
        return parameters

    assert_equal(steps(scaled=True), steps(scaled=False), rtol=1e-6, atol=1e-7)


def assert_identical(before, after):
    (old_parameters, old_state), (parameters, state) = before, after
    for old, new in zip(old_parameters, parameters, strict=True):
        assert torch.equal(old, new)
    assert old_state["state"].keys() == state["state"].keys()
    for index, values in old_state["state"].items():
        for key, value in values.items():
            assert torch.equal(value, state["state"][index][key]), (index, key)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_overflow_on_a_device_keeps_every_bit_of_negative_zeros_and_nans(implementation):
    """The path without a host read, which a GPU takes, on tensors that arithmetic would change."""
    from largebatch.lars import foreach, reference
    from largebatch.lars.reference import Hyper

    weights = [torch.tensor([-0.0, 1.0]), torch.tensor([2.0])]
    buffers = [torch.tensor([-0.0, float("nan")]), torch.tensor([-0.0])]
    kept = [t.clone() for t in (*weights, *buffers)]
    gradients = [torch.tensor([float("inf"), 1.0]), torch.tensor([1.0])]
    hyper = Hyper(1.0, 0.9, 0.1, 1e-3, 0.0, False, False, True)
    update = {"reference": reference.update, "foreach": foreach.update}[implementation]
    update("mlperf", weights, gradients, buffers, hyper, None, torch.ones(()))
    for new, old in zip((*weights, *buffers), kept, strict=True):
        assert torch.equal(new.view(torch.int32), old.view(torch.int32))


@pytest.mark.parametrize("master_weights", [False, True])
def test_state_dict_goes_on_bit_for_bit_and_between_implementations(master_weights):
    dtype = torch.bfloat16

    def run(steps, optimizer, parameters):
        for step in steps:
            for parameter, gradient in zip(parameters, tensors(step + 1, dtype), strict=True):
                parameter.grad = gradient
            optimizer.step()

    def make(implementation="foreach"):
        parameters = [nn.Parameter(t) for t in tensors(0, dtype)]
        return parameters, LARS(
            parameters, 0.5, master_weights=master_weights, implementation=implementation
        )

    through, optimizer = make()
    run(range(10), optimizer, through)
    first, optimizer = make()
    run(range(6), optimizer, first)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    for implementation in IMPLEMENTATIONS:
        second, resumed = make(implementation)
        for new, old in zip(second, first, strict=True):
            new.data.copy_(old.data)
        resumed.load_state_dict(saved)
        wanted = torch.float32 if master_weights else dtype
        assert {v.dtype for s in resumed.state.values() for v in s.values()} == {wanted}
        run(range(6, 10), resumed, second)
        if implementation == "foreach":
            assert all(torch.equal(a, b) for a, b in zip(second, through, strict=True))
        else:
            assert_equal(second, through, rtol=1e-2, atol=1e-3)


def test_state_dict_crosses_master_weights():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float16))
    with_masters = LARS([parameter], 0.1, master_weights=True)
    parameter.grad = torch.ones_like(parameter)
    with_masters.step()
    without = LARS([parameter], 0.1)
    without.load_state_dict(with_masters.state_dict())
    assert set(without.state[parameter]) == {"momentum_buffer"}
    assert without.state[parameter]["momentum_buffer"].dtype == torch.float16
    again = LARS([parameter], 0.1, master_weights=True)
    again.load_state_dict(without.state_dict())
    parameter.grad = torch.ones_like(parameter)
    again.step()
    assert again.state[parameter]["master"].dtype == torch.float32


def test_copies_and_pickles_are_whole():
    parameter = nn.Parameter(torch.ones(4))
    optimizer = LARS([("weight", parameter)], 0.1, dialect="torch", implementation="reference")
    parameter.grad = torch.ones(4)
    optimizer.step()
    other = copy.deepcopy(optimizer)
    copied = other.param_groups[0]["params"][0]
    copied.grad = torch.ones(4)
    other.step()
    optimizer.step()
    assert torch.equal(parameter, copied)
    assert other.trust_ratios() == optimizer.trust_ratios()
    assert list(other.trust_ratios()) == ["weight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be >= 0, not -1.0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), not 1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be >= 0"),
        ({"trust_coefficient": 0.0}, "trust_coefficient must be > 0"),
        ({"eps": -1e-9}, "eps must be >= 0"),
        ({"dialect": "adam"}, "dialect must be one of mlperf, torch, not 'adam'"),
        (
            {"implementation": "cuda"},
            "implementation 'cuda' is not one of auto, reference, foreach",
        ),
        ({"nesterov": True, "momentum": 0.0}, "nesterov must be False, or momentum > 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LARS([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **options})


def test_complex_parameters_and_sparse_gradients_are_refused_with_nothing_changed():
    with pytest.raises(TypeError, match=r"parameter group0.0 is complex"):
        LARS([nn.Parameter(torch.ones(2, dtype=torch.complex64))], 0.1)
    dense, embedding = nn.Parameter(torch.ones(3)), nn.Embedding(4, 2, sparse=True)
    optimizer = LARS([("dense", dense), ("table", embedding.weight)], 0.1)
    dense.grad = torch.ones(3)
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(TypeError, match="the gradient of table is sparse"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3))
    assert torch.equal(embedding.weight, before)
    assert not optimizer.state


def test_a_state_dict_that_does_not_fit_is_refused_with_nothing_changed():
    def optimizer(shape, **options):
        parameter = nn.Parameter(torch.ones(shape))
        made = LARS([parameter], 0.1, **options)
        parameter.grad = torch.ones(shape)
        made.step()
        return made

    ours = optimizer((2, 3))
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=r"momentum_buffer of parameter 0 has shape \(3, 2\)"):
        ours.load_state_dict(optimizer((3, 2)).state_dict())
    with pytest.raises(ValueError, match="is of dialect 'torch', this optimizer of 'mlperf'"):
        ours.load_state_dict(optimizer((2, 3), dialect="torch").state_dict())
    assert_identical(([], before), ([], ours.state_dict()))


def test_it_learns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.randn(256, 8)
    y = x[:, :1] * x[:, 1:2]
    optimizer = LARS(model.parameters(), 1.0, trust_coefficient=0.01)
    losses = []
    for _ in range(300):
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
