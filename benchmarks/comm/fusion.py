"""Claim: fusing ResNet-50's small gradients is faster than an all-reduce for each of the 161.

    python -m benchmarks.comm.fusion [--ranks 4] [--repeats 15]

All-reduces the gradients of torchvision's ResNet-50 (102 MB in FP32, in the order of backward)
between processes on this machine with gloo: each tensor separately, fused by the paper's rule at
several thresholds, in DDP's default buckets of 25 MiB, in two segments as in the paper for 1024
GPUs, and in one piece. There is no computation to overlap with, so the result is the saving of
fusion alone, with the copies into and out of fused buffers included. Variants take turns, so that
other load on the machine affects all of them; repeats in which other processes used the CPU are
measured again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor

from largebatch.comm import Rule, Topology, all_reduce, fuse
from largebatch.recipes.training.summary import processor, versions

RESULTS = Path(__file__).parents[1] / "results"
SEPARATE = "161 separate"


def variants(sizes: list[int]) -> dict[str, list[list[int]]]:
    """Return the segments of each variant, as indices of gradients in the order of backward."""
    everything = list(range(len(sizes)))
    # The paper cuts between layers 76 and 77 without saying what it counts: here, tensors.
    cut = len(sizes) - 76
    return {
        SEPARATE: [[i] for i in everything],
        "paper's rule, 64 KiB": fuse(sizes, 64 * 2**10),
        "paper's rule, 1 MiB": fuse(sizes, 2**20),
        "paper's rule, 4 MiB": fuse(sizes, 4 * 2**20),
        "buckets of 25 MiB": fuse(sizes, 25 * 2**20, contiguous=True),
        "two segments": [everything[:cut], everything[cut:]],
        "one piece": [everything],
    }


def reduce_all(
    gradients: list[Tensor],
    segments: list[list[int]],
    buffers: list[Tensor],
    topology: Topology,
) -> None:
    """All-reduce segment by segment, through a buffer if a segment has several gradients."""
    rule = Rule("ring")
    for segment, buffer in zip(segments, buffers, strict=True):
        if len(segment) == 1:
            all_reduce(gradients[segment[0]], topology, rule)
            continue
        parts = [gradients[i] for i in segment]
        torch.cat(parts, out=buffer)
        all_reduce(buffer, topology, rule)
        for part, summed in zip(parts, buffer.split([p.numel() for p in parts]), strict=True):
            part.copy_(summed)


def busy_seconds() -> float:
    """CPU time that all processes on this machine have used so far, in seconds."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(sizes: list[int], repeats: int, foreign_share: float) -> dict[str, Any]:
    """Measure each variant's time on the slowest rank for each repeat; the same on all ranks."""
    topology = Topology.of(dist.get_world_size(), 1, dist.get_rank())
    gradients = [torch.ones(size // 4) for size in sizes]
    chosen = variants(sizes)
    buffers = {
        name: [
            torch.ones(sum(sizes[i] for i in segment) // 4 if len(segment) > 1 else 0)
            for segment in segments
        ]
        for name, segments in chosen.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    rejected = 0
    for turn in range(4 * repeats + 1):
        for name, segments in chosen.items():
            for gradient in gradients:
                gradient.fill_(1)
            dist.barrier()
            own, busy, start = time.process_time(), busy_seconds(), time.perf_counter()
            reduce_all(gradients, segments, buffers[name], topology)
            elapsed = time.perf_counter() - start
            dist.barrier()
            used = torch.tensor([time.process_time() - own])
            dist.all_reduce(used)
            foreign = (busy_seconds() - busy - used.item()) / (elapsed * (os.cpu_count() or 1))
            slowest = torch.tensor([elapsed, foreign], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            assert all(bool((g == dist.get_world_size()).all()) for g in gradients), name
            if turn == 0 or len(seconds[name]) == repeats:  # the first turn sets up connections
                continue
            if slowest[1] > foreign_share:
                rejected += 1
            else:
                seconds[name].append(slowest[0].item())
        if all(len(times) == repeats for times in seconds.values()):
            break
    return {"seconds": seconds, "rejected": rejected}


def _rank(
    rank: int, world_size: int, folder: str, arguments: tuple[Any, ...], results: Any
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    measured = measure(*arguments)
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| gradients | all-reduces | median, ms | range, ms | speed-up over separate |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        low, high = row["spread_ms"]
        lines.append(
            f"| {row['name']} | {row['all_reduces']} | {row['median_ms']:.0f} "
            f"| {low:.0f} to {high:.0f} | {row['speedup']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--foreign-share",
        type=float,
        default=0.1,
        help="largest share of CPU time that other processes may use in a repeat that counts",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    parameters = torchvision.models.resnet50().parameters()
    sizes = [4 * parameter.numel() for parameter in parameters][::-1]
    arguments = (sizes, options.repeats, options.foreign_share)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_rank,
                args=(rank, options.ranks, folder, arguments, results),
            )
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        measured = None
        while measured is None:
            try:
                measured = results.get(timeout=1)
            except queue.Empty:
                if any(process.exitcode for process in ranks):
                    for process in ranks:
                        process.kill()
                    raise SystemExit("a rank failed; its error is printed above") from None
        for process in ranks:
            process.join()
    incomplete = {n: len(t) for n, t in measured["seconds"].items() if len(t) < options.repeats}
    if incomplete:
        raise SystemExit(
            f"the machine is too busy: fewer than {options.repeats} valid repeats: {incomplete}"
        )
    medians = {name: statistics.median(times) for name, times in measured["seconds"].items()}
    rows = [
        {
            "name": name,
            "all_reduces": len(variants(sizes)[name]),
            "median_ms": round(1e3 * medians[name], 1),
            "spread_ms": [round(1e3 * min(times), 1), round(1e3 * max(times), 1)],
            "speedup": round(medians[SEPARATE] / medians[name], 3),
        }
        for name, times in measured["seconds"].items()
    ]
    result = {
        "claim": "fusing ResNet-50's small gradients beats an all-reduce for each of the 161",
        "date": date.today().isoformat(),
        "machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0))},
        "versions": versions(),
        "ranks": options.ranks,
        "size_bytes": sum(sizes),
        "repeats": options.repeats,
        "foreign_share": options.foreign_share,
        "rejected": measured["rejected"],
        "rows": rows,
        "seconds": measured["seconds"],
    }
    options.out.mkdir(exist_ok=True, parents=True)
    (options.out / "fusion.json").write_text(json.dumps(result, indent=2) + "\n")
    about = f"{options.ranks} ranks on gloo over loopback, {options.repeats} repeats, "
    about += f"{result['date']}, {processor()}, {len(os.sched_getaffinity(0))} cores, "
    about += ", ".join(f"{package} {number}" for package, number in versions().items())
    (options.out / "fusion.md").write_text(f"{table(rows)}\n{about}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
