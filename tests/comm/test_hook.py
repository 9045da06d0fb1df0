"""The DDP hook lets backward go on, names what fails, and is left out where DDP does as well."""

import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from largebatch.comm import ALGORITHMS, Hierarchical, Plan, Rule, Topology, register
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("trains on two ranks")


def network():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def ddp(model, plan, **options):
    return DistributedDataParallel(
        model, **plan.ddp_options(), gradient_as_bucket_view=True, **options
    )


def gradients(model):
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(8, 64, generator=generator)).square().mean().backward()
    return torch.cat([p.grad.flatten().clone() for p in model.parameters()])


def backward_continues_while_buckets_are_reduced():
    events = []
    slow = threading.Event()

    class Slow(Hierarchical):
        def all_reduce(self, tensor, topology):
            slow.wait(20)
            events.append("reduced")
            dist.all_reduce(tensor)

    plan = Plan.single("hierarchical", fusion_threshold_bytes=20_000)
    model = ddp(network(), plan)
    register(model, plan, Topology.from_environment(1))
    slow.set()
    with mock.patch.dict(ALGORITHMS, hierarchical=Slow()):
        model(torch.ones(8, 64)).sum().backward()  # a single bucket; then DDP rebuilds the buckets
        slow.clear()
        events.clear()
        first = next(model.parameters())
        first.register_hook(lambda gradient: (events.append("backward over"), slow.set())[0])
        model(torch.ones(8, 64)).sum().backward()
    assert events[0] == "backward over"
    assert events.count("reduced") >= 2


def a_failure_names_the_rank_and_the_bucket_and_is_not_tried_again():
    calls = []

    class Broken(Hierarchical):
        def all_reduce(self, tensor, topology):
            calls.append(tensor.numel())
            raise ValueError("the cable is out")

    plan, said = Plan.single("hierarchical"), []
    report = "largebatch.comm.failure.roll_call.describe_missing_ranks"
    with mock.patch.dict(ALGORITHMS, hierarchical=Broken()):
        for undescribed in (False, True):
            model = ddp(network(), plan)
            register(model, plan, Topology.from_environment(1))
            error = mock.patch(report, side_effect=KeyError("no report"))
            for _ in range(1 if undescribed else 2):
                with error if undescribed else nullcontext(), pytest.raises(Exception) as raised:  # noqa: PT011
                    model(torch.ones(8, 64)).sum().backward()
                said.append(str(raised.value))
    for message in said[:2]:
        assert f"rank {dist.get_rank()}: hierarchical all-reduce of bucket 0" in message
        assert "the cable is out" in message
    assert "no report" in said[2]  # backward does not wait for ever
    assert len(calls) == 2


BACK_ENDS = ["ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy", ""]  # "": gloo


def a_plain_plan_leaves_ddp_as_it_is_where_that_overlaps_and_divides_well():
    """By itself DDP would divide FP16 gradients by all ranks before their sum."""
    topology, plain = Topology.from_environment(1), Plan((Rule("ring", 1000), Rule("ring")))
    plans = Plan.single(wire_dtype="bf16"), plain
    cases = [(plan, torch.float32, back_end) for plan in plans for back_end in BACK_ENDS]
    cases += [(plain, dtype, BACK_ENDS[0]) for dtype in (torch.float16, torch.bfloat16)]
    left = []
    for plan, dtype, back_end in cases:
        model = ddp(network().to(dtype), plan)
        with mock.patch("largebatch.comm.hook.nccl_class", return_value=back_end):
            register(model, plan, topology)
        if not model._comm_hooks:
            left.append((plan.is_plain, dtype, back_end))
        if plan.is_plain and dtype == torch.float32:
            assert torch.equal(gradients(model), gradients(ddp(network(), Plan.single())))
    assert left == [(True, torch.float32, BACK_ENDS[0]), (True, torch.bfloat16, BACK_ENDS[0])]


def all_reduces_are_named_for_profilers():
    """By the thread of the hook, and where a plan is the back end's own all-reduce."""
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    for name in ("hierarchical", "ring"):
        model = ddp(network(), Plan.single(name, fusion_threshold_bytes=20_000))
        register(model, Plan.single(name), Topology.from_environment(1))
        gradients(model)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiler:
            gradients(model)
        found = {event.key for event in profiler.key_averages()}
        assert f"all-reduce bucket 0, 35.0 KiB, {name}" in found, found
        assert "gloo:all_reduce" in found


def on_two_ranks():
    backward_continues_while_buckets_are_reduced()
    a_failure_names_the_rank_and_the_bucket_and_is_not_tried_again()
    a_plain_plan_leaves_ddp_as_it_is_where_that_overlaps_and_divides_well()
    all_reduces_are_named_for_profilers()


def test_hook_overlaps_names_failures_and_is_left_out_where_ddp_does_as_well():
    run_ranks(2, on_two_ranks)
