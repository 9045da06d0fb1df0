"""A replica of the torchft example dies: the other goes on, with the updates of a whole run."""

import os
import runpy
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.ranks import CONTEXT

pytestmark = pytest.mark.slow("trains three times in processes of their own")

EXAMPLE = Path(__file__).parents[2] / "examples" / "with_torchft.py"
SECONDS = 300


def _replica(address, folder, name):
    os.environ["TORCHFT_LIGHTHOUSE"] = address
    file = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # so that the order of sums makes no difference
    accuracy, network = runpy.run_path(str(EXAMPLE))["main"]()
    torch.save((accuracy, network.state_dict()), folder / f"{name}.pt")


def start(address, folder, *names):
    found = [CONTEXT.Process(target=_replica, args=(address, folder, name)) for name in names]
    for process in found:
        process.start()
    return found


def steps(folder, name):
    """Return step and number of processes of each line that a replica has written."""
    path = folder / name
    lines = path.read_text().splitlines() if path.exists() else []
    words = [line.split() for line in lines if line.startswith("step ") and "processes" in line]
    return [(int(word[1].rstrip(":")), int(word[4])) for word in words]


def test_a_replica_that_dies_changes_nothing_for_the_other(tmp_path):
    coordination = pytest.importorskip("torchft.coordination")
    assert "more than 95 % accuracy" in EXAMPLE.read_text()

    def lighthouse():
        return coordination.LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000
        )

    server = lighthouse()
    (alone,) = start(server.address(), tmp_path, "alone")
    alone.join(SECONDS)
    server.shutdown()
    server = lighthouse()
    survivor, victim = replicas = start(server.address(), tmp_path, "survivor", "victim")
    try:
        end = time.monotonic() + SECONDS
        while len([s for s in steps(tmp_path, "victim") if s[1] == 2]) < 10:
            assert time.monotonic() < end
            assert survivor.is_alive()
            time.sleep(0.01)
        os.kill(victim.pid, signal.SIGKILL)
        survivor.join(SECONDS)
    finally:
        for process in replicas:
            process.kill()
            process.join()
        server.shutdown()
    said = (tmp_path / "survivor").read_text()
    assert (alone.exitcode, survivor.exitcode) == (0, 0), said[-3000:]

    members = dict(steps(tmp_path, "survivor"))
    assert sorted(members)[-1] == 175
    assert {2, 1} <= set(members.values())
    assert members[175] == 1
    whole, weights = torch.load(tmp_path / "alone.pt")
    accuracy, others = torch.load(tmp_path / "survivor.pt")
    assert whole == accuracy
    assert accuracy > 0.95
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-6, atol=1e-9)
