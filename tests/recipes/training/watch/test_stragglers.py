"""A rank or a node that holds a run up is named, and an even load is not."""

import random
import statistics
import time

import pytest
import torch.distributed as dist

from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.watch.stragglers import (
    RankTimes,
    StragglerReport,
    metrics_of,
    slow_ranks,
)
from tests.ranks import run_ranks
from tests.recipes.runs import make


def reading(own, wait=0.5, inputs=None):
    """Return the times of ranks with this much own work, which all take as long in the end."""
    total = max(own) + wait
    inputs = inputs or [0.0] * len(own)
    return [RankTimes(total, i, total - o) for o, i in zip(own, inputs, strict=True)]


def named(own, **options):
    slow = slow_ranks(reading(own, **options))
    return slow and slow.ranks


@pytest.mark.parametrize(("input_seconds", "by_input"), [(2.0, True), (0.9, False)])
def test_a_slow_rank_is_named_with_what_it_costs(input_seconds, by_input):
    slow = slow_ranks(reading([1, 1.1, 3, 0.9], inputs=[0, 0, input_seconds, 0]))
    assert slow == ((2,), pytest.approx(3), pytest.approx(1.1), pytest.approx(1.9 / 3.5), by_input)


@pytest.mark.parametrize(
    ("own", "ranks"),
    [
        ([2, 1], (0,)),
        ([1, 1, 2, 1, 1, 1, 1, 2], (2, 7)),
        ([2, 1, 2], None),  # two that share a core: the third one is fast
        ([1, 1, 1, 1, 1, 2, 2, 2], None),
        ([1, 1, 1, 1.1], None),
        ([1], None),
    ],
)
def test_only_few_ranks_can_hold_the_others_up(own, ranks):
    assert named(own) == ranks


def test_an_even_load_with_noise_names_nobody():
    draw = random.Random(0)
    for ranks in (2, 3, 8, 64, 512):
        for _ in range(200):
            own = [1 + 0.03 * draw.gauss(0, 1) for _ in range(ranks)]
            assert named(own, wait=draw.uniform(0, 3)) is None


def test_the_metrics_of_a_reading():
    assert metrics_of(reading([1, 3, 1.5], wait=0.5)) == pytest.approx(
        {
            "all_reduce_wait_seconds": 2.0,
            "least_all_reduce_wait_seconds": 0.5,
            "slowest_rank": 1,
            "slowest_rank_seconds": 1.5,
        }
    )


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
        """Return what one more reading tells the user, and the mark of its line."""
        self.times, told = reading(own, wait), len(self.lines)
        self.report.read(0.0, 0.0, 0.0, steps=1)
        return self.lines[told:], self.report.slow


def test_ranks_are_told_of_once_it_lasts_and_once_it_is_over():
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
    (line,) = [line for line in lines if "other ranks wait" in line]
    shown = [[x for x in part if x.startswith("train ")] for part in parts_at(lines, line)]
    assert not any("slow: " in x for x in shown[0])
    assert shown[1][0].endswith("  slow: rank 1")  # and on, until it is over
    assert line.startswith("the other ranks wait for rank 1 (")
    assert line.endswith(f"the difference in {cause}")
    train = [line for line in read_metrics(tmp_path / "run") if line["split"] == "train"]
    lines = train[1:-2]  # at the end, batches that were read ahead are left
    # The machine may hold another rank up for a reading.
    assert statistics.mode(line["slowest_rank"] for line in lines) == 1
    for line in lines:
        assert line["slowest_rank_seconds"] > 0.1
        assert line["all_reduce_wait_seconds"] > line["least_all_reduce_wait_seconds"]
