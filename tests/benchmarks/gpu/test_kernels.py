"""The kernels of a profiler's trace: by kind, and how much of them overlaps."""

import pytest

from benchmarks.gpu import hook, kernels
from benchmarks.gpu.trainer_parts import LARS, METERS, PREFIX


def kernel(name, start, end, correlation=0, stream=7, category="kernel"):
    arguments = {"stream": stream, "correlation": correlation}
    return {"cat": category, "name": name, "ts": start, "dur": end - start, "args": arguments}


def launch(correlation, at, thread=1):
    arguments = {"correlation": correlation}
    return {"cat": "cuda_driver", "name": "launch", "ts": at, "dur": 1, "tid": thread} | {
        "args": arguments
    }


def part(name, start, end, thread=1):
    name = PREFIX + name
    return {"cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "tid": thread}


#: Two steps of 1,000 microseconds; kernels on stream 8 overlap those on stream 7.
TRACE = [
    {"ph": "M", "name": "process_name"},
    part(LARS, 100, 200),
    part(METERS, 300, 400),
    launch(1, 150),
    launch(2, 310),
    launch(3, 350, thread=2),  # another thread: not of the meters
    kernel("sm90_xmma_fprop_implicit_gemm_bf16", 1000.0, 1800.0),
    kernel("cudnn::bn_fw_tr_1C11_kernel_NHWC", 1800.0, 2000.0),
    kernel("nchwToNhwcKernel", 1900.0, 2100.0, stream=8),
    kernel("sums_of_squares", 2200.0, 2210.0, correlation=1),
    kernel("update", 2210.0, 2240.0, correlation=1),
    kernel("at::native::sbtopk::gatherTopK", 2240.0, 2250.0, correlation=2),
    kernel("Memset (Device)", 2900.0, 3000.0, correlation=3, category="gpu_memset"),
]


def test_the_table_of_a_given_trace():
    found = kernels.summary(TRACE, steps=2, longest=1)
    rows = {row["kind"]: (row["launches"], row["ms"], row["percent"]) for row in found["kinds"]}
    assert found["step_ms"] == pytest.approx(1.0)
    assert rows == {
        "convolution": (0.5, pytest.approx(0.4), pytest.approx(40)),
        "batch norm": (0.5, pytest.approx(0.1), pytest.approx(10)),
        "layout": (0.5, pytest.approx(0.1), pytest.approx(10)),
        "memset": (0.5, pytest.approx(0.05), pytest.approx(5)),
        "optimizer": (1.0, pytest.approx(0.02), pytest.approx(2)),
        "loss, top-k": (0.5, pytest.approx(0.005), pytest.approx(0.5)),
        # 2,000 us less 1,100 (overlapping kernels), 50 and 100 in which something runs
        "idle, between kernels": (0.0, pytest.approx(0.375), pytest.approx(37.5)),
    }
    assert found["kinds"][0]["kind"] == "convolution"
    assert found["kinds"][-1]["kind"] == "idle, between kernels"
    assert [row["kernel"] for row in found["longest"]] == [
        "convolution: sm90_xmma_fprop_implicit_gemm_bf16"
    ]


def test_overlap_is_read_from_a_trace():
    slow = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    events = [
        kernel("gemm", 0.0, 10.0),
        kernel(slow, 5.0, 25.0, stream=20),
        kernel("gemm", 12.0, 18.0),
        kernel("gemm", 14.0, 20.0, stream=8),  # overlaps another kernel: counted once
        kernel("copy", 25.0, 30.0, stream=20),
        kernel(slow, 40.0, 50.0, stream=20),
        {"cat": "cpu_op", "name": "spin_kernel", "ts": 0.0, "dur": 99.0},
        {"ph": "M", "name": "process_name"},
    ]
    found = kernels.kernels_of(events)
    assert len(found) == 6
    assert hook.covered_microseconds(found) == (30.0, 5.0 + 8.0)
    assert hook.covered_microseconds(kernels.kernels_of([{"ph": "M"}])) == (0, 0.0)
