"""The formulas of the cost against the operators that run."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.lars.allocations import peak_bytes
from largebatch.lars import NS_COEFFICIENTS, Muon, newton_schulz
from largebatch.lars.muon.cost import (
    ELEMENTWISE_BYTES,
    matrices_of,
    model_cost,
    newton_schulz_cost,
    run_flops,
)

cases = st.fixed_dictionaries(
    {
        "rows": st.integers(2, 40),
        "columns": st.integers(2, 40),
        "matrices": st.integers(1, 3),
        "coefficients": st.sampled_from(sorted(NS_COEFFICIENTS)),
        "steps": st.integers(1, 8),
        "dtype": st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    }
)


class Traffic(TorchDispatchMode):
    """Count the bytes of matrices that operators read and write, each operand once."""

    #: These only allocate, or return views of what they are given.
    NOTHING = ("detach", "diagonal", "new_empty", "transpose", "unbind", "unsqueeze", "view")

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ not in self.NOTHING:
            operands = [tensor for tensor in tree_leaves(args) if is_matrix(tensor)]
            self.bytes += sum({t.data_ptr(): t.nbytes for t in operands}.values())
            self.bytes += result.nbytes if is_matrix(result) else 0
        return result


def is_matrix(tensor):
    """Not a number per matrix."""
    is_tensor = isinstance(tensor, torch.Tensor)
    return is_tensor and tensor.dim() > 1 and tensor.shape[-2:] != (1, 1)


def run(case, device="cpu"):
    x = torch.ones(case["matrices"], case["rows"], case["columns"], device=device)
    options = {key: case[key] for key in ("coefficients", "steps", "dtype")}
    return lambda: newton_schulz(x, **options)


@settings(deadline=None, max_examples=40)
@given(case=cases)
def test_flops_are_those_that_torch_counts(case):
    with FlopCounterMode(display=False) as counter:
        run(case, "meta")()
    cost = newton_schulz_cost(**case)
    assert cost.flops == counter.get_total_flops()
    assert cost.flops == min(cost.plain_flops, cost.gram_flops)


@settings(deadline=None, max_examples=40)
@given(case=cases)
def test_bytes_are_those_of_the_operands(case):
    orthogonalize = run(case)
    with Traffic() as traffic:
        orthogonalize()
    assert newton_schulz_cost(**case).bytes_moved == traffic.bytes


@settings(deadline=None, max_examples=40)
@given(case=cases)
def test_memory_is_that_of_the_allocations(case):
    per_matrix = 64 * case["matrices"]  # the norm and other single numbers
    measured = peak_bytes(run(case))
    peak = newton_schulz_cost(**case).peak_bytes
    assert peak <= measured <= peak + per_matrix


def test_a_run_of_five_steps_by_hand():
    """Jordan: 5 (4 m^2 n + 2 m^3); on Gram matrices two long products and 17 square ones."""
    assert 5 * run_flops(64, 256, 1) == 5 * (4 * 64**2 * 256 + 2 * 64**3)
    assert run_flops(64, 256, 5) == 2 * 2 * 64**2 * 256 + 17 * 2 * 64**3


@pytest.mark.parametrize("conv_mode", ["flatten", "batched"])
def test_a_model_costs_what_a_step_of_muon_does(conv_mode):
    shapes = [(8, 4, 3, 3), (8, 4, 3, 3), (4, 72), (72, 4), (20, 8, 1, 1), (6, 7)]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = Muon(parameters, lr=0.1, conv_mode=conv_mode)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    cost = model_cost(shapes, conv_mode=conv_mode, dtype=torch.float32)
    assert cost.flops == counter.get_total_flops()
    layers = [model_cost([s], conv_mode=conv_mode, dtype=torch.float32) for s in shapes]
    assert cost.flops == sum(layer.flops for layer in layers)
    assert cost.bytes_moved == sum(layer.bytes_moved for layer in layers)
    assert cost.peak_bytes >= max(layer.peak_bytes for layer in layers)  # as some are one batch


def test_the_matrices_of_a_convolution():
    assert matrices_of((8, 4, 3, 5)) == (1, 8, 60)
    assert matrices_of((8, 4, 3, 5), "batched") == (15, 8, 4)
    assert matrices_of((8, 4), "batched") == (1, 8, 4)
    for mode in ("flatten", "batched"):
        assert math.prod(matrices_of((8, 4, 3, 5), mode)) == 8 * 4 * 3 * 5


def test_no_layers_cost_nothing():
    assert set(vars(model_cost([])).values()) == {0}
    assert ELEMENTWISE_BYTES == 5 * 4  # three FP32 values read and two written
