"""The DDP hook produces the gradients of plain DDP and does not block backward."""

import inspect
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import (
    ALGORITHMS,
    Hierarchical,
    Plan,
    Rule,
    Topology,
    TopologyError,
    plan_hook,
    register,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("trains on up to four ranks")


def network():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(7)]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def ddp(model, plan, **options):
    return DistributedDataParallel(
        model, **plan.ddp_options(), gradient_as_bucket_view=True, **options
    )


def gradients(model, micro_batches=2):
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for i in range(micro_batches):
        x = torch.randn(8, 256, generator=generator)
        if i < micro_batches - 1:
            with model.no_sync():
                model(x).square().mean().backward()
        else:
            model(x).square().mean().backward()
    return torch.cat([p.grad.flatten().clone() for p in model.parameters()])


def compare(plans, ranks_per_node):
    return {name: difference(plan, ranks_per_node) for name, plan in plans.items()}


def difference(plan, ranks_per_node):
    """The largest difference of the gradients from those of plain DDP, over several iterations."""
    topology = Topology.from_environment(ranks_per_node)
    plain, hooked = ddp(network(), plan), ddp(network(), plan)
    register(hooked, plan, topology)
    differences = []
    for _ in range(6):  # buckets are rebuilt after the first
        expected, ours = gradients(plain), gradients(hooked)
        differences.append(((ours - expected).abs().max() / expected.abs().max()).item())
        plain.zero_grad()
        hooked.zero_grad()
    return max(differences)


# The model has 1.8 MB.
SMALL = 300_000

PLANS = {
    "ring": (Plan.single("ring", fusion_threshold_bytes=SMALL), 0.0),
    "hierarchical": (Plan.single("hierarchical", fusion_threshold_bytes=SMALL), 1e-6),
    "mixed": (Plan((Rule("ring", 500_000), Rule("hierarchical")), SMALL), 1e-6),
    "leader in chunks": (Plan((Rule("leader", chunk_bytes=100_000),), SMALL), 1e-6),
    "torus": (Plan((Rule("torus", shape=(1, 2), chunk_bytes=100_000),), SMALL), 1e-6),
    "point to point": (
        Plan((Rule("halving-doubling", 500_000), Rule("parameter-server")), SMALL),
        1e-6,
    ),
    "fp16": (Plan.single("ring", wire_dtype="fp16", fusion_threshold_bytes=SMALL), 2e-3),
    "bf16": (Plan.single("hierarchical", wire_dtype="bf16", fusion_threshold_bytes=SMALL), 2e-2),
}


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 1), (4, 2)])
def test_gradients_equal_those_of_plain_ddp(world_size, ranks_per_node):
    plans = {name: plan for name, (plan, _) in PLANS.items()}
    if world_size == 4:
        plans["torus"] = Plan((Rule("torus", shape=(4, 1), chunk_bytes=100_000),), SMALL)
    for differences in run_ranks(world_size, compare, plans, ranks_per_node):
        for name, (_, tolerance) in PLANS.items():
            assert differences[name] <= tolerance, name
            if name in ("fp16", "bf16"):
                assert differences[name] > 0, "nothing was sent in half precision"


def half_gradients(dtype):
    """Gradients of a model in half precision whose sum would overflow FP16."""
    topology = Topology.from_environment(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seen = {}
    for name in ALGORITHMS:
        model = nn.Linear(100, 3, bias=False).to(dtype)
        hooked = ddp(model, Plan.single(name))
        register(hooked, Plan.single(name), topology)
        (hooked(torch.full((1, 100), 40000.0 + 64 * rank, dtype=dtype))).sum().backward()
        assert model.weight.grad.dtype == dtype
        seen[name] = model.weight.grad.double()
    mean = (
        sum(torch.tensor(40000.0 + 64 * other, dtype=dtype).double() for other in range(world_size))
        / world_size
    )
    return {name: ((g - mean).abs().max() / mean).item() for name, g in seen.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_is_averaged_without_overflow(dtype):
    for errors in run_ranks(3, half_gradients, dtype):
        for name, error in errors.items():
            assert error <= 3 * torch.finfo(dtype).eps, name


def events_with_slow_wire():
    """The order of events when the all-reduce waits until backward is over."""
    events = []
    slow = threading.Event()

    class Slow(Hierarchical):
        def all_reduce(self, tensor, topology):
            slow.wait(20)
            events.append("reduced")
            dist.all_reduce(tensor)

    ALGORITHMS["hierarchical"] = Slow()
    plan = Plan.single("hierarchical", fusion_threshold_bytes=SMALL)
    model = ddp(network(), plan)
    register(model, plan, Topology.from_environment(1))
    slow.set()
    model(torch.ones(8, 256)).sum().backward()  # a single bucket; then DDP rebuilds the buckets
    slow.clear()
    events.clear()
    first = next(model.parameters())
    first.register_hook(lambda gradient: (events.append("backward over"), slow.set())[0])
    model(torch.ones(8, 256)).sum().backward()
    return events


def test_backward_continues_while_buckets_are_reduced():
    for events in run_ranks(2, events_with_slow_wire):
        assert events[0] == "backward over"
        assert events.count("reduced") >= 2


def message_of_failure():
    calls = []

    class Broken(Hierarchical):
        def all_reduce(self, tensor, topology):
            calls.append(tensor.numel())
            raise ValueError("the cable is out")

    ALGORITHMS["hierarchical"] = Broken()
    plan = Plan.single("hierarchical")
    model = ddp(network(), plan)
    register(model, plan, Topology.from_environment(1))
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(8, 256)).sum().backward()
    assert time.monotonic() - start < 30
    with pytest.raises(RuntimeError, match="the cable is out"):  # without another attempt
        model(torch.ones(8, 256)).sum().backward()
    assert len(calls) == 1
    return str(error.value)


def test_a_failure_names_the_rank_and_the_bucket():
    for rank, message in enumerate(run_ranks(2, message_of_failure)):
        assert f"rank {rank}: hierarchical all-reduce of bucket 0" in message
        assert "the cable is out" in message


def message_of_a_failure_without_a_report():
    class Broken(Hierarchical):
        def all_reduce(self, tensor, topology):
            raise ValueError("the cable is out")

    ALGORITHMS["hierarchical"] = Broken()
    model = ddp(network(), Plan.single("hierarchical"))
    register(model, Plan.single("hierarchical"), Topology.from_environment(1))
    report = mock.patch(
        "largebatch.comm.failure.roll_call.describe_missing_ranks", side_effect=KeyError("no report")
    )
    with report, pytest.raises((RuntimeError, KeyError)) as error:
        model(torch.ones(8, 256)).sum().backward()
    return str(error.value)


def test_backward_does_not_wait_for_ever_if_a_failure_cannot_be_described():
    for message in run_ranks(2, message_of_a_failure_without_a_report):
        assert "no report" in message


def refusal():
    topology = Topology(((0, 1), (2,)), dist.get_rank())
    half = Plan.single("ring", wire_dtype="fp16")
    register(ddp(network(), Plan.single()), Plan.single("ring"), topology)
    hooked = ddp(network(), half)
    register(hooked, half, topology)
    plain = gradients(ddp(network(), half))
    torch.testing.assert_close(gradients(hooked), plain, rtol=0, atol=2e-3 * plain.abs().max())
    with pytest.raises(TopologyError, match="nodes have 2, 1 ranks"):
        register(ddp(network(), Plan.single()), Plan.single("hierarchical"), topology)


def test_unequal_nodes_are_refused_only_by_algorithms_that_need_equal_ones():
    run_ranks(3, refusal)


BACK_ENDS = ["ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy", ""]  # "": gloo


def hooks_by_back_end():
    """The number of hooks that are registered for each plan and back end."""
    topology = Topology.from_environment(1)
    counts = {}
    for plan in Plan((Rule("ring", 1000), Rule("ring"))), Plan.single(wire_dtype="bf16"):
        for back_end in BACK_ENDS:
            model = ddp(network(), plan)
            with mock.patch("largebatch.comm.hook.nccl_class", return_value=back_end):
                register(model, plan, topology)
            counts[plan.is_plain, back_end] = len(model._comm_hooks)
            if plan.is_plain:
                assert torch.equal(gradients(model), gradients(ddp(network(), Plan.single())))
    return counts


def test_a_plain_plan_leaves_ddp_as_it_is_where_that_overlaps():
    for counts in run_ranks(2, hooks_by_back_end):
        assert [case for case, count in counts.items() if not count] == [(True, BACK_ENDS[0])]


def test_the_hook_has_the_signature_that_ddp_requires():
    signature = inspect.signature(plan_hook)
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
