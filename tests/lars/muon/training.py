"""Small training runs of Muon, shared by its tests."""

import torch
from torch import nn
from torch.testing import assert_close

from largebatch.lars import Muon

#: Of the orthogonalised tensors, and of those that each of the other rules updates.
SHAPES = [(4, 6), (6, 4), (8, 3, 3, 3)]
OTHERS = [(7,), (3, 5), ()]
RULES = ("sgd", "lars", "adamw")


def tensors(seed, shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype) for t in made]


def groups(dtype=torch.float32, rules=RULES):
    made = [{"params": [nn.Parameter(t) for t in tensors(0, SHAPES, dtype)]}]
    for number, rule in enumerate(rules):
        of = [nn.Parameter(t) for t in tensors(number + 1, OTHERS, dtype)]
        options = {"momentum": 0.8, "weight_decay": 0.01, "lr": 0.05}
        made.append({"params": of, "orthogonal": False, "rule": rule, **options})
    return made


def make(dtype=torch.float32, rules=RULES, **options):
    return Muon(groups(dtype, rules), **{"lr": 0.1, **options})


def parameters(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def set_gradients(optimizer, step, scale=1.0):
    of = parameters(optimizer)
    made = tensors(100 + step, [parameter.shape for parameter in of])
    for parameter, gradient in zip(of, made, strict=True):
        # In the layout of the parameter, which torch's fused optimizers take for granted.
        parameter.grad = torch.empty_like(parameter).copy_(gradient * scale)


def run(optimizer, steps):
    """Take steps with gradients that depend only on the number of the step."""
    for step in steps:
        set_gradients(optimizer, step)
        optimizer.step()
    return parameters(optimizer)


def follow(source, target):
    for old, new in zip(parameters(source), parameters(target), strict=True):
        new.data.copy_(old.data)
    return target


def assert_equal(ours, theirs):
    """Check that parameters and state are equal to the last bit."""
    for a, b in zip(parameters(ours), parameters(theirs), strict=True):
        exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
        assert_close({**ours.state[a], "of": a}, {**theirs.state[b], "of": b}, **exactly)
