"""The figures of small traces are those that follow by hand."""

from pathlib import Path

import pytest

from largebatch.recipes.training.phases import (
    ALL_REDUCE_WAIT,
    BACKWARD,
    FORWARD,
    HOST_TO_DEVICE,
    INPUT_WAIT,
    OPTIMIZER,
)
from largebatch.recipes.training.profiling.figures import BETWEEN, IDLE, figures_of
from largebatch.recipes.training.profiling.summary import in_lines, page
from largebatch.recipes.training.profiling.trace import STEP
from tests.recipes.training.profiling.hand_made import (
    BUCKETS,
    CPU_STEP,
    GPU_STEP,
    event,
    on_gpu,
    phase,
)


def of(events, rank=0):
    return figures_of({"traceEvents": events}, rank)


def microseconds(seconds):
    return {name: pytest.approx(value / 1e6) for name, value in seconds.items()}


def test_a_step_on_a_cpu():
    found = of(CPU_STEP)
    assert (found.on_gpu, found.steps, found.shown) == (False, (3,), 3)
    assert found.seconds == pytest.approx(100e-6)
    assert found.phases == microseconds(
        {
            INPUT_WAIT: 10,
            FORWARD: 30,
            BACKWARD: 20,
            ALL_REDUCE_WAIT: 20,
            OPTIMIZER: 15,
            BETWEEN: 5,
        }
    )
    assert found.communication == pytest.approx(28e-6)
    assert found.hidden == pytest.approx(10e-6)
    assert found.idle == pytest.approx(30e-6)


def test_the_costs_of_a_thread_are_own_times_and_add_up_to_its_steps():
    costs = of(CPU_STEP).costs
    found = {(cost.name, cost.phase): round(1e6 * cost.seconds, 6) for cost in costs}
    assert found == {
        ("aten::mkldnn_convolution", FORWARD): 15,
        ("aten::conv2d", FORWARD): 5,
        (FORWARD, FORWARD): 10,
        ("aten::convolution_backward", BACKWARD): 15,
        ("AccumulateGrad", BACKWARD): 3,  # until the wait begins
        (BACKWARD, BACKWARD): 2,
        (ALL_REDUCE_WAIT, ALL_REDUCE_WAIT): 20,
        (OPTIMIZER, OPTIMIZER): 15,
        (INPUT_WAIT, INPUT_WAIT): 10,
        (BETWEEN, BETWEEN): 5,
    }
    assert [cost.seconds for cost in costs] == sorted((c.seconds for c in costs), reverse=True)
    assert sum(cost.seconds for cost in costs) == pytest.approx(100e-6)
    again = of([*CPU_STEP, event("whole.py(3): train", -5, 150, "python_function")]).costs
    assert again == costs  # a stack is no cost


def test_a_step_on_a_gpu():
    found = of(GPU_STEP)
    assert found.on_gpu
    assert found.phases == microseconds(
        {FORWARD: 30, BACKWARD: 30, OPTIMIZER: 2, ALL_REDUCE_WAIT: 15}
    )
    assert found.communication == pytest.approx(35e-6)
    assert found.hidden == pytest.approx(20e-6)
    assert found.idle == pytest.approx(23e-6)
    costs = {cost.name: cost.seconds for cost in found.costs}
    assert costs == microseconds(
        {
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL": 35,
            "conv": 30,
            "conv_backward": 30,
            IDLE: 23,
            "lars": 2,
        }
    )


def lagging(known):
    """Two steps that the host launches in 1 us each, and the GPU computes in 100 us each.

    Between them the host evaluates, from 300 to 600. ``known``: what tells which step a kernel
    belongs to.
    """
    found = []
    for step, host, gpu in ((3, 0, 10), (4, 1, 110), (5, 600, 605)):
        found += [phase(f"{STEP}{step}", host, host + 1)]
        for number, (name, kernel, start, end) in enumerate(
            [
                (FORWARD, "conv", 0, 40),
                (BACKWARD, "conv_backward", 40, 90),
                (OPTIMIZER, "lars", 90, 100),
            ]
        ):
            args = {"args": {"correlation": 10 * step + number}} if known == "launch" else {}
            launch = (
                event("cudaLaunchKernel", host + 0.2, host + 0.3, "cuda_runtime", tid=12) | args
            )
            times = gpu + start, gpu + end
            found += [
                on_gpu(name, *times, cat="gpu_user_annotation"),
                on_gpu(kernel, *times) | args,
            ]
            found += [launch]
        if known == "range":
            found.append(on_gpu(f"{STEP}{step}", gpu, gpu + 100, cat="gpu_user_annotation"))
    evaluation = {"args": {"correlation": 7}} if known == "launch" else {}
    found += [event("cudaLaunchKernel", 301, 302, "cuda_runtime") | evaluation]
    return [*found, on_gpu("conv", 310, 590) | evaluation]


@pytest.mark.parametrize("known", ["launch", "range"])
def test_a_gpu_that_lags_behind_the_host_is_measured_to_its_end(known):
    found = of(lagging(known))
    assert found.steps == (3, 4, 5)
    assert found.seconds == pytest.approx((210 + 105) / 1e6)
    assert found.phases == microseconds({FORWARD: 120, BACKWARD: 150, OPTIMIZER: 30})
    assert found.idle == pytest.approx(15e-6)
    assert (found.start, found.end) == pytest.approx((110e-6, 210e-6))  # the second step


def test_a_lagging_gpu_is_measured_where_nothing_tells_the_steps_of_its_kernels():
    events = [e for e in lagging("none") if e["ts"] < 300]
    found = of(events)
    assert found.seconds == pytest.approx(210e-6)
    assert found.phases == microseconds({FORWARD: 80, BACKWARD: 100, OPTIMIZER: 20})


def test_copies_and_the_kernels_of_the_all_reduce_are_no_computation():
    ranges = {"cat": "gpu_user_annotation"}
    found = of(
        [
            phase(f"{STEP}3", 0, 100),
            phase(INPUT_WAIT, 0, 20),  # of which the GPU is idle for 5
            on_gpu(FORWARD, 5, 40, **ranges),
            on_gpu("conv", 5, 40),
            on_gpu(BUCKETS[1], 30, 80, stream=20, **ranges),
            on_gpu("cast", 30, 45, stream=20),
            on_gpu("ncclDevKernel_AllReduce_Sum", 45, 80, stream=21),
            on_gpu("ncclDevKernel_Broadcast_RING_LL", 85, 90, stream=21),
            on_gpu(HOST_TO_DEVICE, 35, 60, stream=9, **ranges),
            on_gpu("Memcpy HtoD", 35, 60, stream=9, cat="gpu_memcpy"),
        ]
    )
    assert found.phases == microseconds(
        {INPUT_WAIT: 5, FORWARD: 35, HOST_TO_DEVICE: 25, ALL_REDUCE_WAIT: 40}
    )
    assert found.communication == pytest.approx(55e-6)
    assert found.hidden == pytest.approx(10e-6)
    assert found.idle == pytest.approx(20e-6)
    lanes = {bar.name: bar.lane for bar in found.bars}
    assert lanes[HOST_TO_DEVICE] == "copies"
    assert lanes[INPUT_WAIT] == "input"


def test_a_gpu_without_kernels_is_not_called_a_cpu():
    found = figures_of({"traceEvents": CPU_STEP}, 0, "cuda")
    assert found.lacks_kernels
    text = page("x", [found], 1)
    assert "on a GPU" in text
    assert "recorded no kernels" in text
    assert "images stay on the host" not in text
    assert "no kernels of the GPU were recorded" in "".join(in_lines(found, Path("p")))
    assert not figures_of({"traceEvents": GPU_STEP}, 0, "cuda").lacks_kernels
    assert "on a CPU" in page("x", [of(CPU_STEP)], 1)


def test_the_picture_is_that_of_the_middle_step():
    later = [{**e, "ts": e["ts"] + 100} for e in CPU_STEP]
    later[0] = {**later[0], "name": "ProfilerStep#4"}
    found = of([*CPU_STEP, *later])
    assert (found.steps, found.shown) == ((3, 4), 4)
    assert (found.start, found.end) == pytest.approx((100e-6, 200e-6))
    bars = {(bar.lane, bar.name): (bar.start, bar.end) for bar in found.bars}
    assert bars == {
        ("input", INPUT_WAIT): pytest.approx((100e-6, 110e-6)),
        ("compute", FORWARD): pytest.approx((110e-6, 140e-6)),
        ("compute", BACKWARD): pytest.approx((140e-6, 160e-6)),
        ("compute", ALL_REDUCE_WAIT): pytest.approx((160e-6, 180e-6)),
        ("compute", OPTIMIZER): pytest.approx((180e-6, 195e-6)),
        ("communication", BUCKETS[0]): pytest.approx((150e-6, 170e-6)),
        ("communication", BUCKETS[1]): pytest.approx((165e-6, 178e-6)),
    }
    assert found.idle == pytest.approx(60e-6)


def test_ranges_of_torch_stand_in_for_spans():
    """Of a plan of the back end's own all-reduce, where nothing else was recorded."""
    found = of([e for e in CPU_STEP if not e["name"].startswith("all-reduce b")])
    assert found.communication == pytest.approx(33e-6)
    assert found.hidden == pytest.approx(15e-6)


def test_a_trace_without_a_step_is_refused():
    with pytest.raises(ValueError, match="holds no step"):
        of([phase(FORWARD, 0, 1)])
