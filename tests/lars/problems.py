"""Small optimization problems shared by the tests of LARS."""

import torch
from hypothesis import strategies as st
from torch import nn

from largebatch.lars import DENOMINATORS, DIALECTS, LARS
from tests.lars.muon import training

# On a machine with a GPU, Triton compiles for it, and tests/benchmarks/gpu/test_gpu.py compares the
# kernels with the reference; elsewhere they run in Triton's interpreter.
TRITON = [] if torch.cuda.is_available() else ["triton"]
FAST = ["foreach", "fused", *TRITON]
IMPLEMENTATIONS = ["reference", *FAST]
# Triton has no kernels for the dialect simclr-popular.
FORMS = [
    (implementation, dialect)
    for implementation in IMPLEMENTATIONS
    for dialect in sorted(DIALECTS)
    if (implementation, dialect) != ("triton", "simclr-popular")
]
#: Options of LARS besides its rate, dialect and what adapts.
OPTIONS = st.fixed_dictionaries(
    {
        "momentum": st.sampled_from([0.0, 0.9, 0.99]),
        "weight_decay": st.sampled_from([0.0, 1e-4, 0.1]),
        "trust_coefficient": st.sampled_from([1e-3, 0.05]),
        "eps": st.sampled_from([0.0, 1e-8, 0.1]),
        "trust_clip": st.booleans(),
        "nesterov": st.booleans(),
        "denominator": st.sampled_from(DENOMINATORS),
        "decay_at_zero_norm": st.booleans(),
        "maximize": st.booleans(),
    }
).map(lambda o: o | {"nesterov": o["nesterov"] and o["momentum"] > 0})
ADAPT = st.sampled_from([None, True, False])
SHAPES = [(), (1,), (7,), (3, 5), (4, 3, 3, 3), (2, 3, 4)]
LAYOUTS = ("contiguous", "channels last", "transposed", "strided")


def laid_out(tensor, layout):
    """Return a tensor in another memory layout, where it has enough dimensions for it."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if layout == "channels last" and tensor.dim() in formats:
        return tensor.to(memory_format=formats[tensor.dim()])
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided" and tensor.dim():
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]
    return tensor


def tensors(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def train(
    make,
    steps=12,
    *,
    dtype=torch.float64,
    schedule=None,
    edit=None,
    edit_gradients=None,
    gradient_scale=1.0,
):
    """Train on gradients that depend only on the step, and return the parameters."""
    parameters = [nn.Parameter(t) for t in tensors(0, dtype)]
    if edit:
        edit(parameters)
    optimizer = make(parameters)
    for step in range(steps):
        for parameter, gradient in zip(parameters, tensors(step + 1, dtype), strict=True):
            parameter.grad = gradient * gradient_scale
        if edit_gradients:
            edit_gradients(step, parameters)
        if schedule:
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
        optimizer.step()
    return parameters


def assert_close(ours, theirs, rtol=1e-10, atol=1e-14):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def made(implementation, dtype=torch.float32, lr=0.1, **options):
    """Return Muon, or LARS by an implementation, of the same tensors in groups of two kinds."""
    if implementation == "muon":
        return training.make(dtype, lr=lr, **options)
    adapting, others = (
        [nn.Parameter(t) for t in training.tensors(number, shapes, dtype)]
        for number, shapes in enumerate((training.SHAPES, training.OTHERS))
    )
    groups = [{"params": adapting}, {"params": others, "adapt": False}]
    return LARS(groups, lr, implementation=implementation, **{"weight_decay": 1e-3, **options})
