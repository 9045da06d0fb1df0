"""What a rank does with a failure: watches, errors and roll calls, within one process."""

import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.futures import Future

from largebatch.comm import CollectiveError, StallWatch, missing_ranks_named
from largebatch.comm.failure import roll, roll_call
from largebatch.comm.failure.roll import RollCall


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Silent:
    """A roll call whose store does not answer; it ends in the given inquiry, if any."""

    rank = 1

    def __init__(self, ends_in=None, has_ended=False):
        self.inquiries, self.has_ended, self._ends_in = 0, has_ended, ends_in

    def call(self, **_):
        self.inquiries += 1
        self.has_ended = self.has_ended or self.inquiries == self._ends_in


@pytest.mark.parametrize("call", [Silent(ends_in=1), Silent(ends_in=2), Silent(has_ended=True)])
def test_a_watch_stops_when_its_rank_has_left_the_job(call):
    ended = []
    watch = StallWatch(call, ended.append, floor_seconds=0.05)
    try:
        watch._thread.join(5)
        assert not watch._thread.is_alive()
        assert ended == []
    finally:
        watch.close()


def test_a_watch_ends_a_rank_that_is_cut_off():
    ended = []
    watch = StallWatch(Silent(), ended.append, floor_seconds=0.05)
    try:
        until(lambda: ended)
    finally:
        watch.close()
    assert ended[0].endswith("the job's store does not answer: this rank is cut off")


class Late:
    """A roll call that all ranks answer."""

    rank, has_ended = 0, False

    def call(self, **_):
        return roll.Roll(1, [], {0: "wait (loop.py:1)"})


def test_a_watch_goes_on_when_its_line_cannot_be_shown():
    said = []

    def say(line):
        said.append(line)
        raise BrokenPipeError

    watch = StallWatch(Late(), said.append, say, floor_seconds=0.05)
    try:
        for step in range(3):
            watch.begin(step)
            watch.finish()
        watch.begin(3)
        until(lambda: len(said) > 1)
    finally:
        watch.close()


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
    ("raising", "error", "missing", "kind", "message"),
    [
        (
            raised_in_backward,
            CollectiveError(f"{FAILED}; {GONE}"),
            GONE,
            CollectiveError,
            f"{FAILED}; {GONE}",
        ),
        (raised_in_backward, CollectiveError(FAILED), GONE, CollectiveError, f"{FAILED}; {GONE}"),
        (raised_in_backward, CollectiveError(FAILED), "", CollectiveError, FAILED),
        (
            raised_alone,
            CollectiveError(f"{FAILED}; {GONE}"),
            GONE,
            CollectiveError,
            f"{FAILED}; {GONE}",
        ),
        (raised_alone, CollectiveError(FAILED), GONE, CollectiveError, f"{FAILED}; {GONE}"),
        (raised_alone, RuntimeError("closed"), GONE, CollectiveError, f"rank 0: closed; {GONE}"),
        (raised_alone, RuntimeError("my own"), "", RuntimeError, "my own"),
    ],
)
def test_a_failed_collective_is_a_collective_error(
    monkeypatch, raising, error, missing, kind, message
):
    monkeypatch.setattr(roll_call, "describe_missing_ranks", lambda: missing)
    monkeypatch.setattr(roll_call.dist, "get_rank", lambda: 0)
    with pytest.raises(RuntimeError) as raised, missing_ranks_named():
        raising(error)
    assert raised.type is kind
    assert str(raised.value) == message


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)


@pytest.fixture
def ranks(store):
    """Return the sides of three ranks, which answer."""
    sides = [RollCall(store, rank, 3) for rank in range(3)]
    yield sides
    for side in sides:
        side.end()


def keys_of(store):
    return dist.PrefixStore("largebatch/roll-call", store)


def stop_while_asking(store, number):
    """Do what a rank does that asks and is then suspended: wake all, and set no verdict."""
    assert keys_of(store).add(f"{number}/callers", 1) == 1
    for rank in range(3):
        keys_of(store).set(f"{number}/wake/{rank}", "")


@pytest.mark.parametrize("is_inquiry", [True, False])
def test_ranks_go_on_to_answer_when_the_one_that_asks_stops(monkeypatch, store, ranks, is_inquiry):
    monkeypatch.setattr(roll, "_LONGEST_VERDICT", timedelta(seconds=0.2))
    stop_while_asking(store, 1)
    until(lambda: keys_of(store).check([f"1/here/{rank}" for rank in range(3)]))
    time.sleep(1)  # longer than they wait for the verdict
    found = ranks[1].call(grace_seconds=1, is_inquiry=is_inquiry)
    assert (found.number, found.missing) == (2, [])


def test_a_call_waits_for_an_inquiry_that_is_under_way(store, ranks):
    ranks[2].end("in")  # as if it hung
    inquiry = threading.Thread(
        target=ranks[0].call, kwargs={"grace_seconds": 2, "is_inquiry": True}, daemon=True
    )
    inquiry.start()
    until(lambda: keys_of(store).check(["1/here/0", "1/here/1"]))
    found = ranks[0].call(grace_seconds=0.3)
    inquiry.join()
    assert found is not None
    assert found.missing == [2]


class Hung:
    """A store whose host cannot be reached."""

    def add(self, key, value):
        threading.Event().wait()


def test_a_call_ends_when_the_store_does_not_answer(ranks):
    ranks[0]._asking = Hung()
    # The second call finds the first one still waiting for the store.
    assert [ranks[0].call(grace_seconds=0.1) for _ in range(2)] == [None, None]


HOST = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_rank_ends_while_its_call_waits_for_a_host_that_hangs(monkeypatch):
    monkeypatch.setattr(roll, "GRACE_SECONDS", 0.2)
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), 2, False)
        rank = RollCall(store, 0, 2)
        host.send_signal(signal.SIGSTOP)
        assert rank.call(grace_seconds=0.1) is None
        ending = threading.Thread(target=rank.end, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()
    finally:
        host.kill()
        host.wait()


def test_a_rank_that_leaves_and_comes_back_leaves_no_thread(store):
    for ranks in ([0, 1], [0]):  # few, as some of torch's connections take seconds
        sides = [RollCall(store, rank, 2) for rank in ranks]
        for side in sides:
            side.end(roll.LEFT)
        assert not any(side._thread.is_alive() for side in sides)
    sides = [RollCall(store, rank, 2) for rank in range(2)]
    sides[1].end("in")  # as if it had died
    assert sides[0].call(grace_seconds=2).missing == [1]
    sides[0].end()


def test_an_inquiry_takes_no_verdict_of_an_earlier_one(store, ranks):
    keys_of(store).set("1/callers", "1")
    keys_of(store).set("1/verdict", "?2")  # rank 2 was suspended for a moment
    for rank in range(3):
        keys_of(store).set(f"1/wake/{rank}", "")
    until(lambda: all(side._number == 2 for side in ranks))
    found = ranks[0].call(grace_seconds=1, is_inquiry=True)
    assert (found.number, found.missing) == (2, [])


def test_an_inquiry_shares_the_verdict_of_one_under_way(store, ranks):
    stop_while_asking(store, 1)
    until(lambda: all(side._number == 2 for side in ranks))
    found = []
    inquiry = threading.Thread(
        target=lambda: found.append(ranks[1].call(grace_seconds=2, is_inquiry=True)), daemon=True
    )
    inquiry.start()
    until(lambda: int(keys_of(store).get("1/callers")) == 2)
    keys_of(store).set("1/verdict", "?2")
    inquiry.join()
    assert (found[0].number, found[0].missing) == (1, [2])


def test_a_rank_that_was_suspended_while_it_asked_looks_for_answers_once_more(ranks, monkeypatch):
    has, heard = ranks[0]._has, []

    def asked_after_the_grace(key):
        if "/here/" in key and not heard:
            heard.append(key)
            time.sleep(0.5)  # suspended, after a look that came before the answers
            return False
        return has(key)

    monkeypatch.setattr(ranks[0], "_has", asked_after_the_grace)
    assert ranks[0].call(grace_seconds=0.3).missing == []
