"""The kernels of a profiler's trace, by kind."""

import pytest

from benchmarks.gpu import kernels


def kernel(name, start, end, stream=7, category="kernel"):
    arguments = {"stream": stream}
    return {"cat": category, "name": name, "ts": start, "dur": end - start, "args": arguments}


#: Two steps; kernels on stream 8 overlap those on stream 7.
TRACE = [
    {"ph": "M", "name": "process_name"},
    {"cat": "cpu_op", "name": "aten::conv", "ts": 0.0, "dur": 5000.0},
    kernel("sm90_xmma_fprop_implicit_gemm_bf16", 1000.0, 1800.0),
    kernel("cudnn::bn_fw_tr_1C11_kernel_NHWC", 1800.0, 2000.0),
    kernel("nchwToNhwcKernel", 1900.0, 2100.0, stream=8),
    kernel("sums_of_squares", 2200.0, 2210.0),
    kernel("update", 2210.0, 2240.0),
    kernel("at::native::sbtopk::gatherTopK", 2240.0, 2250.0),
    kernel("Memset (Device)", 2900.0, 2950.0, category="gpu_memset"),
]


def test_the_table_of_a_given_trace():
    found = kernels.summary(TRACE, steps=2, longest=1)
    # 1,100 us in which kernels overlap, 50 and 50
    assert found["busy_ms"] == pytest.approx(0.6)
    rows = {row["kind"]: (row["launches"], row["ms"], row["percent"]) for row in found["kinds"]}
    assert rows == {
        "convolution": (0.5, pytest.approx(0.4), pytest.approx(100 / 1.5)),
        "batch norm": (0.5, pytest.approx(0.1), pytest.approx(100 / 6)),
        "layout": (0.5, pytest.approx(0.1), pytest.approx(100 / 6)),
        "memset": (0.5, pytest.approx(0.025), pytest.approx(100 / 24)),
        "optimizer": (1.0, pytest.approx(0.02), pytest.approx(100 / 30)),
        "loss, top-k": (0.5, pytest.approx(0.005), pytest.approx(100 / 120)),
    }
    assert found["kinds"][0]["kind"] == "convolution"
    assert [row["kernel"] for row in found["longest"]] == [
        "convolution: sm90_xmma_fprop_implicit_gemm_bf16"
    ]
    assert kernels.summary(TRACE[:2], steps=1) == {"busy_ms": 0.0, "kinds": [], "longest": []}
