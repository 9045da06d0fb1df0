"""The link of one node gets slow while a run trains: the run says so, and names the node."""

import ctypes
import os
import time

import pytest
import torch

from benchmarks.comm.network import Network, missing
from largebatch.recipes.train import main
from largebatch.recipes.training.metrics import read_metrics
from tests.ranks import CONTEXT
from tests.recipes.runs import BASE

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow("trains on three emulated machines, whose network is slow"),
]

SECONDS = 240


@pytest.fixture
def _network_or_skip():
    if reason := missing():
        pytest.skip(reason)


def _train(namespace, environment, arguments, out):
    """Run the trainer in a network namespace, without the slow imports of a new program."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        assert libc.setns(file.fileno(), 0x40000000) == 0  # CLONE_NEWNET
    os.environ.update(environment)
    file = os.open(out, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    main(arguments)


@pytest.mark.usefixtures("_network_or_skip")
def test_a_slow_link_is_told_with_its_node(photos, tmp_path):
    keys = ["digits", *BASE, f"data.path={photos}", f"run_dir={tmp_path / 'run'}", "batch_size=12"]
    keys += ["epochs=4000", "evaluate_every=null", "comm.algorithm=null"]
    keys += ["data.backend=torchvision", "log_every=1"]
    with Network(3) as network:

        def start(rank):
            environment = {
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": network.address(0),
                "MASTER_PORT": "29513",
                "WORLD_SIZE": "3",
                "RANK": str(rank),
                "GROUP_RANK": str(rank),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "3",  # as they share the cores of this machine
            }
            arguments = (network.namespace(rank), environment, keys, tmp_path / f"out-{rank}")
            process = CONTEXT.Process(target=_train, args=arguments)
            process.start()
            return process

        def said():
            path = tmp_path / "out-0"
            return path.read_text() if path.exists() else ""

        def until(condition):
            end = time.monotonic() + SECONDS
            while not condition():
                assert time.monotonic() < end, said()
                assert all(process.is_alive() for process in ranks), said()
                time.sleep(0.1)

        ranks = [start(rank) for rank in range(3)]
        try:
            until(lambda: len(read_metrics(tmp_path / "run")) > 20)
            before = said()
            network.shape(4, node=2)  # a step then sends for seconds
            until(lambda: "is slow" in said())
        finally:
            for process in ranks:
                process.kill()
                process.join()
    assert "is slow" not in before
    (line,) = [line for line in said().splitlines() if "is slow" in line]
    assert line.startswith("largebatch: warning: every rank waits for the all-reduce for ")
    assert "; steps take " in line
    assert "; the link of node 2 (" in line
    assert ") is slow: the nodes receive " in line
