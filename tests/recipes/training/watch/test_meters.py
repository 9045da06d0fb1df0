"""Readings: memory, and ranks that are slow."""

import statistics
import time

import pytest
import torch
import torch.distributed as dist

from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.watch import meters
from largebatch.recipes.training.watch.meters import (
    RankTimes,
    StragglerReport,
    peak_memory_bytes,
    slow_ranks,
)
from tests.ranks import run_ranks
from tests.recipes.runs import make


def test_memory_on_a_cpu_is_the_largest_resident_size_of_the_process_in_bytes():
    assert 10**8 < peak_memory_bytes(torch.device("cpu")) < 10**12


# --- ranks that hold the others up -----------------------------------------------------------


def reading(own, wait=0.5, inputs=None):
    """Return the times of ranks with this much own work, which all take as long in the end."""
    total = max(own) + wait
    inputs = inputs or [0.0] * len(own)
    return [RankTimes(total, i, total - o) for o, i in zip(own, inputs, strict=True)]


def test_few_ranks_can_hold_the_others_up_and_are_named_with_what_they_cost():
    for own, ranks in (
        ([2, 1], (0,)),
        ([1, 1, 2, 1, 1, 1, 1, 2], (2, 7)),
        ([2, 1, 2], None),  # two that share a core: the third one is fast
        ([1, 1, 1, 1, 1, 2, 2, 2], None),
        ([1, 1, 1, 1.1], None),
        ([1], None),
    ):
        slow = slow_ranks(reading(own))
        assert (slow and slow.ranks) == ranks, own
    cost = tuple(map(pytest.approx, (3, 1.1, 1.9 / 3.5)))
    for seconds, by_input in ((2.0, True), (0.9, False)):
        slow = slow_ranks(reading([1, 1.1, 3, 0.9], inputs=[0, 0, seconds, 0]))
        assert slow == ((2,), *cost, by_input)


class Scripted:
    """A job of three ranks, whose times at each reading a test sets."""

    def __init__(self):
        self.lines, self.times = [], []
        self.report = StragglerReport(self, self.lines.append)

    def all_gather(self, *own):
        return self.times

    def gather(self, value):
        return ["a", "b", "c"]

    def read(self, own, wait):
        """Return what one more reading prints, and the mark of its line."""
        self.times, printed = reading(own, wait), len(self.lines)
        self.values = self.report.read(0.0, 0.0, 0.0, steps=1)
        return self.lines[printed:], self.report.slow


def test_ranks_are_named_once_it_lasts_and_once_it_is_over():
    run, even, slow = Scripted(), ([1, 1, 1], 0.5), ([1, 2, 1], 0.5)
    assert [run.read(*one) for one in (slow, slow, slow, even, slow, slow)] == [([], "")] * 6
    lines, mark = run.read(*slow)
    assert lines == [
        "the other ranks wait for rank 1 (b) for 40% of each step: 2 s of own work against 1 s, "
        "the difference in computing"
    ]
    assert mark == "rank 1"
    assert [run.read(*one) for one in (slow, even, even)] == [([], "rank 1")] * 3
    assert run.read(*even) == (["the other ranks no longer wait for rank 1"], "")
    quick = ([0.1, 0.2, 0.1], 0.05)  # three readings of it are no three seconds
    assert [run.read(*quick) for _ in range(9)] == [([], "")] * 9
    assert run.read(*slow)[0]
    run.read([1, 3, 1.5], wait=0.5)
    assert [*run.values] == [
        *("all_reduce_wait_seconds", "least_all_reduce_wait_seconds"),
        *("slowest_rank", "slowest_rank_seconds"),
    ]
    assert [*run.values.values()] == pytest.approx([2.0, 0.5, 1, 1.5])


def run_with(photos, run_dir):
    keys = ["epochs=4", "log_every=2", "evaluate_every=null", "batch_size=12"]
    trainer, rank = make(photos, run_dir, *keys), dist.get_rank()
    meters.peak_memory_bytes = lambda device: 1000.0 + rank
    if rank == 1:
        read = trainer.loader.reader._read
        trainer.loader.reader._read = lambda *of, **options: time.sleep(0.5) or read(*of, **options)
    lines = []
    trainer.display.say = trainer._readings.stragglers._warn = lines.append
    trainer.run()
    return lines


@pytest.mark.slow("trains on three ranks, of which one sleeps in each step")
def test_a_rank_that_holds_the_others_up_is_named(photos, tmp_path):
    lines, *_ = run_ranks(3, run_with, photos, tmp_path / "run")
    line = next(line for line in lines if line.startswith("the other ranks wait for rank 1 ("))
    assert line.endswith("the difference in waiting for data")
    assert lines[lines.index(line) + 1].endswith("  slow: rank 1")
    train = [line for line in read_metrics(tmp_path / "run") if line["split"] == "train"]
    assert {line["memory_bytes"] for line in train} == {1002.0}  # of the rank with most
    # The machine may hold another rank up for a reading.
    assert statistics.mode(line["slowest_rank"] for line in train) == 1
