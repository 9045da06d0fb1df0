"""The Triton kernels: compilation for a GPU, number of launches, and unusual memory layouts.

Their results are compared with the reference in test_dialects.py and test_masters.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from largebatch.lars import LARS
from largebatch.lars.triton import kernels as triton_kernels
from largebatch.lars.triton import step as triton_update

pytestmark = pytest.mark.slow("compiles and interprets Triton kernels")

ROOT = Path(__file__).parents[2]

# Runs in its own process, because Triton decides at import whether to compile or to interpret.
COMPILE = """
import triton.language as tl
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from largebatch.lars.triton import kernels as kernels

def compiled(kernel, options):
    types = {"table": "*i64", "programs": "*i32", "count": "i32", "constants": "*fp64",
             "lr_at": "*fp64", "previous_lr_at": "*fp64"}
    options = {name: value for name, value in options.items() if name in kernel.arg_names}
    types |= {name: "constexpr" for name in options}
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(n),): value for n, value in options.items()}
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

def flags(**values):
    names = "HAS_BUFFER HAS_HALF LR_IN_BUFFER CORRECTED NESTEROV MAXIMIZE CLIP ADAPT MAY_SKIP"
    return ({"WEIGHT": tl.float32, "GRADIENT": tl.float16, "BUFFER": tl.float32,
             "HALF": tl.float16, "COMPUTE": tl.float32, "ALIGNED": True, "CHUNK": 16384,
             "BLOCK": 1024, "DIVISOR": "GRADIENT", "DECAY_AT_ZERO_NORM": True}
            | {name: False for name in names.split()} | values)

for options in (
    flags(HAS_BUFFER=True),
    flags(HAS_BUFFER=True, DIVISOR="DECAYED", MAXIMIZE=True),
    flags(HAS_BUFFER=True, DIVISOR="MOVE"),
    flags(HAS_BUFFER=True, DIVISOR="MOVE", NESTEROV=True, MAXIMIZE=True),
    flags(DIVISOR="MOVE"),
):
    ptx = compiled(kernels.sums_of_squares, options)
    print("sums", options["DIVISOR"], ptx.count("ld.global.v4"))
for options in (
    flags(HAS_BUFFER=True, HAS_HALF=True, LR_IN_BUFFER=True, CORRECTED=True, ADAPT=True,
          MAY_SKIP=True),
    flags(HAS_BUFFER=True, CLIP=True, DECAY_AT_ZERO_NORM=False, ADAPT=True, NESTEROV=True),
    flags(HAS_BUFFER=True, DIVISOR="DECAYED", LR_IN_BUFFER=True, ADAPT=True, MAXIMIZE=True),
    flags(HAS_BUFFER=True, DIVISOR="MOVE", ADAPT=True, NESTEROV=True, CLIP=True),
    flags(LR_IN_BUFFER=True),
):
    ptx = compiled(kernels.update, options)
    print("update", "ld.global.v4" in ptx and "st.global.v4" in ptx)
"""


def test_the_kernels_compile_for_a_gpu_and_move_16_bytes_at_once():
    """A thread sums 8 numbers at a time: 2 loads of a weight, 1 of a half-precision gradient.

    Only the ratio of the momentum reads the buffer too, in 2 loads.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, "-c", COMPILE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    sums = ["sums GRADIENT 3", "sums DECAYED 3", "sums MOVE 5", "sums MOVE 5", "sums MOVE 3"]
    assert result.stdout.splitlines() == [*sums, *["update True"] * 5]


#: Options that choose the tensor whose norm divides the trust ratio.
FORMS = [{}, {"denominator": "norm-of-sum", "maximize": True}, {"dialect": "simclr-popular"}]

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="with a GPU, tests/benchmarks/gpu/test_gpu.py runs the compiled kernels",
)


@interpreted
@pytest.mark.parametrize("tensors", [1, 3, 100])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_launches_do_not_grow_with_the_number_of_tensors(tensors, form, monkeypatch):
    launches = []

    class Counted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launches.append(grid)
            return self.kernel[grid]

    for name in ("sums_of_squares", "update"):
        monkeypatch.setattr(triton_kernels, name, Counted(getattr(triton_kernels, name)))
    parameters = [nn.Parameter(torch.ones(5)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.ones(5)
    LARS(parameters, 1.0, adapt=True, implementation="triton", **form).step()
    assert launches == [(tensors,)] * 2


@interpreted
def test_gradients_at_unaligned_addresses_match_the_reference():
    """Gradients are often views into a bucket, not aligned to 16 bytes."""
    results = []
    for implementation in ("triton", "reference"):
        torch.manual_seed(0)
        bucket = torch.randn(20_001)
        parameter = nn.Parameter(torch.randn(20_000))
        parameter.grad = bucket[1:]
        LARS([parameter], 1.0, adapt=True, implementation=implementation).step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results)


@interpreted
def test_the_table_is_copied_to_the_device_only_when_an_address_changes():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = LARS([parameter], 1.0, implementation="triton")
    optimizer.step()
    before = triton_update._table.cache_info()
    for _ in range(5):
        optimizer.step()
    after = triton_update._table.cache_info()
    assert (after.hits - before.hits, after.misses - before.misses) == (5, 0)
    old = parameter.grad  # kept alive, so that the next gradient has another address
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert triton_update._table.cache_info().misses == after.misses + 1
    assert old is not parameter.grad


@interpreted
def test_a_cuda_graph_makes_its_own_table(monkeypatch):
    """A cached table may be evicted while the graph reads it, or be read before the graph ran."""
    cached, uncached = triton_update._table, triton_update._table.__wrapped__
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for capturing, expected in ((False, cached), (True, uncached)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert triton_update._cache_unless_captured(cached, cuda) is expected
        assert triton_update._cache_unless_captured(cached, cpu) is cached
    arguments = ((((64, 128),) * 4), (3, 40_000), cpu)
    for a, b in zip(cached(*arguments), uncached(*arguments), strict=True):
        assert torch.equal(a, b)
