"""Each attempt of a job gets a store of its own."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from largebatch.comm.failure.rendezvous import store_of_attempt

TIMEOUT = timedelta(seconds=20)


def clients(world_size):
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return server, [dist.TCPStore("127.0.0.1", server.port, None, False) for _ in range(world_size)]


def test_attempts_see_only_their_own_keys():
    server, stores = clients(4)
    with ThreadPoolExecutor(4) as pool:
        for turn in range(3):
            made = list(pool.map(lambda r: store_of_attempt(stores[r], r, 4, TIMEOUT), range(4)))
            assert not any(store.check(["address"]) for store in made)
            made[turn].set("address", str(turn))
            assert [store.get("address") for store in made] == [str(turn).encode()] * 4
    del server


def test_the_timeout_error_names_the_missing_ranks():
    server, stores = clients(1)
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not arrive within 0:00:01"):
        store_of_attempt(stores[0], 0, 3, timedelta(seconds=1))
    del server
