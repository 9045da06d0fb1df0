"""SIGTERM names the missing ranks, and otherwise does what it did before."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from largebatch.comm import missing_ranks_named
from largebatch.comm.failure.sigterm import on_sigterm
from tests.comm.failure.started import started, until
from tests.ranks import CONTEXT

pytestmark = pytest.mark.slow("starts three ranks for each test, and ends them")

SECONDS = 300  # in which what is waited for has long happened


def wait_for_ever():
    while True:  # in short sleeps: one that begins just after a signal is not interrupted
        time.sleep(0.05)


def saying(rank, folder):
    """Wait in a collective, where the main thread cannot be reached, but rank 2 outside of it."""
    os.dup2(os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    with missing_ranks_named():
        dist.barrier()
        if rank == 2:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        (folder / f"ready-{rank}").touch()
        if rank == 2:
            wait_for_ever()
        dist.all_reduce(torch.ones(2))


@contextmanager
def three_ranks(folder):
    with started(3, saying, folder, timeout_seconds=SECONDS) as ranks:
        until(lambda: all((folder / f"ready-{rank}").exists() for rank in range(3)))
        time.sleep(0.3)  # so that the main threads are where the test wants them
        yield ranks


def said(folder, rank):
    return (folder / f"said-{rank}").read_text()


def test_a_killed_rank_is_named_by_those_that_are_then_terminated(tmp_path):
    with three_ranks(tmp_path) as ranks:
        ranks[2].kill()
        ranks[2].join()
        for process in ranks[:2]:  # as torchrun does
            process.terminate()
        for rank, process in enumerate(ranks[:2]):
            process.join(SECONDS)
            assert "rank 2 did not answer within 3 s (ended or hanging)" in said(tmp_path, rank)


def test_a_job_that_is_terminated_as_a_whole_names_nobody_and_heeds_handlers(tmp_path):
    with three_ranks(tmp_path) as ranks:
        for process in ranks:
            process.terminate()
            process.join(SECONDS)  # one after another: those that have ended are not missing
        assert [process.exitcode for process in ranks] == [-signal.SIGTERM] * 2 + [9]
    assert "did not answer" not in "".join(said(tmp_path, rank) for rank in range(3))


@pytest.fixture
def default_sigterm():
    """The default handler, whatever a test before has left."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_forked_child_is_terminated_without_its_parent_hearing_of_it(default_sigterm):
    heard = []
    with on_sigterm(lambda: bool(heard.append("parent"))):
        child = multiprocessing.get_context("fork").Process(target=wait_for_ever)
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(SECONDS)
        assert child.exitcode == -signal.SIGTERM
        assert heard == []
        os.kill(os.getpid(), signal.SIGTERM)  # `note` returns False: this process goes on
        until(lambda: heard)
    assert heard == ["parent"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def with_a_note_that_fails():
    def note():
        raise BrokenPipeError

    with on_sigterm(note):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_ever()


def with_a_handler_that_is_gone_before_the_note_returns():
    noting, is_gone = threading.Event(), threading.Event()

    def note():
        noting.set()
        return is_gone.wait(SECONDS)

    with on_sigterm(note):
        before = signal.signal(signal.SIGTERM, lambda *_: None)  # a training loop's, which stops
        os.kill(os.getpid(), signal.SIGTERM)
        assert noting.wait(SECONDS)
        signal.signal(signal.SIGTERM, before)
        is_gone.set()
        time.sleep(0.5)  # time in which the process must not end by the signal


@pytest.mark.parametrize(
    ("function", "code"),
    [
        (with_a_note_that_fails, -signal.SIGTERM),
        (with_a_handler_that_is_gone_before_the_note_returns, 0),
    ],
)
def test_a_process_ends_by_the_signal_unless_it_has_handled_that(function, code):
    process = CONTEXT.Process(target=function)
    process.start()
    process.join(SECONDS / 2)
    process.kill()
    assert process.exitcode == code
