"""The Triton kernels: compilation for a GPU, number of launches, and unusual memory layouts.

Their results are compared with the reference in test_dialects.py and test_masters.py.
"""

import os
import subprocess
import sys
import weakref
from collections import OrderedDict
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
from torch import nn

from largebatch.lars import LARS
from largebatch.lars.triton import kernels as triton_kernels
from largebatch.lars.triton import launch, tables

pytestmark = pytest.mark.slow("compiles and interprets Triton kernels")

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]

# Runs in its own process, because Triton decides at import whether to compile or to interpret.
COMPILE = """
import triton.language as tl
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from largebatch.lars.triton import kernels as kernels

def compiled(kernel, options):
    types = {"addresses": "*i64", "sizes": "*i64", "programs": "*i32", "count": "i32",
             "constants": "*fp64", "lr_at": "*fp64", "previous_lr_at": "*fp64"}
    options = {name: value for name, value in options.items() if name in kernel.arg_names}
    types |= {name: "constexpr" for name in options}
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(n),): value for n, value in options.items()}
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

def flags(**values):
    names = ("DECAYED HAS_BUFFER HAS_HALF LR_IN_BUFFER CORRECTED NESTEROV MAXIMIZE CLIP ADAPT "
             "MAY_SKIP")
    return ({"WEIGHT": tl.float32, "GRADIENT": tl.float16, "BUFFER": tl.float32,
             "HALF": tl.float16, "COMPUTE": tl.float32, "ALIGNED": True, "CHUNK": 16384,
             "BLOCK": 1024, "DECAY_AT_ZERO_NORM": True}
            | {name: False for name in names.split()} | values)

for options in (
    flags(),
    flags(DECAYED=True, MAXIMIZE=True),
):
    ptx = compiled(kernels.sums_of_squares, options)
    print("sums", ptx.count("ld.global.v4"))
for options in (
    flags(HAS_BUFFER=True, HAS_HALF=True, LR_IN_BUFFER=True, CORRECTED=True, ADAPT=True,
          MAY_SKIP=True),
    flags(HAS_BUFFER=True, DECAYED=True, CLIP=True, DECAY_AT_ZERO_NORM=False, ADAPT=True,
          NESTEROV=True, MAXIMIZE=True),
    flags(LR_IN_BUFFER=True),
):
    ptx = compiled(kernels.update, options)
    print("update", "ld.global.v4" in ptx and "st.global.v4" in ptx)
"""


def test_the_kernels_compile_for_a_gpu_and_move_16_bytes_at_once():
    """A thread sums 8 numbers at a time: 2 loads of a weight, 1 of a half-precision gradient."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, "-c", COMPILE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [*["sums 3"] * 2, *["update True"] * 3]


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="with a GPU, tests/benchmarks/gpu/test_gpu.py runs the compiled kernels",
)


@interpreted
@pytest.mark.parametrize("tensors", [1, 20])
def test_launches_do_not_grow_with_the_number_of_tensors(tensors, monkeypatch):
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
    LARS(parameters, 1.0, adapt=True, implementation="triton").step()
    assert launches == [(tensors,)] * 2
    launch._launch(CPU)  # which tries, before a step, that kernels can be launched
    assert launches[2:] == [(1,)] * 2


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
def test_only_what_is_new_is_copied_to_the_device(monkeypatch):
    """Addresses where gradients move, the learning rate where it changes, the rest once."""
    caches = ("addresses_on", "programs_on", "numbers_on", "number_on", "ones_on")
    for name in caches:  # other tests have filled them
        monkeypatch.setattr(getattr(tables, name), "_entries", OrderedDict())
    parameters = [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(5))]
    optimizer = LARS(parameters, 1.0, implementation="triton")
    kept = []  # so that the next gradients have other addresses

    def made(*, moves=False, lr=None):
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr
        for parameter in parameters:
            if moves or parameter.grad is None:
                kept.append(parameter.grad)
                parameter.grad = torch.ones_like(parameter)
        before = [getattr(tables, name).made for name in caches]
        optimizer.step()
        return [getattr(tables, name).made - n for name, n in zip(caches, before, strict=True)]

    made()
    assert made() == [0] * 5
    assert made(moves=True) == [2, 0, 0, 0, 0]  # one that adapts, one that does not
    assert made(lr=0.125) == [0, 0, 0, 1, 0]
    assert made(lr=1.0, moves=True) == [2, 0, 0, 0, 0]


@pytest.fixture
def use(monkeypatch):
    """Make the caches see a stream, or a capture, on the CPU: ``use(stream)``."""
    now = {}
    monkeypatch.setattr(tables, "_current_stream", lambda device: now["stream"])
    monkeypatch.setattr(tables.capture, "captures", lambda device: now["capturing"])
    return lambda stream, capturing=False: now.update(stream=stream, capturing=capturing)


def test_another_stream_waits_for_the_copy_and_keeps_the_memory(use, monkeypatch):
    first_stream, second_stream, record = Mock(), Mock(), Mock()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: record(stream))
    cached = tables.Cached(tables.program_table)
    found = []
    for stream in (first_stream, first_stream, second_stream):
        use(stream)
        found.append(cached((3, 40_000), CPU))
    assert found[0] is found[1] is found[2]
    first_stream.wait_event.assert_not_called()
    second_stream.wait_event.assert_called_once_with(first_stream.record_event())
    assert record.mock_calls == [call(second_stream)] * 2


def test_a_capture_keeps_what_it_reads_and_caches_nothing_of_its_own(use):
    """A cached table may be evicted while a graph reads it, or be read before the graph ran."""
    cached = tables.Cached(tables.program_table)
    stream, of_capture = Mock(), Mock()
    use(stream)
    before = weakref.ref(cached((3,), CPU).programs)
    use(of_capture, capturing=True)
    assert cached((3,), CPU).programs is before()
    within = cached((5,), CPU)
    of_capture.wait_event.assert_not_called()  # an event from outside cannot be waited for in it
    use(stream)
    assert cached((5,), CPU) is not within
    for elements in range(100, 300):
        cached((elements,), CPU)
    assert before() is not None
    assert len(cached._entries) == 64


def test_tables_have_all_tensors_and_programs_each_element_once():
    columns = ((16, 3), (1 << 40, 32), (), (48, 64))
    table, aligned = tables.address_table(columns, CPU)
    assert table[:, [0, 1, 3]].T.tolist() == [list(columns[i]) for i in (0, 1, 3)]
    assert not aligned
    assert tables.address_table(((16, 32), (1 << 40, 48)), CPU).aligned
    sizes, programs = tables.program_table((3, 0, tables.CHUNK, 2 * tables.CHUNK + 1), CPU)
    assert sizes.tolist() == [[3, 0], [0, 1], [16_384, 1], [32_769, 2]]
    assert programs.tolist() == [[0, 0], [2, 0], [3, 0], [3, 1], [3, 2]]
