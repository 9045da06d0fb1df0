"""Averages in half precision keep small gradients with thousands of ranks, and do not overflow.

Thousands of ranks are emulated in one process; on ranks of gloo the average has the same bits.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import ALGORITHMS, Plan, Rule, Topology, average, register
from largebatch.comm.averaging import Averaging, predivide_factor
from tests.ranks import run_ranks

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
RANKS = (8, 96, 2048)
MAX = 65504.0  # of FP16
TINY = 2.0**-24  # the smallest positive FP16 number


def ring(values, ranks_per_node=1):
    """Add (terms, elements) as gloo's ring: the k-th part begins at rank k - 1 and goes down."""
    ranks, elements = values.shape
    parts = torch.arange(ranks)
    table = pad(values, (0, -elements % ranks)).unflatten(1, (ranks, -1))
    total = table[(parts - 1) % ranks, parts]
    for step in range(2, ranks + 1):
        total += table[(parts - step) % ranks, parts]
    return total.flatten()[:elements]


def hierarchical(values, ranks_per_node):
    """Add in FP32 in each node, round, and add each local rank's share in a ring across nodes."""
    nodes = values.unflatten(0, (-1, ranks_per_node)).sum(1, dtype=torch.float32).to(values.dtype)
    elements = nodes.shape[1]
    shares = pad(nodes, (0, -elements % ranks_per_node)).chunk(ranks_per_node, 1)
    return torch.cat([ring(share) for share in shares])[:elements]


#: The order of summation of an algorithm: (ranks, elements) and ranks per node -> (elements,). On
#: NCCL that of a ring is the same up to where it begins; trees and in-network sums have their own.
ORDERS = {"ring": ring, "hierarchical": hierarchical}


def means_in_fp32(values):
    """Average groups, shape (groups, terms, elements), in FP32, and round once."""
    return values.mean(1, dtype=torch.float32).to(values.dtype)


def emulated_average(gradients, rule, ranks_per_node, before=None):
    """Return the average that all ranks get of gradients, shape (ranks, elements) in node order.

    The rule has no ``chunk_bytes`` and ``shape``. ``before`` is what to divide by before the sum,
    in place of what the product divides by.
    """
    dtype, ranks = gradients.dtype, len(gradients)
    wire = dtype if rule.wire_dtype is None else HALVES[rule.wire_dtype]
    if rule.sum_dtype is not None:
        means = means_in_fp32(gradients.to(wire).unflatten(0, (-1, ranks_per_node)))
        return means_in_fp32(means.unsqueeze(0))[0].to(dtype)
    averaging = Averaging.of(dtype, ranks, rule)
    if before is not None:
        averaging = Averaging(before, ranks / before)
    sent = averaging.begin(gradients.clone()).to(wire)
    return averaging.end(ORDERS[rule.algorithm](sent, ranks_per_node).to(dtype))


def gradients(ranks, elements, std=1e-4, spread=0.0):
    """Normal, of standard deviations that are log-normal over the elements; of mean zero."""
    generator = torch.Generator().manual_seed(ranks)
    scales = std * torch.randn(elements, generator=generator).mul_(spread).exp_()
    return torch.randn(ranks, elements, generator=generator) * scales


def relative_error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("ranks", [1, 2, 3, 16, 17, 1000, 4096])
def test_the_default_factor_of_fp16_is_the_next_power_of_two_from_the_square_root(ranks):
    factor = predivide_factor(ranks, fp16=True)
    assert factor.bit_count() == 1
    assert factor**2 >= ranks > (factor / 2) ** 2
    assert predivide_factor(ranks, fp16=False) == ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("algorithm", ORDERS)
def test_small_gradients_survive_the_division(algorithm, dtype):
    """The gradients are FP32 and sent in FP16, or FP16 themselves."""
    for ranks in RANKS:
        exact = gradients(ranks, 512)
        expected, own = exact.double().mean(0), exact.to(dtype)
        wire = "fp16" if dtype == torch.float32 else None
        split, before = (
            emulated_average(own, Rule(algorithm, wire_dtype=wire), 8, before)
            for before in (None, ranks)
        )
        assert relative_error(split, expected) < 0.03
        assert relative_error(split, expected) <= relative_error(before, expected)
        if ranks >= 1000:
            assert relative_error(before, expected) > 0.1
            assert (before == 0).sum() >= (split == 0).sum()


@pytest.mark.parametrize("wire", HALVES)
def test_sums_in_fp32_are_within_the_roundings_of_what_is_sent(wire):
    """Of each gradient, of the mean of each node, and of the mean."""
    dtype = HALVES[wire]
    unit, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal

    def rounding(of):
        return unit * of.abs().clamp(min=least)

    rule = Rule("hierarchical", wire_dtype=wire, sum_dtype="fp32")
    for ranks in RANKS:
        exact = gradients(ranks, 512, std=1e-6, spread=2.0)
        terms = exact.double()
        nodes = terms.unflatten(0, (-1, 8)).mean(1)
        bound = rounding(terms).mean(0) + rounding(nodes).mean(0) + rounding(terms.mean(0))
        error = (emulated_average(exact, rule, 8).double() - terms.mean(0)).abs()
        assert (error <= 1.01 * bound).all()


@pytest.mark.parametrize("algorithm", ORDERS)
def test_fp16_overflows_where_stated(algorithm):
    """At means beyond 65504 f / p, which a division by all p ranks beforehand excludes."""
    for ranks in (8, 2048):
        limit = MAX * predivide_factor(ranks, fp16=True) / ranks
        rule = Rule(algorithm, wire_dtype="fp16")
        below, above = (torch.full((ranks, 8), factor * limit) for factor in (0.5, 1.5))
        assert emulated_average(below, rule, 8).isfinite().all()
        assert emulated_average(above, rule, 8).isinf().all()
        assert emulated_average(above, rule, 8, before=ranks).isfinite().all()


SAME_BITS = [
    *(Rule(a, wire_dtype=wire) for a in ORDERS for wire in (None, *HALVES)),
    *(Rule("hierarchical", wire_dtype=wire, sum_dtype="fp32") for wire in (None, *HALVES)),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def differences_from_emulation(ranks_per_node, elements):
    """The rules and dtypes whose average on ranks has other bits than the emulated one."""
    layout = Topology.of(dist.get_world_size(), ranks_per_node, dist.get_rank())
    topology = replace(layout, shared_memory=False)
    exact = gradients(topology.world_size, elements, std=1e-3, spread=1.0)
    different = []
    for rule in SAME_BITS:
        for dtype in DTYPES:
            tensor = exact[topology.rank].to(dtype, copy=True)
            average(tensor, topology, rule)
            if not torch.equal(tensor, emulated_average(exact.to(dtype), rule, ranks_per_node)):
                different.append((rule, dtype))
    return different


def extremes(ranks_per_node):
    """Check the means of the largest FP16 number, and of the smallest one on one rank only."""
    topology = Topology.of(dist.get_world_size(), ranks_per_node, dist.get_rank())
    p = topology.world_size
    for rule in (
        Rule("hierarchical", sum_dtype="fp32"),
        Rule("torus", shape=(p, 1), sum_dtype="fp32"),
        Rule("torus", shape=(1, p), sum_dtype="fp32", chunk_bytes=20 * p),
        Rule("hierarchical", None, "fp16", 20 * p, sum_dtype="fp32"),
    ):
        for dtype in (torch.float16, torch.float32):
            large, small = torch.full((999,), MAX, dtype=dtype), torch.zeros(999, dtype=dtype)
            small += TINY * p * (topology.rank == 0)
            average(large, topology, rule)
            average(small, topology, rule)
            assert (large == MAX).all(), (rule, dtype)
            assert (small == TINY).all(), (rule, dtype)


def fp16_gradients(rules):
    """Check gradients of an FP16 model: tiny ones, and those with a sum beyond FP16."""
    topology = Topology.of(dist.get_world_size(), 2, dist.get_rank())
    images = torch.tensor([[2 * TINY] * 25 + [30_000.0] * 25]).half()
    for rule in rules:
        model = DistributedDataParallel(nn.Linear(50, 1, bias=False).half())
        register(model, Plan((rule,)), topology)
        model(images).sum().backward()
        # A quarter of the tiny ones would round to zero.
        assert torch.equal(model.module.weight.grad, images), rule


def on_ranks(ranks_per_node, elements):
    if dist.get_world_size() == 4:
        extremes(2)
        fp16_gradients([*map(Rule, ALGORITHMS), Rule("hierarchical", sum_dtype="fp32")])
    return differences_from_emulation(ranks_per_node, elements)


@pytest.mark.slow("averages on four ranks, and on a number that is no power of two")
@pytest.mark.parametrize(("ranks", "per_node", "elements"), [(4, 2, 384), (3, 1, 288)])
def test_averages_on_ranks_have_the_bits_of_the_emulation_and_keep_extremes(
    ranks, per_node, elements
):
    assert run_ranks(ranks, on_ranks, per_node, elements) == [[]] * ranks
