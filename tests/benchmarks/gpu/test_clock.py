"""How long a run on a GPU may be measured, with a device that is not there."""

import pytest
import torch

from benchmarks.gpu import clock


class Event:
    """An event of a device that has always reached it, or never."""

    def __init__(self, reached):
        self._reached = reached

    def record(self):
        pass

    def query(self):
        return self._reached

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 5.0


@pytest.mark.parametrize(
    ("host_is_ahead", "sleeps"), [(True, [0.02]), (False, [0.02, 0.06, 0.18, 0.2])]
)
def test_the_device_sleeps_longer_until_the_host_is_ahead_but_not_without_end(
    monkeypatch, host_is_ahead, sleeps
):
    slept, now = [], [0.0]
    monkeypatch.setattr(clock, "_events", lambda: (Event(not host_is_ahead), Event(False)))
    monkeypatch.setattr(clock, "synchronize", lambda device: None)
    monkeypatch.setattr(clock, "sleep", lambda seconds, device: slept.append(seconds))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def run():  # a host whose queue is full waits until the device has slept
        now[0] += 0.01 if host_is_ahead else slept[-1]

    host, device = clock.host_and_device_seconds(run, torch.device("cuda"), 0.02)
    assert slept == pytest.approx(sleeps)
    assert host == pytest.approx(0.01 if host_is_ahead else 0.02)  # not the longest sleep
    assert device == 0.005
    slept.clear()
    clock.host_and_device_seconds(run, torch.device("cuda"), 44.0)
    assert slept == [clock.MOST_AHEAD_SECONDS]
