"""A rank that does not answer ends a run that stands still; one that is late is only named."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.comm.network import Network, missing
from largebatch.comm import ranks_named
from largebatch.comm.failure.stall import patience_seconds
from tests.comm.failure import stalled_rank
from tests.comm.failure.started import started

ROOT = Path(__file__).parents[3]
SECONDS = 90  # in which what is waited for has long happened


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [([], 30), ([0.05] * 9, 30), ([4.0] * 9 + [600.0], 40)],
)
def test_patience_follows_the_median_of_the_steps(steps, seconds):
    assert patience_seconds(steps) == seconds


def test_ranks_are_named_in_words():
    assert ranks_named([3]) == "rank 3"
    assert ranks_named([0, 2]) == "ranks 0 and 2"
    assert ranks_named([0, 1, 3, 4, 5, 6, 9]) == "ranks 0, 1, 3 to 6 and 9"


def said(folder, rank):
    path = folder / f"said-{rank}"
    return path.read_text() if path.exists() else ""


def lines(folder, kind):
    found = [line for rank in range(3) for line in said(folder, rank).splitlines()]
    return [line for line in found if line.startswith(kind)]


def until_all_make_steps(folder):
    end = time.monotonic() + SECONDS
    while not all("step 3" in said(folder, rank) for rank in range(3)):
        assert time.monotonic() < end, [said(folder, rank) for rank in range(3)]
        time.sleep(0.02)


@pytest.mark.slow("waits until a suspended rank has not answered twice")
def test_a_suspended_rank_is_named_long_before_the_timeout(tmp_path):
    victim = 0
    with started(3, stalled_rank.make_steps, tmp_path) as ranks:
        until_all_make_steps(tmp_path)
        os.kill(ranks[victim].pid, signal.SIGSTOP)
        others = sorted({0, 1, 2} - {victim})
        for rank in others:
            ranks[rank].join(SECONDS)
        assert [ranks[rank].exitcode for rank in others] == [1, 1]
    for rank in others:
        (line,) = [line for line in said(tmp_path, rank).splitlines() if "ended" in line]
        assert line.startswith(f"ended rank {rank}: step ")
        assert line.endswith(f"rank {victim} did not answer within 3 s (ended or hanging)")


@pytest.mark.slow("a rank is late for longer than the others are patient")
def test_a_late_rank_is_named_with_what_it_does_and_nothing_is_ended(tmp_path):
    (tmp_path / "late").write_text("5")
    with started(3, stalled_rank.make_steps, tmp_path) as ranks:
        for process in ranks:
            process.join(SECONDS)
        assert [process.exitcode for process in ranks] == [0, 0, 0]
    assert lines(tmp_path, "ended") == []
    assert len(lines(tmp_path, f"step {stalled_rank.STEPS - 1}")) == 3
    found = [line for line in lines(tmp_path, "said") if "all ranks answer" in line]
    assert found
    for line in found:
        assert line.startswith("said step 5 has taken ")
        answers = line.partition("all ranks answer: ")[2]
        assert answers.startswith("rank 2 in be_late (comm/failure/stalled_rank.py:")
        assert "ranks 0 and 1 in " in answers


@pytest.mark.slow("suspends ranks for longer than the first look takes to come")
def test_ranks_that_are_suspended_all_together_go_on(tmp_path):
    with started(3, stalled_rank.make_steps, tmp_path) as ranks:
        until_all_make_steps(tmp_path)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in ranks:
                os.kill(process.pid, number)
            time.sleep(8 if number == signal.SIGSTOP else 0)
        for process in ranks:
            process.join(SECONDS)
        assert [process.exitcode for process in ranks] == [0, 0, 0]
    assert lines(tmp_path, "ended") == []


@pytest.fixture
def _network_or_skip():
    if reason := missing():
        pytest.skip(reason)


@pytest.mark.cluster
@pytest.mark.usefixtures("_network_or_skip")
@pytest.mark.slow("waits until a node without a network has not answered twice")
def test_a_node_whose_link_is_down_is_named(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    with Network(3) as network:

        def start(rank):
            program = [sys.executable, stalled_rank.__file__, str(rank)]
            where = [network.address(0), "29512", str(tmp_path)]
            command = network.inside(max(rank, 0), [*program, *where])
            return subprocess.Popen(command, env=environment)

        host, *ranks = [start(rank) for rank in (-1, 0, 1, 2)]
        try:
            until_all_make_steps(tmp_path)
            switch = network.namespace(0).removesuffix("0") + "switch"
            subprocess.run(["ip", "-n", switch, "link", "set", "port2", "down"], check=True)
            codes = [process.wait(SECONDS) for process in ranks]
        finally:
            for process in (host, *ranks):
                process.kill()
                process.wait()
    assert codes == [1, 1, 1]
    ends = [line.partition("; ")[2] for line in lines(tmp_path, "ended")]
    away = "rank 2 did not answer within 3 s (ended or hanging)"
    assert ends == [away, away, "the job's store does not answer: this rank is cut off"]
