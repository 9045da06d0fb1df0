"""Process groups over parts of the ranks: how many steps they take, and their timeout."""

import copy
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.testing._internal.distributed.fake_pg import FakeStore

from largebatch.comm import ALGORITHMS, Plan, Rule, Topology, process_groups
from largebatch.comm.process_groups import group_of_rank
from tests.ranks import run_ranks

# --- steps, counted on one rank of a large job -----------------------------------------------


@pytest.fixture
def steps(monkeypatch):
    """The calls that make groups, on a back end that is bound to a device and splits, as NCCL."""
    calls = []
    for name in ("new_group", "split_group"):
        original = getattr(dist, name)

        def counted(*arguments, name=name, original=original, **options):
            calls.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(dist, name, counted)
    monkeypatch.setattr(process_groups, "_splits", lambda: True)
    yield calls
    dist.destroy_process_group()


def as_rank(rank, sizes):
    """A topology of nodes of these sizes on torch's fake back end, in which no rank is another."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sum(sizes))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if not backend.supports_splitting:
        pytest.skip("the fake back end of this torch does not split, as that of torch 2.11")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return Topology(tuple(tuple(range(s, s + n)) for s, n in zip(starts, sizes, strict=True)), rank)


def ranks_of(group):
    return None if group is None else dist.get_process_group_ranks(group)


RING, HIERARCHICAL, LEADER = Rule("ring"), Rule("hierarchical"), Rule("leader")


@pytest.mark.parametrize(
    ("rank", "sizes", "rules", "expected", "intra", "inter"),
    [
        (13, [8] * 256, [HIERARCHICAL], 2, [*range(8, 16)], [*range(5, 2048, 8)]),
        (7, [4, 2, 3], [LEADER], 2, [6, 7, 8], [1, 5, 7]),
        (3, [4, 2, 3], [Rule("leader", max_bytes=9), RING], 3, [0, 1, 2, 3], None),
        (2, [2, 2], [Rule("halving-doubling")], 1, [2, 3], [0, 2]),
        (5, [4, 4], [Rule("torus", shape=(2, 4))], 2, [4, 5, 6, 7], [1, 5]),
        (5, [4, 4], [Rule("torus")], 2, [4, 5, 6, 7], [1, 5]),
        (5, [8], [HIERARCHICAL], 1, [*range(8)], None),
        (5, [1] * 8, [HIERARCHICAL], 1, None, [*range(8)]),
    ],
    ids=["2,048 ranks", "unequal", "two rules", "flat", "grid", "nodes as rows", "one", "of one"],
)
def test_a_plan_takes_one_step_for_each_level_on_a_back_end_that_splits(
    steps, rank, sizes, rules, expected, intra, inter
):
    topology, plan = as_rank(rank, sizes), Plan(tuple(rules))
    plan.connect(topology)
    plan.connect(topology)
    assert steps == ["split_group"] * expected
    assert ranks_of(topology.groups.intra) == intra
    assert ranks_of(topology.groups.inter) == inter


def test_only_a_group_that_is_bound_to_an_accelerator_is_split(monkeypatch):
    class Group:
        bound_device_id = None

        def _get_backend(self, device):
            return type("Backend", (), {"supports_splitting": device.index == 0})

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: group)
    group = Group()
    assert not process_groups._splits()
    for device, splits in (("cuda:0", True), ("cuda:1", False), ("cpu:0", False)):
        group.bound_device_id = torch.device(device)
        assert process_groups._splits() is splits


# --- torch's names and classes for NCCL, which has no GPU here ---------------------------------


class Stand(Backend):
    """What this project reads of torch's classes for NCCL."""

    supports_splitting, options = True, None

    def __init__(self, options):
        super().__init__(options.group_rank, options.group_size)
        self.options = SimpleNamespace(_timeout=options.timeout)

    def getBackendName(self):  # noqa: N802
        return type(self).__name__


@pytest.fixture
def back_end(monkeypatch):
    """Return a function that starts a group of four ranks whose GPUs have such a class."""
    for table in ("_plugins", "backend_list", "backend_type_map", "backend_capability"):
        monkeypatch.setattr(dist.Backend, table, copy.copy(getattr(dist.Backend, table)))
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", {"cpu": "gloo", "cuda": "nccl"})

    def start(name, kind, *, binds):
        made = type(kind, (Stand,), {})

        def create(options, _):
            if binds:
                options.process_group.bound_device_id = torch.device("cuda", 0)
            return made(options)

        plugin = name.rpartition(":")[2]
        dist.Backend.register_backend(plugin, create, extended_api=True, devices=["cuda"])
        size = 1 if "gloo" in name else 4
        store, limit = dist.HashStore() if size == 1 else FakeStore(), timedelta(seconds=77)
        dist.init_process_group(name, store=store, rank=0, world_size=size, timeout=limit)

    yield start
    dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(Backend, "new_window"), reason="no back ends in Python here")
@pytest.mark.parametrize(
    ("name", "kind", "binds"),
    [
        ("nccl", "ProcessGroupNCCL", False),  # to torch 2.14, or with TORCH_DIST_USE_NCCL2=0
        ("nccl", "ProcessGroupNCCL2", True),
        ("nccl-legacy", "ProcessGroupNCCL", False),
        ("nccl2", "ProcessGroupNCCL2", True),
        ("nccl-lazy", "ProcessGroupNCCLLazy", True),
        ("cpu:gloo,cuda:nccl2", "ProcessGroupNCCL2", True),
    ],
)
def test_nccl_is_known_under_each_name(monkeypatch, back_end, name, kind, binds):
    back_end(name, kind, binds=binds)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert process_groups.nccl_class() == kind
    assert process_groups.device_of_messages() == torch.device("cuda", 3)
    assert process_groups.default_timeout() == timedelta(seconds=77)
    assert process_groups._splits() is binds  # ProcessGroupNCCL2 binds itself to a device


def test_gloo_is_not_nccl():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert process_groups.nccl_class() == ""
        assert process_groups.device_of_messages() == torch.device("cpu")
    finally:
        dist.destroy_process_group()


# --- on several ranks ------------------------------------------------------------------------

EQUAL, UNEQUAL = ((0, 1), (2, 3)), ((1, 3), (0,), (2,))
PARTS = [[[3, 0], [1], [2]], [[2, 1, 0], [3]], [[3, 1]], [[2, 0]]]
# Since torch 2.15.
SPLITS_GLOO = "Gloo" in str(dist.split_group.__doc__)
needs_split = pytest.mark.skipif(not SPLITS_GLOO, reason="this torch splits NCCL only")


def sums_and_members():
    """Each algorithm's sum of 1 + rank over all ranks, and the ranks in a group of each part."""
    process_groups._splits = lambda: True
    del dist.new_group
    sums = {}
    for nodes in (EQUAL, UNEQUAL):
        topology = Topology(nodes, dist.get_rank())
        for name, algorithm in ALGORITHMS.items():
            if nodes == EQUAL or name not in ("hierarchical", "torus"):
                data = torch.arange(1.0, 8.0) * (1 + dist.get_rank())
                algorithm.all_reduce(data, topology)
                sums[name, nodes] = data.tolist()
    found = [ranks_of(group_of_rank(parts)) for parts in PARTS]
    dist.barrier()  # else a fast rank could exit while others still connect
    return sums, found


@pytest.mark.slow("starts four ranks")
@needs_split
def test_algorithms_sum_over_groups_that_are_split_off():
    for rank, (sums, members) in enumerate(run_ranks(4, sums_and_members)):
        assert len(sums) == 2 * len(ALGORITHMS) - 2
        for case, found in sums.items():
            assert found == [10.0 * i for i in range(1, 8)], case
        for parts, found in zip(PARTS, members, strict=True):
            part = next((sorted(part) for part in parts if rank in part), [])
            assert found == (part if len(part) > 1 else None)


def wait_for_a_rank_that_does_not_come(split):
    if split:
        process_groups._splits = lambda: True
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    topology = Topology.from_environment(1)
    groups = [topology.groups.inter, topology.groups.world, topology.grid((2, 1)).row]
    own = Topology.from_environment(1, timeout=timedelta(seconds=7)).groups.inter
    limits = [g._get_backend(torch.device("cpu")).options._timeout for g in (*groups, own)]
    assert limits == [timedelta(seconds=n) for n in (1, 1, 1, 7)]
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 has given up"], timedelta(seconds=50))
        return 0
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1), group=topology.groups.inter)
    store.set("rank 0 has given up", "")
    return time.monotonic() - start


@pytest.mark.slow("starts two ranks, one of which waits a second for the other")
@pytest.mark.parametrize(
    "split", [False, pytest.param(True, marks=needs_split)], ids=["one by one", "split"]
)
def test_groups_take_the_timeout_of_the_default_group(split):
    waited, _ = run_ranks(2, wait_for_a_rank_that_does_not_come, split)
    assert 0.9 < waited < 20
