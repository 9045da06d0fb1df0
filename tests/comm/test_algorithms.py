"""Every algorithm sums exactly, on any number of ranks and elements, and sends what it states."""

import pytest
import torch
import torch.distributed as dist

from largebatch.comm import ALGORITHMS, Topology
from tests.ranks import run_ranks

SIZES = (1, 2, 3, 5, 7, 64, 1001, 100_003)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def values(rank, size, dtype):
    generator = torch.Generator().manual_seed(1000 * size + rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def errors(ranks_per_node):
    """The largest error of any algorithm, dtype and size, in roundings of its dtype."""
    topology = Topology.from_environment(ranks_per_node)
    p = dist.get_world_size()
    worst = {}
    for name, algorithm in ALGORITHMS.items():
        for dtype in DTYPES:
            for size in SIZES:
                terms = torch.stack([values(rank, size, dtype).double() for rank in range(p)])
                tensor = values(dist.get_rank(), size, dtype)
                algorithm.all_reduce(tensor, topology)
                # Each of p - 1 additions may round by eps / 2 of a partial sum.
                unit = torch.finfo(dtype).eps * terms.abs().sum(0)
                error = ((tensor.double() - terms.sum(0)).abs() / unit).max().item()
                worst[name, dtype] = max(worst.get((name, dtype), 0.0), error)
                everyone = [torch.empty_like(tensor) for _ in range(p)]
                dist.all_gather(everyone, tensor)
                assert all(torch.equal(other, tensor) for other in everyone)
    return worst


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node"),
    [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 2), (6, 3), (8, 4)],
)
def test_the_sum_is_exact_within_rounding_and_alike_on_all_ranks(world_size, ranks_per_node):
    for worst in run_ranks(world_size, errors, ranks_per_node):
        for case, error in worst.items():
            assert error <= (world_size - 1) / 2 + 1e-9, case


def loopback_bytes():
    with open("/proc/self/net/dev") as file:
        line = next(line for line in file if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def sent_bytes(ranks_per_node, size_bytes):
    return {name: sent_bytes_of(name, ranks_per_node, size_bytes) for name in ALGORITHMS}


def sent_bytes_of(name, ranks_per_node, size_bytes):
    """Bytes that all ranks together put on the wire for one all-reduce."""
    topology = Topology.from_environment(ranks_per_node)
    tensor = torch.ones(size_bytes // 4)
    ALGORITHMS[name].all_reduce(tensor, topology)
    seen = []
    for _ in range(3):
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        ALGORITHMS[name].all_reduce(tensor, topology)
        dist.barrier()
        seen.append(loopback_bytes() - before)
    return min(seen)  # whatever else uses the interface only adds


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 1), (4, 2), (6, 3)])
def test_what_crosses_the_wire_is_what_is_stated(world_size, ranks_per_node):
    size_bytes = 12 * 2**20
    sent = run_ranks(world_size, sent_bytes, ranks_per_node, size_bytes)[0]
    for name, algorithm in ALGORITHMS.items():
        stated = algorithm.traffic(size_bytes, Topology.of(world_size, ranks_per_node))
        nodes = world_size // ranks_per_node
        # The ring goes from rank to rank; on each node one of its links leaves the node.
        inside = world_size - nodes if name == "ring" else world_size
        expected = nodes * stated.inter_bytes + inside * stated.intra_bytes
        assert sent[name] == pytest.approx(expected, rel=0.05), name


def test_stated_traffic_is_that_of_the_formulas():
    n = 1000
    flat = ALGORITHMS["ring"].traffic(n, Topology.of(8, 2))
    assert flat.inter_bytes == pytest.approx(1.75 * n)  # 2 (p - 1) / p
    assert flat.intra_messages + flat.inter_messages == 14  # 2 (p - 1)
    grouped = ALGORITHMS["hierarchical"].traffic(n, Topology.of(8, 2))
    assert grouped.inter_bytes == pytest.approx(1.5 * n)  # 2 (N - 1) / N, the least there is
    assert grouped.intra_bytes == pytest.approx(1.0 * n)
    assert (grouped.intra_messages, grouped.inter_messages) == (2, 6)
    for algorithm in ALGORITHMS.values():
        alone = algorithm.traffic(n, Topology.of(1, 1))
        assert (alone.intra_bytes, alone.inter_bytes) == (0, 0)
        assert (alone.intra_messages, alone.inter_messages) == (0, 0)
