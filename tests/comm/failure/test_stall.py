"""A rank that does not answer ends a run that stands still; one that is late is only named."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from largebatch.comm import StallWatch, join_roll_call, ranks_named
from largebatch.comm.failure.stall import patience_seconds
from tests.comm.failure.started import started, until

STEPS = 250
SECONDS = 300  # in which what is waited for has long happened


@pytest.mark.parametrize(
    ("steps", "seconds"), [([], 30), ([0.05] * 9, 30), ([4.0] * 9 + [600.0], 40)]
)
def test_patience_follows_the_median_of_the_steps(steps, seconds):
    assert patience_seconds(steps) == seconds


def test_ranks_are_named_in_words():
    assert ranks_named([3]) == "rank 3"
    assert ranks_named([0, 2]) == "ranks 0 and 2"
    assert ranks_named([0, 1, 3, 4, 5, 6, 9]) == "ranks 0, 1, 3 to 6 and 9"


def be_late(seconds):
    time.sleep(seconds)


def make_steps(rank, folder):
    """Append each step, and lines of the watch, to ``said-RANK``; rank 2 is late once asked to."""
    said = open(folder / f"said-{rank}", "a", buffering=1)  # noqa: SIM115

    def end(line):
        said.write(f"ended {line}\n")
        os._exit(1)

    def say(line):
        said.write(f"said {line}\n")

    watch = StallWatch(join_roll_call(), end, say, floor_seconds=1.5, grace_seconds=3)
    late = folder / "late"
    for step in range(STEPS):
        watch.begin(step)
        if rank == 2 and late.exists():
            late.unlink()
            be_late(5)
        try:
            dist.all_reduce(torch.ones(2))
        except RuntimeError:  # the other survivor has been ended first
            time.sleep(10)  # for the watch of this rank to end it
            raise
        watch.finish()
        said.write(f"step {step}\n")
        time.sleep(0.02)
    watch.close()
    dist.barrier()
    dist.destroy_process_group()


def said(folder, rank):
    path = folder / f"said-{rank}"
    return path.read_text() if path.exists() else ""


def until_all_make_steps(folder):
    until(lambda: all("step 3" in said(folder, rank) for rank in range(3)))


def lines(folder, kind):
    found = [line for rank in range(3) for line in said(folder, rank).splitlines()]
    return [line for line in found if line.startswith(kind)]


@pytest.mark.slow("waits until a suspended rank has not answered twice")
def test_a_suspended_rank_is_named_long_before_the_timeout(tmp_path):
    with started(3, make_steps, tmp_path) as ranks:
        until_all_make_steps(tmp_path)
        os.kill(ranks[0].pid, signal.SIGSTOP)
        for process in ranks[1:]:
            process.join(SECONDS)
        assert [process.exitcode for process in ranks[1:]] == [1, 1]
    for rank, line in enumerate(lines(tmp_path, "ended"), 1):
        assert line.startswith(f"ended rank {rank}: step ")
        assert line.endswith("rank 0 did not answer within 3 s (ended or hanging)")


@pytest.mark.slow("waits for a watch to look twice")
def test_ranks_suspended_all_together_go_on_and_a_late_one_is_named_with_what_it_does(tmp_path):
    with started(3, make_steps, tmp_path) as ranks:
        until_all_make_steps(tmp_path)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in ranks:
                os.kill(process.pid, number)
            time.sleep(8 if number == signal.SIGSTOP else 0)
        (tmp_path / "late").touch()
        for process in ranks:
            process.join(SECONDS)
        assert [process.exitcode for process in ranks] == [0, 0, 0]
    assert lines(tmp_path, "ended") == []
    assert len(lines(tmp_path, f"step {STEPS - 1}")) == 3
    answers = [line for line in lines(tmp_path, "said") if "rank 2 in be_late" in line]
    assert answers
    for line in answers:
        place = r"rank 2 in be_late \(comm/failure/test_stall.py:\d+\); ranks 0 and 1 in "
        assert re.match(rf"said step \d+ has taken .*all ranks answer: {place}", line)
