"""FP32 master weights, overflows, and state dicts across precisions and implementations."""

import copy

import pytest
import torch
from torch import Tensor, nn

from largebatch.lars import DENOMINATORS, LARS
from largebatch.lars.implementations import IMPLEMENTATIONS as UPDATES
from largebatch.lars.reference import Hyper
from tests.host_reads import NoHostReads
from tests.lars.problems import FORMS, IMPLEMENTATIONS, assert_close, assert_identical, tensors

# Triton's interpreter does not round to bfloat16 as a GPU does; tests/benchmarks/gpu/test_gpu.py
# covers that case on a GPU.
HALVES = [
    (implementation, dtype)
    for implementation in IMPLEMENTATIONS
    for dtype in (torch.float16, torch.bfloat16)
    if (implementation, dtype) != ("triton", torch.bfloat16)
]


@pytest.mark.parametrize(("implementation", "dtype"), HALVES)
def test_masters_keep_updates_that_half_precision_loses(implementation, dtype):
    """Updates below half a unit in the last place add up in masters and are lost without them."""

    def train(master_weights):
        parameter = nn.Parameter(torch.ones(16, dtype=dtype))
        optimizer = LARS(
            [{"params": [parameter], "adapt": False}],
            1e-4,
            momentum=0.0,
            master_weights=master_weights,
            implementation=implementation,
        )
        for _ in range(200):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameter.detach().float()

    assert torch.equal(train(master_weights=False), torch.ones(16))
    torch.testing.assert_close(
        train(master_weights=True), torch.full((16,), 0.98), rtol=0, atol=4e-3
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.float16, {"dialect": "mlperf-corrected", "nesterov": True}),
        (torch.float32, {"dialect": "torch", "denominator": "norm-of-sum", "maximize": True}),
    ],
    ids=["fp16", "fp32"],
)
def test_grad_scaler_unscales_before_the_norms_and_skips_overflows(implementation, dtype, form):
    """An overflow changes neither parameters, masters, momentum nor the previous learning rate."""
    scale = 2.0**10

    def run(overflows):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=overflows)
        parameters = [nn.Parameter(t.to(dtype)) for t in tensors(0)]
        optimizer = LARS(
            parameters,
            0.5,
            weight_decay=1e-3,
            adapt=True,
            master_weights=dtype == torch.float16,
            implementation=implementation,
            **form,
        )

        def step(gradients, lr):
            optimizer.param_groups[0]["lr"] = lr
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = (gradient * (scale if overflows else 1)).to(dtype)
            scaler.scale(torch.ones(()))  # creates the scale tensor, as scaling a loss does

        for number in range(3):
            step(tensors(number + 1, torch.float32, 0.1), 0.5 / (number + 1))
            scaler.step(optimizer)
            if not overflows:
                continue
            scaler.update(scale)
            step(tensors(99, torch.float32, 0.1), 7.0)
            parameters[2].grad[0] = float("nan") if number == 1 else float("inf")
            before = copy.deepcopy((parameters, optimizer.state_dict()))
            ratios = optimizer.trust_ratios()
            scaler.step(optimizer)
            assert optimizer.trust_ratios() == ratios
            assert_identical(before, (parameters, optimizer.state_dict()))
            before, after = before[1]["param_groups"][0], optimizer.param_groups[0]
            assert before.get("previous_lr") == after.get("previous_lr")
            scaler.update(scale)
        return parameters

    assert_close(run(overflows=True), run(overflows=False), rtol=1e-6, atol=1e-7)


def test_no_host_reads_catches_host_reads():
    for read in (Tensor.item, bool, float, int):
        with NoHostReads(), pytest.raises(AssertionError, match="_local_scalar_dense"):
            read(torch.ones(()))


@pytest.mark.parametrize(("implementation", "dialect"), [f for f in FORMS if f[0] != "fused"])
@pytest.mark.parametrize(
    ("denominator", "tensor_lr"), [*zip(DENOMINATORS, [False, True], strict=True)]
)
def test_no_step_waits_for_the_device(implementation, dialect, denominator, tensor_lr, monkeypatch):
    """Runs the GPU's code on the CPU, where every read of a tensor's value can be caught."""
    parameters = [nn.Parameter(t.half()) for t in tensors(0)]
    optimizer = LARS(
        [{"params": parameters[:2], "adapt": False}, {"params": parameters[2:]}],
        torch.tensor(0.5) if tensor_lr else 0.5,
        dialect=dialect,
        weight_decay=0.1,
        denominator=denominator,
        decay_at_zero_norm=not tensor_lr,
        master_weights=True,
        implementation=implementation,
    )
    for step in range(3):
        for parameter, gradient in zip(parameters, tensors(step + 1), strict=True):
            parameter.grad = gradient.half()
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.found_inf = torch.tensor(float(step == 1))
        with NoHostReads(), monkeypatch.context() as patch:
            patch.setattr(Tensor, "tolist", None)  # reads CPU memory without an operator
            optimizer.step()
    assert len(optimizer.trust_ratios()) == len(parameters)


@pytest.mark.parametrize(("implementation", "dialect"), FORMS)
def test_an_overflow_preserves_negative_zeros_and_nans_bit_for_bit(implementation, dialect):
    weights = [torch.tensor([-0.0, 1.0]), torch.tensor([2.0])]
    buffers = [torch.tensor([-0.0, float("nan")]), torch.tensor([-0.0])]
    halves = [torch.tensor([-0.0, 3.0]).half(), torch.tensor([5.0]).half()]
    kept = [t.clone() for t in (*weights, *buffers, *halves)]
    gradients = [torch.tensor([float("inf"), 1.0]), torch.tensor([1.0])]
    hyper = Hyper(1.0, 0.9, 0.1, 1e-3, 0.0, False, False, True)
    found_inf = torch.ones(())
    update = UPDATES[implementation]
    update(dialect, weights, gradients, buffers, hyper, None, found_inf, halves)
    for new, old in zip((*weights, *buffers, *halves), kept, strict=True):
        integers = torch.int32 if new.dtype == torch.float32 else torch.int16
        assert torch.equal(new.view(integers), old.view(integers))


def test_state_dict_loads_into_a_model_of_another_dtype():
    """FP32 momentum moves to a half-precision model with masters and back without rounding."""

    def make(dtype):
        parameter = nn.Parameter(tensors(0)[3].to(dtype))
        return parameter, LARS([parameter], 0.1, master_weights=True)

    whole, optimizer = make(torch.float32)
    whole.grad = tensors(1, torch.float32)[3]
    optimizer.step()
    buffer = optimizer.state[whole]["momentum_buffer"].clone()
    assert set(optimizer.state[whole]) == {"momentum_buffer"}
    half, of_half = make(torch.float16)
    of_half.load_state_dict(optimizer.state_dict())
    half.data.copy_(whole)
    assert torch.equal(of_half.state[half]["momentum_buffer"], buffer)
    again, of_whole = make(torch.float32)
    of_whole.load_state_dict(of_half.state_dict())
    assert torch.equal(of_whole.state[again]["momentum_buffer"], buffer)
    half.grad = torch.zeros_like(half)
    of_half.step()
    assert of_half.state[half]["master"].dtype == torch.float32
