"""NCCL is known under each name, and plans that need a launch order are refused without it."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from largebatch.comm import (
    Plan,
    PlanError,
    PlanState,
    Rule,
    Topology,
    launch_order,
    order_launches,
    plan_hook,
    register,
)
from largebatch.comm.launch_order import VARIABLE, launches_are_ordered
from largebatch.comm.tuning import tune as tuning

TWO_BY_TWO, ONE_NODE = Topology.of(4, 2), Topology.of(4, 4)
CHUNKS, WHOLE = Plan((Rule("hierarchical", chunk_bytes=64),)), Plan.single("hierarchical")


@pytest.fixture
def nccl(monkeypatch):
    def pretend(version=(2, 27, 3), variable=None, back_end="ProcessGroupNCCL2"):
        monkeypatch.setattr(launch_order, "nccl_class", lambda: back_end)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
        if variable is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, variable)

    return pretend


def model(*layers, **options):
    """What the check reads of a DDP model."""
    read = {"device_type": "cuda", "find_unused_parameters": False, "static_graph": False}
    module = nn.Sequential(nn.Linear(2, 2), *layers)
    return SimpleNamespace(**read | options, module=module)


class OwnNorm(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.process_group = group


PLAIN, SYNC = model(), model(nn.SyncBatchNorm(2))
SHARED, UNSHARED = model(OwnNorm(object())), model(OwnNorm(None))
UNUSED = model(find_unused_parameters=True)
STATIC = model(find_unused_parameters=True, static_graph=True)
UNCHUNKED = "or ring without a wire dtype for every size"
GRID = Plan((Rule("torus", shape=(2, 2), chunk_bytes=9),))
TWO_RULES = Plan((Rule("leader", 99, chunk_bytes=9), Rule("ring")))
ON_THE_WIRE, HALVING = Plan.single("ring", wire_dtype="fp16"), Plan.single("halving-doubling")
SAME_TIME = "communicates in backward at the same time as"
REFUSED = {
    "chunks": (PLAIN, CHUNKS, TWO_BY_TWO, "hierarchical with chunks communicates within and"),
    "grid": (PLAIN, GRID, ONE_NODE, "chunk_bytes: torus with chunks .* at the same time"),
    "two rules": (PLAIN, TWO_RULES, Topology(((0, 1), (2,))), "chunk_bytes: leader with chunks"),
    "batch norm": (SYNC, WHOLE, TWO_BY_TWO, f"hierarchical {SAME_TIME} 1 of the model, "),
    "own norm": (SHARED, HALVING, ONE_NODE, f"halving-doubling {SAME_TIME} 1 of"),
    "wire": (SYNC, ON_THE_WIRE, ONE_NODE, f"ring {SAME_TIME} 1 of"),
    "unused": (UNUSED, WHOLE, TWO_BY_TWO, f"{SAME_TIME} DDP with find_unused_parameters, which"),
}
SAFE = {
    "whole messages": (PLAIN, WHOLE, TWO_BY_TWO),
    "chunks on one node": (PLAIN, CHUNKS, ONE_NODE),
    "chunks with one rank per node": (PLAIN, CHUNKS, Topology.of(4, 1)),
    "norm of one rank": (UNSHARED, WHOLE, TWO_BY_TWO),
    "static graph": (STATIC, WHOLE, TWO_BY_TWO),
    "ring with batch norm": (SYNC, Plan.single(), TWO_BY_TWO),
    "one rank": (SYNC, WHOLE, Topology.of(1, 1)),
    "CPU": (model(device_type="cpu"), CHUNKS, TWO_BY_TWO),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_can_deadlock_is_refused(nccl, case):
    *arguments, message = REFUSED[case]
    nccl()
    with pytest.raises(PlanError, match=message) as refused:
        launch_order.check_launch_order(*arguments)
    assert "\n" not in str(refused.value)
    instead = "or a plan without chunk_bytes" if "chunk" in message else UNCHUNKED
    valid = f"valid: {VARIABLE}=1 in the environment of every rank before init_process_group"
    assert str(refused.value).endswith(f"{valid}, {instead}")
    nccl((2, 25, 1), "1")
    with pytest.raises(PlanError, match=r"can deadlock in NCCL 2\.25\.1; valid: NCCL 2\.26 or"):
        launch_order.check_launch_order(*arguments)
    for version, variable, back_end in (
        ((2, 26, 2), "1", "ProcessGroupNCCL"),
        ((3, 0, 0), "1", "ProcessGroupNCCL2"),
        ((2, 25, 1), None, ""),
    ):
        nccl(version, variable, back_end)
        launch_order.check_launch_order(*arguments)


def test_fsdp2_whose_collectives_have_no_order_with_the_plans_is_refused(nccl):
    nccl()
    with pytest.raises(PlanError, match=rf"model: FSDP2 .* can deadlock; valid: {VARIABLE}=1 in"):
        launch_order.check_launch_order_of_fsdp2()
    nccl((2, 26, 2), "1")
    launch_order.check_launch_order_of_fsdp2()


@pytest.mark.parametrize("case", SAFE)
def test_a_plan_that_cannot_deadlock_is_not_refused(nccl, case):
    nccl((2, 20, 5))
    launch_order.check_launch_order(*SAFE[case])


@pytest.mark.parametrize(
    ("value", "ordered"),
    [("0x1", True), ("2", True), ("0", False), ("", False), ("true", False), (None, True)],
)
def test_the_variable_is_read_as_by_nccl_and_a_value_of_the_user_is_kept(
    monkeypatch, value, ordered
):
    monkeypatch.setenv(VARIABLE, value or "")
    if value is None:
        monkeypatch.delenv(VARIABLE)
    else:
        assert launches_are_ordered() is ordered
    order_launches()
    assert launches_are_ordered() is ordered


@pytest.fixture
def ddp():
    """DDP over four ranks of torch's fake back end, in which no rank is another."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.device_type = "cuda"  # what the check reads
    yield ddp
    dist.destroy_process_group()


def test_both_ways_of_registering_are_checked(nccl, ddp):
    nccl()
    with pytest.raises(PlanError, match=f"chunk_bytes: .* {VARIABLE}=1"):
        register(ddp, CHUNKS, TWO_BY_TWO)
    assert not ddp._comm_hooks
    ddp.register_comm_hook(PlanState(CHUNKS, TWO_BY_TWO), plan_hook)
    with pytest.raises(PlanError, match=f"chunk_bytes: .* {VARIABLE}=1"):
        ddp(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("variable", [None, "1"])
def test_tuning_leaves_chunks_out_where_they_can_deadlock(nccl, monkeypatch, variable):
    nccl(variable=variable)
    measure = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(tuning, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(TWO_BY_TWO, chunks_bytes=[64])
    chunks = {rule.chunk_bytes for rule in measure.call_args.args[1]}
    assert chunks == ({None, 64} if variable else {None})


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("cpu:gloo,cuda:nccl", "ProcessGroupNCCL"),  # to torch 2.14, or TORCH_DIST_USE_NCCL2=0
        ("cpu:nccl-lazy,cuda:nccl-lazy", "ProcessGroupNCCLLazy"),
        ("cpu:gloo,cuda:nccl2", "ProcessGroupNCCL2"),
        ("cpu:gloo,cuda:gloo", ""),
    ],
)
def test_nccl_is_known_under_each_name(monkeypatch, config, kind):
    group = SimpleNamespace(_get_backend=lambda device: type(kind or "ProcessGroupGloo", (), {})())
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert launch_order.nccl_class(group) == kind
