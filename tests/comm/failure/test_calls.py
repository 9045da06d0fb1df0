"""Roll calls and watches of several ranks that are threads of one process."""

import time

import pytest

from largebatch.comm import StallWatch


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
