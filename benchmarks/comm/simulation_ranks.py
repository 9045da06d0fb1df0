"""One rank of simulation.py on the emulated cluster: tune, then measure what the fit has not seen,
which is other message sizes and whole steps of a DDP model.

    torchrun ... -m benchmarks.comm.simulation_ranks RESULT.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largebatch.comm import (
    Gradient,
    Measurement,
    Plan,
    Profile,
    Rule,
    Topology,
    Tuned,
    candidates,
    predict_seconds,
    register,
    simulate,
    tune,
)
from largebatch.comm.tuning.tune import fit_and_plan

CHUNK_BYTES = 2**20
#: Message sizes that are fitted, and sizes that are only predicted.
FITTED_BYTES = tuple(4**k for k in range(5, 13))  # 1 KiB to 16 MiB
HELD_OUT_BYTES = (3 * 2**19, 3 * 2**20, 6 * 2**20, 12 * 2**20)
BUDGET_SECONDS = 200.0
NEVER = 1e9  # no candidate is dropped, however far behind it is
STEPS = 5
THRESHOLD_BYTES = 4 * 2**20


def measure_profile(model: nn.Module, loss: Callable[[], Tensor], *, repeats: int) -> Profile:
    """Measure on the CPU when backward produces each gradient; medians after two warm-up steps."""
    parameters = dict(model.named_parameters())
    marks: dict[str, float] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: marks.__setitem__(name, time.perf_counter())
        )
        for name, parameter in parameters.items()
    ]
    steps = []
    for _ in range(2 + repeats):
        start = time.perf_counter()
        value = loss()
        between = time.perf_counter()
        value.backward()
        times = {name: mark - between for name, mark in marks.items()}
        steps.append((between - start, time.perf_counter() - between, times))
        model.zero_grad(set_to_none=True)
    for handle in handles:
        handle.remove()
    forward, backward, ready = zip(*steps[2:], strict=True)
    medians = {name: statistics.median(times[name] for times in ready) for name in marks}
    gradients = tuple(
        Gradient(name, parameters[name].nbytes, medians[name])
        for name in sorted(medians, key=medians.__getitem__)
    )
    last = max(statistics.median(backward), *medians.values())
    return Profile(gradients, statistics.median(forward), last)


def network() -> nn.Module:
    """Create eight layers with 2 MB of gradients each and little computation."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(720, 720) for _ in range(8)))


def step_seconds(batch: torch.Tensor, plans: list[Plan], topology: Topology) -> list[float]:
    """Measure the median time of a DDP step on the slowest rank for each plan, taking turns."""
    models = []
    for plan in plans:
        models.append(
            DistributedDataParallel(network(), **plan.ddp_options(), gradient_as_bucket_view=True)
        )
        register(models[-1], plan, topology)
    seconds: list[list[float]] = [[] for _ in plans]
    for step in range(STEPS + 2):  # DDP rebuilds its buckets after the first step
        for model, times in zip(models, seconds, strict=True):
            model.zero_grad(set_to_none=True)
            dist.barrier()
            start = time.perf_counter()
            model(batch).square().mean().backward()
            took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if step >= 2:
                times.append(float(took))
    return [statistics.median(times) for times in seconds]


def slowest_profile(batch: torch.Tensor) -> Profile:
    """Measure a step without communication on all ranks at once; scale it to the slowest rank."""
    model = network()
    dist.barrier()
    mine = measure_profile(model, lambda: model(batch).square().mean(), repeats=5)
    seconds = torch.tensor([mine.compute_seconds], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    box = [mine.scaled(float(seconds))]
    dist.broadcast_object_list(box)
    return box[0]


def labels(rule: Rule) -> dict[str, object]:
    return {"algorithm": rule.algorithm, "chunk_bytes": rule.chunk_bytes}


def compare(tuned: Tuned, held_out: list[Measurement]) -> list[dict[str, object]]:
    """Return measured and predicted times of messages that were not part of the fit."""
    return [
        {
            **labels(m.rule),
            "size_bytes": m.size_bytes,
            "measured_seconds": m.median_seconds,
            "repeats": len(m.seconds),
            "links_alone_seconds": predict_seconds(
                m.rule, m.size_bytes, tuned.cluster.topology, tuned.links
            ),
            "predicted_seconds": tuned.cluster.seconds(m.rule, m.size_bytes),
        }
        for m in held_out
    ]


def steps(tuned: Tuned, topology: Topology, rules: tuple[Rule, ...]) -> list[dict[str, object]]:
    """Return measured and predicted times of whole steps."""
    batch = torch.randn(64, 720, generator=torch.Generator().manual_seed(dist.get_rank()))
    profile = slowest_profile(batch)
    plans = [Plan((rule,), THRESHOLD_BYTES) for rule in rules]
    rows = []
    for plan, measured in zip(plans, step_seconds(batch, plans, topology), strict=True):
        predicted = simulate(profile, tuned.cluster, plan)
        rows.append(
            {
                **labels(plan.rules[0]),
                "gradient_bytes": profile.size_bytes,
                "buckets": len(predicted.reductions),
                "compute_seconds": profile.compute_seconds,
                "measured_seconds": measured,
                "predicted_seconds": predicted.step_seconds,
            }
        )
    return rows


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    topology = Topology.from_environment()
    # Measure all sizes in one race, so that both parts see the machine in the same state; then fit
    # the links and make the plan from the one part only.
    measurements = tune(
        topology,
        budget_seconds=BUDGET_SECONDS,
        sizes_bytes=(*FITTED_BYTES, *HELD_OUT_BYTES),
        chunks_bytes=(CHUNK_BYTES,),
        far_behind=NEVER,
    ).measurements
    tuned = fit_and_plan([m for m in measurements if m.size_bytes in FITTED_BYTES], topology)
    held_out = [m for m in measurements if m.size_bytes in HELD_OUT_BYTES]
    rules = candidates(topology, chunks_bytes=(CHUNK_BYTES,))
    result = {
        "links": {
            "intra": tuned.links.intra and vars(tuned.links.intra),
            "inter": tuned.links.inter and vars(tuned.links.inter),
            "host_seconds_per_byte": tuned.links.host_seconds_per_byte,
        },
        "fit_error": tuned.fit_error,
        "notes": tuned.notes,
        "messages": compare(tuned, held_out),
        "steps": steps(tuned, topology, rules),
    }
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1))
    dist.barrier()
    dist.destroy_process_group()
    if os.environ.get("RANK") == "0":
        print("done", flush=True)


if __name__ == "__main__":
    main()
