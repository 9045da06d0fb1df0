"""A job for test_cluster.py: what each algorithm sends over its node's link, printed as JSON."""

import json

import torch
import torch.distributed as dist

from benchmarks.comm.network import own_link_bytes
from largebatch.comm import ALGORITHMS, Topology, TopologyError

SIZE_BYTES = 6 * 2**20


def sent_bytes(algorithm, topology):
    """Bytes that this node sent during one all-reduce, the least of three."""
    tensor = torch.ones(SIZE_BYTES // 4)
    algorithm.all_reduce(tensor, topology)  # connections are made
    seen = []
    for _ in range(3):
        dist.barrier()
        before = own_link_bytes().sent
        dist.barrier()
        algorithm.all_reduce(tensor, topology)
        dist.barrier()
        seen.append(own_link_bytes().sent - before)
        dist.barrier()
    return min(seen)  # whatever is sent again only adds


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
        everywhere = len(topology.nodes) * traffic.inter_bytes  # alike on all, unless it says so
        rows[name] = {
            "stated": traffic.inter_bytes,
            "stated_of_all": getattr(traffic, "total_inter_bytes", everywhere),
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
