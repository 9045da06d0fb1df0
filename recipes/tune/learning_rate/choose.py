"""Which settings come next: guesses, points that fill the range, then those of a Gaussian process.

The process (Optuna's ``GPSampler``) sees the ranks of the results, as normal quantiles (Salinas et
al. 2020, arXiv 1909.13595): a trial that diverged is the worst one, however bad its accuracy was.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .space import Dimension, Settings, evenly, narrowed
from .trials import Metric, Tried, score

#: Points that fill the range, for each dimension.
POINTS = 4
#: Settings of the coarse stage that are trained at full length.
REPEATED = 3
#: The fine stage stays within this factor of the best setting.
NARROW = 4.0
#: In the stage that begins a search, points and suggestions stay below this many times the lowest
#: rate that diverged. A longer warm-up may allow for somewhat higher ones.
ABOVE_DIVERGED = 2.0


def next_settings(
    stage_trials: Sequence[Tried],
    coarse: Sequence[Tried],
    space: Sequence[Dimension],
    guesses: Sequence[Settings],
    metric: Metric,
    seed: int = 0,
) -> Settings:
    """Return settings for the next trial of a stage, which no trial of it has had.

    Args:
        stage_trials: Trials of the stage so far, of all workers.
        coarse: Trials of the coarse stage where this is the fine one after it, else none.
        space: The dimensions.
        guesses: Settings that are tried first.
        metric: What orders trials.
        seed: Seed of the points and of the sampler.
    """
    tried = [t.settings for t in stage_trials if t.counts]
    # Those that were interrupted are run again.
    wanted = [t.settings for t in stage_trials if not t.counts]
    best = [t for t in coarse if t.state == "finished"]
    best.sort(key=lambda t: score(t, metric), reverse=True)
    if best:
        wanted += [t.settings for t in best[:REPEATED]]
    else:
        tried += [t.settings for t in coarse if t.state in ("pruned", "diverged")]
        space = _below_diverged(space, [*stage_trials, *coarse])
        wanted += [*guesses, *_points(tried, guesses, space, seed)]
    for settings in wanted:
        if settings not in tried:
            return settings
    failed = [t for t in coarse if t.state != "finished" and t.counts]
    known = _with_coarse(stage_trials, best, failed)
    if best:
        # Where no fine trial has finished yet, perhaps none is left that has not begun or failed.
        done = [t for t in known if t.state == "finished"] or best
        top = max(done, key=lambda t: score(t, metric))
        space = narrowed(space, top.settings, NARROW)
    found = _suggested(space, known, metric, seed + len(tried))
    if found not in tried:
        return found
    return next(s for s in evenly(space, len(tried) + 8, seed + 1) if s not in tried)


def _points(
    tried: Sequence[Settings], guesses: Sequence[Settings], space: Sequence[Dimension], seed: int
) -> list[Settings]:
    """The points that fill the range and are left, after those that were tried."""
    used = sum(settings not in guesses for settings in tried)
    return evenly(space, POINTS * len(space), seed)[used:]


def _below_diverged(space: Sequence[Dimension], trials: Sequence[Tried]) -> list[Dimension]:
    """The ranges, without rates that are far above one that diverged.

    Where momentum or trust coefficient vary too, whether a rate diverges depends on them.
    """
    rate = space[0]
    if {d.name for d in space} & {"momentum", "trust_coefficient"}:
        return list(space)
    lowest = min((t.settings["lr"] for t in trials if t.state == "diverged"), default=math.inf)
    high = min(rate.high, ABOVE_DIVERGED * lowest)
    return [replace(rate, high=high) if high > rate.low else rate, *space[1:]]


def _with_coarse(
    fine: Sequence[Tried], coarse: Sequence[Tried], failed: Sequence[Tried]
) -> list[Tried]:
    """The fine trials, and the coarse ones moved by what settings gained that ran in both.

    While no fine one has finished, the coarse ones stay as they are.
    """
    counted = [t for t in fine if t.counts]
    here = {tuple(t.settings.items()): t for t in counted}
    others = [t for t in coarse if tuple(t.settings.items()) not in here]
    pairs = [
        (t, other)
        for t in coarse
        if (other := here.get(tuple(t.settings.items()))) and other.state == "finished"
    ]
    if not pairs:
        finished = any(t.state == "finished" for t in counted)
        return counted if finished else [*counted, *others, *failed]
    top1, loss = (
        statistics.mean(getattr(b, key) - getattr(a, key) for a, b in pairs)
        for key in ("top1", "loss")
    )
    moved = [
        replace(t, top1=t.top1 + top1, loss=t.loss + loss)
        for t in others
        if t.top1 is not None and t.loss is not None
    ]
    return [*counted, *moved, *failed]


def quantiles(scores: Sequence[tuple[float, float]]) -> list[float]:
    """Normal quantiles of ranks, higher for higher scores, the same for equal ones."""
    ordered = sorted(scores)
    normal, n = statistics.NormalDist(), len(scores)
    places: Mapping[tuple[float, float], float] = {
        s: ordered.index(s) + (ordered.count(s) - 1) / 2 for s in set(ordered)
    }
    return [normal.inv_cdf((places[s] + 0.5) / n) for s in scores]


def _suggested(
    space: Sequence[Dimension], known: Sequence[Tried], metric: Metric, seed: int
) -> Settings:
    """What the Gaussian process suggests after the trials that are inside the ranges."""
    import optuna

    # Trials that run count as bad, so that another worker does not try the same (Ginsbourger et
    # al. 2010: the "constant liar").
    inside = [
        t for t in known if all(-1e-9 <= d.unit(t.settings[d.name]) <= 1 + 1e-9 for d in space)
    ]
    # The suggestion does not depend on which trial ended first.
    inside.sort(key=lambda t: (t.stage, sorted(t.settings.items())))
    # In the unit cube, as Optuna knows no scale of 1 - momentum.
    ranges: dict[str, optuna.distributions.BaseDistribution] = {
        d.name: optuna.distributions.FloatDistribution(0.0, 1.0) for d in space
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=min(2, len(inside)))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for trial, value in zip(inside, quantiles([score(t, metric) for t in inside]), strict=True):
        places = {d.name: min(max(d.unit(trial.settings[d.name]), 0.0), 1.0) for d in space}
        study.add_trial(optuna.trial.create_trial(params=places, distributions=ranges, value=value))
    places = study.ask(ranges).params
    return {d.name: d.value(places[d.name]) for d in space}
