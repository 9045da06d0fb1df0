"""Predict the published points of scaling_points.py, and fit the constants that may be set."""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.comm.published import paper_form, profile
from benchmarks.comm.scaling_points import LINES, POINTS, Point, Run
from largebatch.comm import (
    Cluster,
    Nccl,
    Plan,
    Profile,
    Rule,
    StepTime,
    predict_plan,
    simulate,
    straggler_slowdown,
)
from largebatch.recipes.predict.presets import GPUS, INTER, INTRA, STRAGGLER_SIGMA

#: Standard deviations that are tried as the constant of the model.
SIGMAS = tuple(n / 1000 for n in range(0, 61, 2))


@dataclass(frozen=True)
class Fit:
    """The constants that the points allow."""

    sigma: float  # relative standard deviation of the ranks' times
    fixed_seconds: dict[str, float]  # t0 by GPU of :data:`LINES`, in seconds
    mean_error: float  # mean error of the points that may set constants, from 0 to 1


def predict(
    point: Point, sigma: float = STRAGGLER_SIGMA, fixed_seconds: float | None = None
) -> float:
    """Predict the efficiency of a point, by default with the constants of the presets."""
    fixed = GPUS[point.system.gpu].fixed.seconds if fixed_seconds is None else fixed_seconds
    with paper_form() if point.algorithm == "paper" else nullcontext():
        run = _throughput(point, point.run, sigma, fixed)
        return run / _throughput(point, point.base, sigma, fixed)


def _throughput(point: Point, run: Run, sigma: float, fixed_seconds: float) -> float:
    """Images per second of one GPU."""
    alone = run.rate * straggler_slowdown(point.base.gpus, sigma)
    step = StepTime.at(run.rate_images or run.images, alone, fixed_seconds).seconds(run.images)
    if run.gpus == 1:
        return run.images / step
    model = profile(point.model, torch.float16 if point.half else torch.float32).scaled(step)
    intra, inter = (
        table[name] for table, name in zip((INTRA, INTER), point.system.links, strict=True)
    )
    nccl = Nccl(
        intra.bus_gbytes,
        inter.bus_gbytes,
        nvlink=point.system.links[0].startswith("nvlink"),
        nics=inter.nics,
        tree_gbytes=GPUS[point.system.gpu].tree_gbytes,
    )
    cluster = Cluster.of(
        run.gpus,
        point.system.per_node,
        nccl.links,
        # Only NCCL's own all-reduce is predicted by its model: the others were not built on it.
        nccl=nccl if point.algorithm == "nccl" else None,
        straggler_sigma=sigma,
    )
    return run.images / simulate(model, cluster, _plan(point, model, cluster)).step_seconds


def _plan(point: Point, model: Profile, cluster: Cluster) -> Plan:
    rules = (Rule("ring"),)
    if point.algorithm == "paper":
        rules = (Rule("ring"), Rule("paper"))
    elif point.algorithm != "nccl":
        rules = (Rule(point.algorithm, shape=point.shape),)
    if point.fused_bytes is None:
        return predict_plan(model, cluster, rules)
    return Plan(rules, point.fused_bytes)


@cache
def fit() -> tuple[Fit, ...]:
    """Fit the constants to the points that may set them, for each of :data:`SIGMAS`.

    For each sigma, t0 is what makes the points of the GPU's line exact, on average; the sigma with
    the smallest mean error is first in the result.
    """
    setting = [point for point in POINTS if point.sets]
    found = []
    for sigma in SIGMAS:
        fixed = {
            gpu: statistics.fmean(
                _fixed_seconds(point, sigma)
                for point in POINTS
                if point.name.startswith(tuple(f"MLPerf {name}, " for name in names))
            )
            for gpu, names in LINES.items()
        }
        errors = [
            abs(predict(point, sigma, fixed.get(point.system.gpu)) - point.published)
            for point in setting
        ]
        found.append(Fit(sigma, fixed, statistics.fmean(errors)))
    return tuple(sorted(found, key=lambda one: one.mean_error))


def _fixed_seconds(point: Point, sigma: float) -> float:
    """The t0 with which a point is predicted exactly, by bisection; 0 where it needs none."""
    low, high = 0.0, 0.9 * point.run.images / point.run.rate
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if predict(point, sigma, middle) > point.published else (low, middle)
        )
    return low
