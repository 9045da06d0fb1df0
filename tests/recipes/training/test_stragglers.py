"""A rank, a node or a link that holds a run up is named, and an even load is not."""

import random
import statistics
import time

import pytest
import torch
import torch.distributed as dist

from largebatch.comm import slow_link
from largebatch.recipes.training.metrics import read_metrics
from largebatch.recipes.training.stragglers import (
    RankTimes,
    least_wait_share,
    metrics_of,
    ranks_in_short,
    slow_ranks,
    where,
)
from largebatch.recipes.training.watch.phases import AllReduceWait
from tests.ranks import run_ranks
from tests.recipes.runs import make

TWO_NODES = [[0, 1, 2, 3], [4, 5, 6, 7]]


def reading(own, wait=0.5, inputs=None):
    """Return the times of ranks with this much own work, which all take as long in the end."""
    total = max(own) + wait
    inputs = inputs or [0.0] * len(own)
    return [RankTimes(total, i, total - o) for o, i in zip(own, inputs, strict=True)]


def named(own, nodes=None, **options):
    slow = slow_ranks(reading(own, **options), nodes or [list(range(len(own)))])
    return slow and slow.ranks


def test_one_slow_rank_is_named():
    slow = slow_ranks(reading([1, 1.1, 3, 0.9]), [[0, 1, 2, 3]])
    assert slow.ranks == (2,)
    assert (slow.own, slow.others) == pytest.approx((3, 1.1))
    assert slow.share == pytest.approx(1.9 / 3.5)
    assert not slow.by_input


def test_a_rank_that_waits_for_data_is_told_from_one_that_computes():
    assert slow_ranks(reading([1, 1, 2], inputs=[0.1, 0.1, 1.0]), [[0, 1, 2]]).by_input
    assert not slow_ranks(reading([1, 1, 2], inputs=[0.1, 0.1, 0.3]), [[0, 1, 2]]).by_input


@pytest.mark.parametrize(
    ("own", "nodes", "ranks"),
    [
        ([2, 1], None, (0,)),
        ([1, 1, 1, 1, 2, 2, 2, 2], TWO_NODES, (4, 5, 6, 7)),
        ([1, 1, 2, 1, 1, 1, 1, 2], TWO_NODES, (2, 7)),
        ([2, 1, 2], None, None),  # two that share a core: the third one is fast
        ([1, 2, 2, 2, 2, 2, 2, 2], TWO_NODES, None),
        ([2, 2, 1, 1, 1, 2, 2, 1], TWO_NODES, None),  # half of the ranks, here and there
        ([1, 1, 1, 1.1], None, None),
        ([1], None, None),
    ],
)
def test_only_few_ranks_or_whole_nodes_can_hold_the_others_up(own, nodes, ranks):
    assert named(own, nodes) == ranks


def test_an_even_load_with_noise_names_nobody():
    draw = random.Random(0)
    for ranks in (2, 3, 8, 64, 512):
        for _ in range(200):
            own = [1 + 0.03 * draw.gauss(0, 1) for _ in range(ranks)]
            assert named(own, wait=draw.uniform(0, 3)) is None


def test_a_slow_link_makes_all_ranks_wait_and_names_none_of_them():
    times = reading([1, 1.02, 0.98], wait=7)
    assert slow_ranks(times, [[0], [1], [2]]) is None
    assert least_wait_share(times) == pytest.approx(7 / 8.02)


def test_the_metrics_of_a_reading():
    assert metrics_of(reading([1, 3, 1.5], wait=0.5)) == pytest.approx(
        {
            "all_reduce_wait_seconds": 2.0,
            "least_all_reduce_wait_seconds": 0.5,
            "slowest_rank": 1,
            "slowest_rank_seconds": 1.5,
        }
    )


def test_ranks_are_named_with_their_nodes():
    hosts = ["a"] * 4 + ["b"] * 4
    assert where([5], TWO_NODES, hosts) == "rank 5 on node 1 (b)"
    assert where([4, 5, 6, 7], TWO_NODES, hosts) == "node 1 (b, ranks 4 to 7)"
    assert where([2, 7], TWO_NODES, hosts) == "rank 2 on node 0 (a) and rank 7 on node 1 (b)"
    assert where([1], [[0, 1]], hosts) == "rank 1 on node 0 (a)"


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ((), ""),
        ((5,), "rank 5"),
        ((2, 7), "ranks 2 and 7"),
        ((4, 5, 6, 7), "node 1"),
        ((3, 4, 5, 6, 7), "ranks 3 to 7"),
    ],
)
def test_ranks_are_named_in_short(ranks, name):
    assert ranks_in_short(ranks, TWO_NODES) == name


def test_one_rank_on_each_node_is_named_as_a_rank():
    assert ranks_in_short((1,), [[0], [1], [2]]) == "rank 1"


@pytest.mark.parametrize(
    ("rates", "node"),
    [
        ([100, 10, 10, 100], 1),  # both what node 1 receives, and what node 2 receives from it
        ([10, 100, 100, 10], 3),
        ([100, 10, 100, 100], None),  # one transfer of two: not a link
        ([100, 90, 110, 100], None),
        ([10, 10], None),
        ([], None),
    ],
)
def test_the_slow_link_is_that_both_of_whose_transfers_are_slow(rates, node):
    assert slow_link(rates) == node


class Slow(torch.autograd.Function):
    """Returns its input, and takes a while in the backward pass."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Network(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.first, self.last, self.seconds = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), seconds

    def forward(self, x):
        return self.last(Slow.apply(self.first(x), self.seconds))


def waits_of_backward():
    network = Network(0.4 if dist.get_rank() == 1 else 0.0)
    ddp = torch.nn.parallel.DistributedDataParallel(network)
    waiting = AllReduceWait(network, torch.device("cpu"))
    found = []
    for _ in range(4):
        ddp(torch.ones(1, 3)).sum().backward()
        waiting.backward_returned()
        found.append(waiting.read())
    return found


@pytest.mark.slow("two ranks sleep in their backward passes")
def test_the_wait_is_that_for_a_rank_whose_backward_pass_takes_longer():
    fast, slow = run_ranks(2, waits_of_backward)
    # The machine may hold a rank up once.
    assert statistics.median(fast[1:]) > 0.3
    assert statistics.median(slow[1:]) < 0.3


def run_with(photos, run_dir, case):
    steps = {"epochs": 8, "log_every": 2, "evaluate_every": "null", "batch_size": 12}
    trainer = make(photos, run_dir, *(f"{key}={value}" for key, value in steps.items()))
    if dist.get_rank() == 1 and case == "compute":
        trainer.model.register_forward_pre_hook(lambda *_: time.sleep(0.5))
    if dist.get_rank() == 1 and case == "input":
        read = trainer.loader.reader._read

        def read_late(*arguments, **options):
            time.sleep(0.5)
            return read(*arguments, **options)

        trainer.loader.reader._read = read_late
    if case == "even":
        trainer.model.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    lines = []
    trainer.display.say = trainer._readings.stragglers._warn = lines.append
    trainer.run()
    return lines


def parts_at(lines, line):
    """The lines before one of them, and those after it."""
    place = lines.index(line)
    return lines[:place], lines[place + 1 :]


@pytest.mark.slow("trains on three ranks, of which one sleeps in each step")
@pytest.mark.parametrize(
    ("case", "cause"), [("compute", "computing"), ("input", "waiting for data")]
)
def test_a_rank_that_holds_the_others_up_is_named_once(photos, tmp_path, case, cause):
    lines, *_ = run_ranks(3, run_with, photos, tmp_path / "run", case)
    (line,) = [line for line in lines if "other ranks up" in line]
    shown = [[x for x in part if x.startswith("train ")] for part in parts_at(lines, line)]
    assert not any("slow: " in x for x in shown[0])
    assert shown[1][0].endswith("  slow: rank 1")  # and on, until it is over
    assert line.startswith("rank 1 on node 0 (")
    assert ") holds the other ranks up for " in line
    assert line.endswith(f"the difference in {cause}")
    train = [line for line in read_metrics(tmp_path / "run") if line["split"] == "train"]
    lines = train[1:-2]  # at the end, batches that were read ahead are left
    # The machine may hold another rank up for a reading.
    assert statistics.mode(line["slowest_rank"] for line in lines) == 1
    for line in lines:
        assert line["slowest_rank_seconds"] > 0.1
        assert line["all_reduce_wait_seconds"] > line["least_all_reduce_wait_seconds"]


@pytest.mark.slow("trains on three ranks")
def test_an_even_run_names_no_rank(photos, tmp_path):
    lines, *_ = run_ranks(3, run_with, photos, tmp_path / "run", "even")
    assert [line for line in lines if "other ranks up" in line or "every rank waits" in line] == []
    train = [line for line in read_metrics(tmp_path / "run") if line["split"] == "train"]
    assert all(line["slowest_rank"] in (0, 1, 2) for line in train)
