"""A job for test_cluster.py: prints as JSON the bytes each algorithm sends over a node's link."""

import json

import torch
import torch.distributed as dist

from benchmarks.comm.network import own_link_bytes
from largebatch.comm import ALGORITHMS, Topology, TopologyError

SIZE_BYTES = 6 * 2**20


def sent_bytes(algorithm, topology):
    """Bytes that this node sends during one all-reduce: the minimum of three."""
    tensor = torch.ones(SIZE_BYTES // 4)
    algorithm.all_reduce(tensor, topology)  # sets up connections
    seen = []
    for _ in range(3):
        dist.barrier()
        before = own_link_bytes().sent
        dist.barrier()
        algorithm.all_reduce(tensor, topology)
        dist.barrier()
        seen.append(own_link_bytes().sent - before)
        dist.barrier()
    return min(seen)  # retransmissions only add bytes


def main():
    dist.init_process_group("gloo")
    topology = Topology.from_environment()
    rows = {}
    for name, algorithm in ALGORITHMS.items():
        try:
            algorithm.check(topology)
        except TopologyError:
            continue
        traffic = algorithm.traffic(SIZE_BYTES, topology)
        rows[name] = {
            "stated": traffic.inter_bytes,
            "stated_of_all": traffic.total_inter_bytes,
            "sent": sent_bytes(algorithm, topology),
        }
    everyone = [None] * topology.world_size
    dist.all_gather_object(everyone, rows)
    if topology.rank == 0:
        leaders = [node[0] for node in topology.nodes]
        print(
            "LINKS", json.dumps({"nodes": topology.nodes, "rows": [everyone[r] for r in leaders]})
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
