"""A state serves one model, however often that is wrapped, and no second one."""

import copy
import gc
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import Plan, PlanState, Topology, plan_hook, register
from largebatch.comm.failure import roll
from tests.comm.test_refusals import refusal, uneven
from tests.ranks import free_ports, run_ranks

PLAN = Plan.single("hierarchical", fusion_threshold_bytes=200)
TOPOLOGY = Topology.of(2, 2)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def wrapped(module, state, hook=plan_hook, **options):
    ddp = DistributedDataParallel(module, **PLAN.ddp_options(), **options)
    ddp.register_comm_hook(state, hook)
    return ddp


def train(ddp, steps=3):
    """Take steps, in which DDP rebuilds its buckets; return the last gradients."""
    images = torch.full((2, 8), 1.0 + dist.get_rank())
    for _ in range(steps):
        ddp.zero_grad()
        ddp(images).square().sum().backward()
    return [p.grad.clone() for p in ddp.parameters() if p.requires_grad]


def check(ddp):
    """Check that the gradients are those of DDP without a hook."""
    found = train(ddp)
    plain = DistributedDataParallel(copy.deepcopy(ddp.module))
    torch.testing.assert_close(found, train(plain))


def refusals_of_a_second_model():
    lines = []
    for hook in (plan_hook, fp16_compress_wrapper(plan_hook)):
        state = PlanState(PLAN, TOPOLOGY)
        both = [wrapped(network(), state, hook) for _ in range(2)]
        lines += [refusal(train, model) for model in both]
    state = PlanState(PLAN, TOPOLOGY)
    first = wrapped(network(), state)
    check(first)
    second = wrapped(nn.Linear(8, 8), state)  # made when the first has trained already
    lines.append(refusal(train, second))
    check(first)
    del first, second
    check(wrapped(network(1), state))
    return lines


@pytest.mark.slow("starts ranks")
def test_a_state_that_is_given_to_two_models_is_refused():
    expected = "state: one PlanState is registered with two models, "
    for lines in run_ranks(2, refusals_of_a_second_model):
        assert len(lines) == 5
        for line in lines:
            assert line.startswith(expected)
            assert line.endswith("; valid: a PlanState(plan) of its own for each")
        names = lines[-1].removeprefix(expected).partition(";")[0]
        assert sorted(names.split(" and ")) == ["Linear", "Sequential"]


def one_model_in_many_wrappers():
    state, module, kept = PlanState(PLAN, TOPOLOGY), network(), []
    for turn in range(4):
        ddp = wrapped(module, state, static_graph=turn == 3)
        check(ddp)
        module.load_state_dict({key: value / 2 for key, value in module.state_dict().items()})
        if turn % 2:
            kept.append(ddp)  # while the next one is used
    module[0].requires_grad_(False)  # the next wrapper has fewer parameters
    check(wrapped(module, state))
    module[0].requires_grad_(True)
    check(wrapped(module, state))
    check(kept[0])
    averaged = copy.deepcopy(kept[0])  # as torch's AveragedModel does
    check(kept[0])
    del averaged


def other_models_after_the_first_has_gone():
    state = PlanState(PLAN, TOPOLOGY)
    gc.disable()
    try:
        for seed in range(3):
            ddp = wrapped(network(seed), state)
            check(ddp)
            ddp.itself = [ddp]  # garbage that only the collector finds
            del ddp
    finally:
        gc.enable()


def refusal_in_join_of_a_second_wrapper():
    state, module = PlanState(PLAN, TOPOLOGY), nn.Linear(8, 8)
    ddp = wrapped(module, state)
    train(ddp)
    ddp = wrapped(module, state)
    train(ddp)
    return refusal(lambda: uneven(ddp, divide_by_initial_world_size=False))


def everything_with_one_model():
    one_model_in_many_wrappers()
    other_models_after_the_first_has_gone()
    return refusal_in_join_of_a_second_wrapper()


@pytest.mark.slow("starts ranks")
def test_a_state_serves_its_model_in_each_wrapper_and_the_next_when_that_has_gone():
    for line in run_ranks(2, everything_with_one_model):
        assert line.startswith("divide_by_initial_world_size: False in join, but a plan")


def refusal_of_a_model_that_is_frozen():
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ddp = DistributedDataParallel(network(), process_group=own)
    ddp.register_comm_hook(PlanState(PLAN, TOPOLOGY), plan_hook)
    gc.freeze()
    line = refusal(train, ddp)
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    return line


@pytest.mark.slow("starts ranks")
def test_a_model_that_the_garbage_collector_does_not_show_is_checked():
    for line in run_ranks(2, refusal_of_a_model_that_is_frozen):
        assert line.startswith("process_group: DistributedDataParallel has 1 ranks")


def in_a_second_process_group(folder):
    state, module = PlanState(PLAN), network()
    rank = dist.get_rank()
    check(wrapped(module, state))
    for turn in range(2):
        dist.destroy_process_group()
        dist.init_process_group(
            *("gloo", f"file://{folder}/store-{turn}"),
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        check(wrapped(module, state))
    state.connect()


@pytest.mark.slow("starts ranks")
def test_a_state_connects_again_when_the_process_group_is_made_anew(tmp_path):
    run_ranks(2, in_a_second_process_group, tmp_path)


def is_served(port):
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def is_served_in_the_end(port):
    """Whether a server stays at a port: what destroys a process group may still be under way."""
    end = time.monotonic() + 30
    while is_served(port) and time.monotonic() < end:
        time.sleep(0.01)
    return is_served(port)


def start(port):
    address = f"tcp://127.0.0.1:{port}"
    world = {"rank": dist.get_rank(), "world_size": 2}
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=address, timeout=timedelta(seconds=60), **world)


def with_process_groups_at_ports(ports):
    """The second port has a process group in between, so that no rank finds that of the last."""
    state, module = PlanState(PLAN), network()
    gc.disable()
    try:
        for turn, port in enumerate(ports):
            start(port)
            check(wrapped(module, state))
            threads = [t for t in threading.enumerate() if t.name == "largebatch-beats"]
            assert len(threads) == 1
            if turn and dist.get_rank() == 0:
                assert not is_served_in_the_end(ports[turn - 1])
    finally:
        gc.enable()


@pytest.mark.slow("starts ranks")
def test_each_process_group_has_one_thread_of_beats_and_no_store_of_an_earlier():
    first, second = free_ports(2)
    run_ranks(2, with_process_groups_at_ports, [first, second, first])


def said_when_rank_0_leaves_first(folder, ports):
    """What rank 1 prints when rank 0, which hosts the store, is done with its model before it."""
    roll._LEAVING_SECONDS = 60.0
    start(ports[0])
    rank = dist.get_rank()
    file = folder / f"said-{rank}"
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    ddp = DistributedDataParallel(network(), **PLAN.ddp_options())
    register(ddp, PLAN, TOPOLOGY)
    train(ddp)
    own = dist.distributed_c10d._get_default_store().clone()
    if rank == 1:
        own.wait(["largebatch-test-leaves"])
        time.sleep(0.2)  # not needed for the test to pass
        assert is_served(ports[0])
    else:
        own.set("largebatch-test-leaves", "")
    del own
    dist.destroy_process_group()
    del ddp
    gc.collect()
    if rank == 1:
        assert not is_served_in_the_end(ports[0])
    dist.init_process_group("gloo", init_method=f"file://{folder}/end", rank=rank, world_size=2)
    dist.barrier()  # else the first could leave while the second still connects
    return file.read_text()


@pytest.mark.slow("starts ranks")
def test_the_rank_that_hosts_the_store_keeps_it_until_the_others_have_left(tmp_path):
    assert run_ranks(2, said_when_rank_0_leaves_first, tmp_path, free_ports(1)) == ["", ""]


def held():
    """Number of threads and of files in memory that states of this process hold."""
    threads = [t for t in threading.enumerate() if t.name.startswith("largebatch-all-reduce")]
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return len(threads), sum("memfd:largebatch" in link for link in links)


def left_behind():
    for turn in range(3):
        ddp = DistributedDataParallel(network(), **PLAN.ddp_options())
        register(ddp, PLAN, TOPOLOGY)
        train(ddp)
        threads, files = held()
        assert threads == 1, turn
        assert files > 1  # a mapping keeps one of its own
        del ddp
        end = time.monotonic() + 30
        while held() != (0, 0) and time.monotonic() < end:
            gc.collect()  # more than once: gloo's threads may still hold the last operation
            time.sleep(0.01)
        assert held() == (0, 0), held()


@pytest.mark.slow("starts ranks")
def test_a_state_leaves_no_thread_and_no_memory_behind():
    run_ranks(2, left_behind)
