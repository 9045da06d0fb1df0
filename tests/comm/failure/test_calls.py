"""What a rank does with a failure: watches, errors, roll calls and new attempts, in one process."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.futures import Future

from largebatch.comm import CollectiveError, StallWatch, missing_ranks_named
from largebatch.comm.failure import roll, roll_call
from largebatch.comm.failure.rendezvous import store_of_attempt
from largebatch.comm.failure.roll import RollCall
from tests.comm.failure.started import until


class Call:
    """A roll call with an answer, None from a store that is gone; its rank may leave meanwhile."""

    rank = 1

    def __init__(self, answer=None, leaves=False, has_ended=False):
        self.has_ended, self._leaves, self._answer = has_ended, leaves, answer

    def call(self, **_):
        self.has_ended = self.has_ended or self._leaves
        return self._answer

    def is_first(self, what):
        return True


def test_a_watch_ends_a_rank_that_is_cut_off_unless_that_has_left_the_job():
    for call in (Call(leaves=True), Call(has_ended=True)):
        ended = []
        with closing(StallWatch(call, ended.append, floor_seconds=0.05)) as watch:
            watch._thread.join(5)
            assert (watch._thread.is_alive(), ended) == (False, [])
    with closing(StallWatch(Call(), ended.append, floor_seconds=0.05)):
        until(lambda: ended)
    assert ended[0].endswith("the job's store does not answer: this rank is cut off")


def test_a_watch_goes_on_when_its_line_cannot_be_shown():
    said = []

    def say(line):
        said.append(line)
        raise BrokenPipeError

    late = Call(roll.Roll([], {0: "wait (loop.py:1)"}))
    with closing(StallWatch(late, said.append, say, floor_seconds=0.05)) as watch:
        for step in range(3):
            watch.begin(step)
            watch.finish()
        watch.begin(3)
        until(lambda: len(said) > 1)


def test_missing_ranks_are_described_when_the_store_is_gone(monkeypatch):
    def gone():
        raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(roll_call, "join_roll_call", gone)
    assert "it hosts the job's store, which does not answer" in roll_call.describe_missing_ranks()


GONE = "rank 1 did not answer within 3 s (ended or hanging)"
FAILED = "rank 0: ring all-reduce of bucket 2 (8 bytes) failed: Connection closed by peer"


def raised_in_backward(error):
    """Raise the error from a future's callback, as a hook does."""

    def callback(done):
        raise error

    future = Future()
    result = future.then(callback)
    future.set_result(None)
    result.wait()


def raised_alone(error):
    raise error


@pytest.mark.parametrize(
    ("raising", "error", "missing", "message"),
    [
        (raised_in_backward, CollectiveError(f"{FAILED}; {GONE}"), GONE, f"{FAILED}; {GONE}"),
        (raised_in_backward, CollectiveError(FAILED), "", FAILED),
        (raised_alone, CollectiveError(FAILED), GONE, f"{FAILED}; {GONE}"),
        (raised_alone, RuntimeError("closed"), GONE, f"rank 0: closed; {GONE}"),
        (raised_alone, RuntimeError("my own"), "", "my own"),
    ],
)
def test_a_failed_collective_is_a_collective_error(monkeypatch, raising, error, missing, message):
    monkeypatch.setattr(roll_call, "describe_missing_ranks", lambda: missing)
    monkeypatch.setattr(roll_call.dist, "get_rank", lambda: 0)
    with pytest.raises(RuntimeError) as raised, missing_ranks_named():
        raising(error)
    assert raised.type is (RuntimeError if message == "my own" else CollectiveError)
    assert str(raised.value) == message


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)


@pytest.fixture
def ranks(store):
    sides = [RollCall(store, rank, 3) for rank in range(3)]
    yield sides
    for side in sides:
        side.end()


def hang(side):
    """Stop beating without a word, as a rank that was killed or suspended."""
    side.has_ended = True
    side._beat = lambda: None
    side._wake.set()
    side._thread.join()


@pytest.mark.parametrize(
    ("state", "options", "missing"),
    [
        (None, {"is_inquiry": True}, [2]),
        (roll.LEFT, {}, [2]),  # the collective fails because that rank takes no part any more
        (roll.LEFT, {"is_inquiry": True}, []),
        (roll.LEFT, {"is_terminated": True}, []),
        ("terminated", {"is_terminated": True}, []),
        ("failed", {"is_terminated": True}, [2]),
    ],
)
def test_ranks_that_give_no_sign_of_life_are_missing(ranks, state, options, missing):
    ranks[2].end(state) if state else hang(ranks[2])
    found = ranks[0].call(grace_seconds=2, **options)
    assert found.missing == missing
    if not missing:
        assert [*found.places] == [0, 1]


def test_a_rank_that_has_not_come_yet_is_missing_only_once_something_has_failed(store):
    first = RollCall(store, 0, 2)
    assert first.call(grace_seconds=0.3, is_inquiry=True).missing == []
    assert first.call(grace_seconds=0.3).missing == [1]
    first.end()


@pytest.mark.slow("waits three times until a rank is missing")
def test_the_first_verdict_is_that_of_all_ranks_though_others_end_after_it(store, ranks):
    assert [side.is_first("late") for side in ranks] == [True, False, False]
    hang(ranks[2])
    assert ranks[0].call(grace_seconds=2).missing == [2]
    ranks[0].end()
    until(lambda: ranks[1].known)  # heard, so that it needs no store any more
    ranks[1]._asking = None
    assert ranks[1].call(grace_seconds=0.3).missing == [2]
    ranks[1].end()  # the next attempt with the same store looks for itself
    sides = [RollCall(store, rank, 3) for rank in range(3)]
    assert sides[0].call(grace_seconds=3).missing == []
    hang(sides[1])
    assert sides[0].call(grace_seconds=2).missing == [1]
    for side in sides:
        side.end()


HOST = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
print(store.port, flush=True)
while True:
    time.sleep(0.05)
"""


def test_a_rank_ends_while_its_call_waits_for_a_host_that_hangs(monkeypatch):
    monkeypatch.setattr(roll, "GRACE_SECONDS", 0.2)
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), 2, False)
        rank = RollCall(store, 0, 2)
        host.send_signal(signal.SIGSTOP)
        # The second call finds the first one still waiting for the store.
        assert [rank.call(grace_seconds=0.1) for _ in range(2)] == [None, None]
        ending = threading.Thread(target=rank.end, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()
    finally:
        host.kill()
        host.wait()


def test_attempts_see_only_their_own_keys_and_the_ranks_that_do_not_arrive_are_named(store):
    stores, limit = [store.clone() for _ in range(4)], timedelta(seconds=20)
    with ThreadPoolExecutor(4) as pool:
        for turn in range(3):
            made = list(pool.map(lambda r: store_of_attempt(stores[r], r, 4, limit), range(4)))
            assert not any(one.check(["address"]) for one in made)
            made[turn].set("address", str(turn))
            assert [one.get("address") for one in made] == [str(turn).encode()] * 4
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not arrive within 0:00:01"):
        store_of_attempt(stores[0], 0, 3, timedelta(seconds=1))
