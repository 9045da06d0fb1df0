"""Predict the published points of scaling_points.py, and fit the constants that may be set."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.comm.published import paper_form, profile
from benchmarks.comm.scaling_points import POINTS, Point, Run, System
from largebatch.comm import (
    Cluster,
    Links,
    Nccl,
    Plan,
    Rule,
    StepTime,
    predict_plan,
    simulate,
    straggler_slowdown,
)
from largebatch.recipes.predict.presets import GPUS, INTER, INTRA, STRAGGLER_SIGMA

#: Standard deviations that are tried as the constant of the model.
SIGMAS = tuple(n / 1000 for n in range(61))

#: For each GPU whose t0 is a line through its base and a second point, the name of that point.
LINES = {"h100": "MLPerf 3.1, H100, 64 × 50", "a100": "MLPerf 2.0, A100, 1,024 × 35"}


@dataclass(frozen=True)
class Inputs:
    """What may be changed of a prediction.

    Attributes:
        name: the change, as text.
        latency: factor on all latencies.
        bandwidth: factor on all bandwidths.
        speed: factor on the throughput of a GPU.
        fixed: factor on the time per step that does not depend on the images.
        sigma: relative standard deviation of the ranks' times.
        fixed_seconds: time per step that does not depend on the images, in place of the preset's.
    """

    name: str = "as given"
    latency: float = 1.0
    bandwidth: float = 1.0
    speed: float = 1.0
    fixed: float = 1.0
    sigma: float = STRAGGLER_SIGMA
    fixed_seconds: float | None = None


#: Changes of single inputs, to see how much a prediction depends on each.
CHANGES = (
    Inputs("latencies × 2", latency=2.0),
    Inputs("latencies × 1/3", latency=1 / 3),
    Inputs("bandwidths × 0.6", bandwidth=0.6),
    Inputs("bandwidths × 1.25: line rate", bandwidth=1.25),
    Inputs("GPU 0.8 times as fast", speed=0.8),
    Inputs("GPU 1.25 times as fast", speed=1.25),
    Inputs("t0 × 0.5", fixed=0.5),
    Inputs("t0 × 1.5", fixed=1.5),
    Inputs("no stragglers", sigma=0.0),
    Inputs("stragglers × 2", sigma=2 * STRAGGLER_SIGMA),
)


def _nccl(system: System, inputs: Inputs) -> Nccl:
    intra, inter = INTRA[system.links[0]], INTER[system.links[1]]
    return Nccl(
        intra.bus_gbytes * inputs.bandwidth,
        inter.bus_gbytes * inputs.bandwidth,
        nvlink=system.links[0].startswith("nvlink"),
        nics=inter.nics,
        tree_gbytes=GPUS[system.gpu].tree_gbytes,
        intra_latency=inputs.latency,
        inter_latency=inputs.latency,
    )


def _rules(point: Point) -> tuple[Rule, ...]:
    if point.algorithm == "paper":
        return Rule("ring"), Rule("paper")
    if point.algorithm == "nccl":
        return (Rule("ring"),)
    return (Rule(point.algorithm, shape=point.shape),)


def _throughput(point: Point, run: Run, system: System, measured_on: int, inputs: Inputs) -> float:
    """Images per second of one GPU."""
    fixed = inputs.fixed_seconds
    if fixed is None:
        fixed = GPUS[system.gpu].fixed_seconds * inputs.fixed
    alone = run.rate * inputs.speed * straggler_slowdown(measured_on, inputs.sigma)
    step = StepTime.at(run.rate_images or run.images, alone, fixed).seconds(run.images)
    if run.gpus == 1:
        return run.images / step
    dtype = torch.float16 if point.half else torch.float32
    model = profile(point.model, dtype).scaled(step)
    nccl = _nccl(system, inputs)
    cluster = Cluster.of(
        run.gpus,
        system.per_node,
        nccl.links,
        # Only NCCL's own all-reduce is predicted by its model: the others were not built on it.
        nccl=nccl if point.algorithm == "nccl" else None,
        straggler_sigma=inputs.sigma,
    )
    return run.images / simulate(model, cluster, _plan(point, model, cluster)).step_seconds


def _plan(point: Point, model: object, cluster: Cluster) -> Plan:
    rules = _rules(point)
    if point.fused_bytes is None:
        return predict_plan(model, cluster, rules)  # type: ignore[arg-type]
    return Plan(rules, point.fused_bytes)


def predict(point: Point, inputs: Inputs | None = None) -> float:
    """Predict the efficiency of a point."""
    inputs = inputs or Inputs()
    with paper_form() if point.algorithm == "paper" else nullcontext():
        run = _throughput(point, point.run, point.system, point.base.gpus, inputs)
        where = point.base_system or point.system
        return run / _throughput(point, point.base, where, point.base.gpus, inputs)


def predict_without(point: Point) -> float:
    """Predict a point as the former model did: line rates, one algorithm, no t0, no stragglers."""
    dtype = torch.float16 if point.half else torch.float32

    def throughput(run: Run, system: System) -> float:
        if run.gpus == 1:
            return run.rate
        model = profile(point.model, dtype).scaled(run.images / run.rate)
        intra, inter = system.links
        links = Links(INTRA[intra].level, INTER[inter].level)
        cluster = Cluster.of(run.gpus, system.per_node, links)
        return run.images / simulate(model, cluster, _plan(point, model, cluster)).step_seconds

    with paper_form() if point.algorithm == "paper" else nullcontext():
        base = throughput(point.base, point.base_system or point.system)
        return throughput(point.run, point.system) / base


@dataclass(frozen=True)
class Fit:
    """The constants that the points allow.

    Attributes:
        sigma: relative standard deviation of the ranks' times.
        fixed_seconds: t0 by GPU of :data:`LINES`, in seconds.
        mean_error: mean error of the points that may set constants, from 0 to 1.
    """

    sigma: float
    fixed_seconds: dict[str, float]
    mean_error: float


@cache
def fit() -> tuple[Fit, ...]:
    """Fit the constants to the points that may set them, for each of :data:`SIGMAS`.

    For each sigma, t0 is what makes the second point of the GPU's line exact; the sigma with the
    smallest mean error is first in the result.
    """
    setting = [point for point in POINTS if point.sets]
    named = {point.name: point for point in setting}
    found = []
    for sigma in SIGMAS:
        fixed = {gpu: _fixed_seconds(named[name], sigma) for gpu, name in LINES.items()}
        errors = [
            abs(
                predict(p, Inputs(sigma=sigma, fixed_seconds=fixed.get(p.system.gpu))) - p.published
            )
            for p in setting
        ]
        found.append(Fit(sigma, fixed, sum(errors) / len(errors)))
    return tuple(sorted(found, key=lambda one: one.mean_error))


def _fixed_seconds(point: Point, sigma: float) -> float:
    """The t0 with which a point is predicted exactly, by bisection; 0 where it needs none."""
    low, high = 0.0, 0.9 * point.run.images / point.run.rate
    for _ in range(30):
        middle = (low + high) / 2
        predicted = predict(point, Inputs(sigma=sigma, fixed_seconds=middle))
        low, high = (middle, high) if predicted > point.published else (low, middle)
    return low
