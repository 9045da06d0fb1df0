"""One rank of all_reduce.py: runs the contenders in turn; rank 0 writes their times.

Contenders sum the gradients of ResNet-50, flattened in the order of backward, over all ranks. The
time of a repeat is that of its slowest rank. A repeat is rejected if other processes used too much
of the processors meanwhile.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.comm.all_reduce import Job
from largebatch import comm
from largebatch.comm import ALGORITHMS, Plan, PlanError, Rule, Topology, TopologyError

#: Largest share of the time of all processors that other processes may use during a repeat.
FOREIGN_SHARE = 0.1
#: Chunk size of the contenders with overlapped phases that do not follow the plan.
CHUNK_BYTES = 4 * 2**20
#: Compute time of the step that the plan is tuned for: short, so that little of it is hidden.
_STEP_SECONDS = 0.3
_CONTROL = timedelta(seconds=300)


@dataclass
class Contender:
    """A way to sum the gradients."""

    name: str  # name in the results
    run: Callable[[Tensor], None]  # function that sums a 1-d tensor over the ranks in place
    weight: int = 1  # number of repeats for each repeat of a contender with weight 1
    repeats: list[dict[str, Any]] = field(default_factory=list)  # results so far


def gradient_sizes() -> list[int]:
    """Return the number of elements of ResNet-50's 161 gradients, last layer first."""
    return [p.numel() for p in reversed(_parameters())]


def _parameters() -> list[Tensor]:
    with torch.device("meta"):
        return list(timm.create_model("resnet50").parameters())


def bucket_sizes(limits_bytes: Sequence[int]) -> list[int]:
    """Return the number of elements of DDP's buckets; the last limit applies to all that follow."""
    backwards = list(reversed(_parameters()))
    buckets, _ = dist._compute_bucket_assignment_by_size(backwards, list(limits_bytes))
    return [sum(backwards[i].numel() for i in bucket) for bucket in buckets]


def contenders(plan: Plan, topology: Topology) -> tuple[list[Contender], dict[str, float]]:
    """Return the contenders that the topology supports, and each algorithm's bytes over a link."""
    default = bucket_sizes([dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20])
    fused = bucket_sizes(plan.bucket_limits)
    half = replace(plan, rules=tuple(replace(r, wire_dtype="fp16") for r in plan.rules))
    sizes = gradient_sizes()
    found = [
        Contender("DDP default", _flat(topology, default), 3),
        Contender("plan, fused", _planned(plan, topology, fused), 3),
        Contender("plan, fused, fp16", _planned(half, topology, fused), 3),
        Contender("plan, one piece", _planned(plan, topology, [sum(sizes)])),
        Contender("plan, per tensor", _planned(plan, topology, sizes)),
        Contender("DDP default, fp16", _flat(topology, default, torch.float16)),
        Contender("ring, per tensor", _flat(topology, sizes)),
    ]
    crossing = {}
    for name, algorithm in ALGORITHMS.items():
        try:
            algorithm.check(topology)
        except TopologyError:
            continue
        crossing[name] = algorithm.traffic(4 * sum(sizes), topology).inter_bytes
        rules = {name: Rule(name)}
        with suppress(PlanError):  # raised if the algorithm has no phases to overlap
            rules[f"{name}, chunks"] = Rule(name, chunk_bytes=CHUNK_BYTES)
        for title, rule in rules.items():
            found.append(Contender(title, _planned(Plan((rule,)), topology, [sum(sizes)])))
    return found, crossing


def _flat(
    topology: Topology, sizes: Sequence[int], wire: torch.dtype | None = None
) -> Callable[[Tensor], None]:
    """Reduce as DDP does without a hook or with fp16_compress_hook: all buckets at once."""

    def run(gradients: Tensor) -> None:
        pending = []
        for bucket in gradients.split(list(sizes)):
            sent = bucket if wire is None else bucket.to(wire)
            work = dist.all_reduce(sent, group=topology.groups.world, async_op=True)
            pending.append((bucket, sent, work))
        for bucket, sent, work in pending:
            work.wait()
            if sent is not bucket:
                bucket.copy_(sent)

    return run


def _planned(plan: Plan, topology: Topology, sizes: Sequence[int]) -> Callable[[Tensor], None]:
    """Reduce as the hook does: on a thread, unless the plan is DDP's own method."""
    if len(sizes) > 1 and all(replace(r, max_bytes=None) == Rule("ring") for r in plan.rules):
        return _flat(topology, sizes)
    thread = ThreadPoolExecutor(1)

    def run(gradients: Tensor) -> None:
        pending = [
            thread.submit(comm.all_reduce, bucket, topology, plan.rule_for(4 * bucket.numel()))
            for bucket in gradients.split(list(sizes))
        ]
        for summed in pending:
            summed.result()

    return run


class Arena:
    """The ranks and the tensor that they sum."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        # Integers whose sums are exact even in half precision.
        self._own = torch.arange(sum(gradient_sizes()), dtype=torch.int32).remainder_(64).float()
        self._gradients = torch.empty_like(self._own)
        p = topology.world_size
        self._sum = p * self._own + p * (p - 1) / 2
        self._own += topology.rank

    def repeat(self, contender: Contender) -> dict[str, Any]:
        """Run a contender once; all ranks return the same result."""
        self._gradients.copy_(self._own)
        dist.barrier()
        before, machine = resource.getrusage(resource.RUSAGE_SELF), _machine_seconds()
        start = time.perf_counter()
        contender.run(self._gradients)
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        mine = (seconds, user, system)
        everyone: list[Any] = [None] * self.topology.world_size
        dist.all_gather_object(everyone, mine)
        busy = [now - then for now, then in zip(_machine_seconds(), machine, strict=True)]
        if not contender.repeats and not torch.equal(self._gradients, self._sum):
            raise RuntimeError(f"{contender.name}: the sum is wrong")
        took = max(one[0] for one in everyone)
        users, systems = sum(one[1] for one in everyone), sum(one[2] for one in everyone)
        # Interrupts are charged to whichever process was running, so system time is less certain.
        foreign = max(busy[0] - users, busy[0] + busy[1] - users - systems, 0.0) + busy[2]
        share = foreign / (took * len(os.sched_getaffinity(0)))
        judged = [{
            "seconds": round(took, 4),
            "processor_seconds": round(users + systems, 3),
            "foreign_share": round(share, 3),
            "rejected": share > FOREIGN_SHARE,
        }]  # fmt: skip
        dist.broadcast_object_list(judged, 0)  # the other ranks read the clock at another time
        return judged[0]


def _machine_seconds() -> tuple[float, float, float]:
    """Return processor seconds since boot: in user mode, in the kernel, and stolen by the host."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, _, _, steal = (int(f) / os.sysconf("SC_CLK_TCK") for f in fields[:8])
    return user + nice, system, steal


def next_of(entrants: Sequence[Contender], left_seconds: float) -> int | None:
    """Return the next contender: the one with fewest repeats, by weight, that fits in the time."""

    def had(index: int) -> float:
        rejected = sum(r["rejected"] for r in entrants[index].repeats)
        return (len(entrants[index].repeats) - rejected / 2) / entrants[index].weight

    fits = [
        index
        for index, entrant in enumerate(entrants)
        if not entrant.repeats
        or statistics.median(r["seconds"] for r in entrant.repeats) < left_seconds
    ]
    return min(fits, key=lambda index: (bool(entrants[index].repeats), had(index)), default=None)


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    dist.init_process_group("gloo", timeout=_CONTROL)
    topology = Topology.from_environment()
    with torch.device("meta"):
        images = torch.empty(2, 3, 224, 224)
        step = comm.estimate_profile(timm.create_model("resnet50"), [images], _STEP_SECONDS)
    tuned = comm.tune(
        topology, budget_seconds=job.tune_seconds, race_seconds=job.race_seconds, profile=step
    )
    plan = tuned.plan
    plan.check(topology)
    found, crossing = contenders(plan, topology)
    needs = {name: size / job.link_bytes_per_second for name, size in crossing.items()}
    left_out = {name: s for name, s in needs.items() if s > job.longest_seconds}
    entrants = [c for c in found if c.name.split(",")[0] not in left_out]
    rules = {Rule(entrant.name) for entrant in entrants if entrant.name in ALGORITHMS}
    for rule in [*sorted(rules, key=lambda r: r.algorithm), *plan.rules]:
        comm.all_reduce(torch.ones(2**18), topology, rule)  # sets up connections
    arena = Arena(topology)
    until = time.monotonic() + job.budget_seconds
    while True:
        turn = [next_of(entrants, until - time.monotonic())]
        dist.broadcast_object_list(turn, 0)
        if turn[0] is None:
            break
        entrants[turn[0]].repeats.append(arena.repeat(entrants[turn[0]]))
    if topology.rank == 0:
        result = {
            "gradients": len(gradient_sizes()),
            "bytes": 4 * sum(gradient_sizes()),
            "plan": asdict(plan),
            "race": tuned.final and asdict(tuned.final),
            "bucket_bytes": [4 * size for size in bucket_sizes(plan.bucket_limits)],
            "left_out_seconds": left_out,
            "contenders": {c.name: c.repeats for c in entrants},
        }
        Path(job.result).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
