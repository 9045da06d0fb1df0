"""Small traces whose figures follow by hand. Times are in microseconds."""

from largebatch.recipes.training.phases import ALL_REDUCE_WAIT, BACKWARD, FORWARD, OPTIMIZER
from largebatch.recipes.training.profiling.trace import SPAN, STEP

HOST, THREAD, LANE, GPU = 4711, 4711, 9, 0


def event(name, start, end, cat="cpu_op", pid=HOST, tid=THREAD):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid} | {
        "ts": float(start),
        "dur": float(end - start),
    }


def phase(name, start, end):
    return event(name, start, end, "user_annotation")


def span(name, start, end):
    return event(name, start, end, SPAN, tid=LANE)


def on_gpu(name, start, end, stream=7, cat="kernel"):
    return event(name, start, end, cat, GPU, stream)


BUCKETS = ("all-reduce bucket 0, 1.0 MiB, ring", "all-reduce bucket 1, 2.0 MiB, leader")

#: A step of 100 us on a CPU. The all-reduce is under way from 50 to 78, of which the first 10 are
#: hidden; the thread waits for its input from 0 to 10 and for the all-reduce from 60 to 80.
CPU_STEP = [
    phase(f"{STEP}3", 0, 100),
    phase("input wait", 0, 10),
    phase(FORWARD, 10, 40),
    event("aten::conv2d", 12, 32),
    event("aten::mkldnn_convolution", 15, 30),
    phase(BACKWARD, 40, 80),
    event("aten::convolution_backward", 42, 57),
    event("AccumulateGrad", 57, 61),  # from which the wait begins
    span(ALL_REDUCE_WAIT, 60, 81),  # noted when backward had returned
    phase(OPTIMIZER, 80, 95),
    span(BUCKETS[0], 50, 70),
    span(BUCKETS[1], 65, 78),
    span(f"{BUCKETS[1]}, chunk 1 of 1, phase 1", 65, 70),
    phase("gloo:all_reduce", 45, 78),  # torch's own, which belongs to no thread
]

#: A step of 100 us on a GPU: communication from 60 to 95, of which 20 are hidden; nothing runs
#: before 20, from 95 to 97, and at the end.
GPU_STEP = [
    phase(f"{STEP}3", 0, 100),
    phase(FORWARD, 1, 5),
    on_gpu(FORWARD, 20, 50, cat="gpu_user_annotation"),
    on_gpu(BACKWARD, 50, 80, cat="gpu_user_annotation"),
    on_gpu(OPTIMIZER, 97, 99, cat="gpu_user_annotation"),
    on_gpu("conv", 20, 50),
    on_gpu("conv_backward", 50, 80),
    on_gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 60, 95, stream=20),
    on_gpu("lars", 97, 99),
]
