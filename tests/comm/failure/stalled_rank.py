"""One of three ranks that make steps of an all-reduce; run as a program, or by make_steps().

    python stalled_rank.py RANK HOST PORT FOLDER

As RANK -1 it hosts the store of the ranks, as torchrun's agent does. A rank appends to
FOLDER/said-RANK: ``step N`` for each step, ``said LINE`` and ``ended LINE``. Rank 2 sleeps before
step 5 for as many seconds as FOLDER/late says.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from largebatch.comm import StallWatch, join_roll_call

STEPS = 250


def be_late(seconds):
    time.sleep(seconds)


def main(rank, host, port, folder):
    if rank < 0:
        server = dist.TCPStore(host, port, 3, True, wait_for_workers=False)
        time.sleep(600)
        del server
    torch.set_num_threads(1)
    store = dist.TCPStore(host, port, 3, False)
    timeout = timedelta(minutes=10)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    make_steps(rank, folder)


def make_steps(rank, folder):
    said = open(Path(folder) / f"said-{rank}", "a", buffering=1)  # noqa: SIM115

    def end(line):
        said.write(f"ended {line}\n")
        os._exit(1)

    def say(line):
        said.write(f"said {line}\n")

    watch = StallWatch(join_roll_call(), end, say, floor_seconds=1.5, grace_seconds=3)
    late = Path(folder) / "late"
    for step in range(STEPS):
        watch.begin(step)
        if step == 5 and rank == 2 and late.exists():
            be_late(float(late.read_text()))
        try:
            dist.all_reduce(torch.ones(2))
        except RuntimeError:  # the other survivor has been ended first
            time.sleep(10)  # for the watch of this rank to end it
            raise
        watch.finish()
        said.write(f"step {step}\n")
        time.sleep(0.02)
    watch.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
