"""The rival of the benchmark does the same matrix products as newton_schulz, and nothing else."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.lars import orthogonalization
from largebatch.lars import newton_schulz


class Products(TorchDispatchMode):
    """Record the operators, and the shapes of the matrix products."""

    VIEWS = ("detach", "transpose", "t", "view", "unsqueeze")

    def __init__(self):
        super().__init__()
        self.products = []
        self.others = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("bmm", "baddbmm"):
            shapes = [tuple(tensor.shape) for tensor in args[:3]]
            self.products.append((name, shapes, kwargs.get("beta"), kwargs.get("alpha")))
        elif name not in self.VIEWS:
            self.others.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(2, 8, 30), (1, 30, 8), (3, 9, 9)])
def test_products_alone_are_the_products_of_newton_schulz(shape):
    batch = torch.randn(shape)
    if shape[1] > shape[2]:
        batch = batch.mT.contiguous()
    alone = orthogonalization.products(batch)
    with Products() as found:
        alone()
    with Products() as expected:
        newton_schulz(batch)
    assert sorted(map(str, found.products)) == sorted(map(str, expected.products))
    assert found.others == []


@pytest.mark.parametrize(("form", "steps"), [("plain", 1), ("Gram", 5)])
def test_a_form_is_taken_whatever_the_shape(form, steps):
    x = torch.randn(1, 12, 12)
    with FlopCounterMode(display=False) as counter, orthogonalization.form(form):
        newton_schulz(x)
    wide, square = (10, 5) if steps == 1 else (2, 17)
    assert counter.get_total_flops() == 2 * 12**3 * (wide + square)
