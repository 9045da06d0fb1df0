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

from largebatch.comm import Plan, PlanState, Topology, plan_hook
from largebatch.comm.failure import roll
from tests.comm.failure.started import until
from tests.comm.test_refusals import refusal
from tests.ranks import free_ports, run_ranks

pytestmark = pytest.mark.slow("starts ranks")

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
    found = train(ddp)
    plain = DistributedDataParallel(copy.deepcopy(ddp.module))
    torch.testing.assert_close(found, train(plain))


def refusals_of_a_second_model():
    state, wrapper = PlanState(PLAN, TOPOLOGY), fp16_compress_wrapper(plan_hook)
    lines = [refusal(train, m) for m in [wrapped(network(), state, wrapper) for _ in range(2)]]
    state = PlanState(PLAN, TOPOLOGY)
    first = wrapped(network(), state)
    check(first)
    second = wrapped(nn.Linear(8, 8), state)  # made when the first has trained already
    lines.append(refusal(train, second))
    check(first)
    del first, second
    check(wrapped(network(1), state))
    start = "state: one PlanState is registered with two models, "
    end = "; valid: a PlanState(plan) of its own for each"
    assert all(line.startswith(start) and line.endswith(end) for line in lines), lines
    assert {"Linear", "Sequential"} <= {*lines[-1].replace(";", " ").split()}


def one_model_in_many_wrappers():
    state, module, kept = PlanState(PLAN, TOPOLOGY), network(), []
    for turn in range(3):
        ddp = wrapped(module, state, static_graph=turn == 2)
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
        for seed in range(2):
            ddp = wrapped(network(seed), state)
            check(ddp)
            ddp.itself = [ddp]  # garbage that only the collector finds
            del ddp
    finally:
        gc.enable()


def refusal_of_a_model_that_is_frozen():
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ddp = DistributedDataParallel(network(), process_group=own)
    ddp.register_comm_hook(PlanState(PLAN, TOPOLOGY), plan_hook)
    gc.freeze()
    line = refusal(train, ddp)
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    assert line.startswith("process_group: DistributedDataParallel has 1 ranks")


def is_served(port):
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def said_when_rank_0_leaves_first(folder, port):
    """Serve a model in a further process group, whose host then keeps the store for rank 1.

    Returns what a rank prints meanwhile.
    """
    roll._LEAVING_SECONDS = 60.0
    state, module, rank = PlanState(PLAN, TOPOLOGY), network(), dist.get_rank()
    check(wrapped(module, state))
    dist.barrier()
    dist.destroy_process_group()
    world = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **world)
    file = folder / f"said-{rank}"
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    ddp = wrapped(module, state)
    check(ddp)
    assert len([t for t in threading.enumerate() if t.name == "largebatch-beats"]) == 1
    own = dist.distributed_c10d._get_default_store().clone()
    if rank == 1:
        own.wait(["largebatch-test-leaves"])
        time.sleep(0.2)  # not needed for the test to pass
        assert is_served(port)
    else:
        own.set("largebatch-test-leaves", "")
    del own, ddp, state
    dist.destroy_process_group()
    gc.collect()
    if rank == 1:
        until(lambda: not is_served(port))  # what destroys a process group may be under way
    dist.init_process_group("gloo", init_method=f"file://{folder}/end", rank=rank, world_size=2)
    dist.barrier()  # else the first could leave while the second still connects
    return file.read_text()


def held():
    """Number of threads and of files in memory that states of this process hold."""
    gc.collect()  # each time: gloo's threads may still hold the last operation
    threads = [t for t in threading.enumerate() if t.name.startswith("largebatch-all-reduce")]
    files = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
    return len(threads), sum("memfd:largebatch" in file for file in files)


def nothing_is_left_behind():
    until(lambda: held() == (0, 0))
    for turn in range(2):
        ddp = wrapped(network(), PlanState(PLAN, TOPOLOGY))
        train(ddp)
        threads, files = held()
        assert threads == 1, turn
        assert files > 1  # a mapping keeps one of its own
        del ddp
        until(lambda: held() == (0, 0))


def on_a_rank(folder, port):
    refusals_of_a_second_model()
    one_model_in_many_wrappers()
    other_models_after_the_first_has_gone()
    refusal_of_a_model_that_is_frozen()
    nothing_is_left_behind()
    return said_when_rank_0_leaves_first(folder, port)


def test_a_state_serves_its_model_in_each_wrapper_and_process_group_and_no_second_one(tmp_path):
    """Each process group has beats, and a store which its host keeps for the other ranks."""
    assert run_ranks(2, on_a_rank, tmp_path, *free_ports(1)) == ["", ""]
