"""Claim: on CIFAR-10 at a batch of 2,560, LARS loses accuracy without warm-up, with weight decay or
the trust ratio on biases and norm layers, and without zero gamma; and what Nesterov momentum, more
momentum, averaged weights and the other dialects of LARS change.

    largebatch data prepare cifar10 --archive FILE --out data/cifar10
    python -m benchmarks.recipes.ablations --data data/cifar10

Each variant changes one part of `cifar10-b2560`, here in 10 epochs and BF16, and is trained with
the same eight seeds, so that differences are paired. Dialects apply the learning rate in different
places, so that a rate does not carry over: each has the best of at least three rates on held-out
training images, in steps of 1.5 times, with a lower and a higher rate that are worse. In `larc` the
rate is a limit and does not scale the trust ratio, so that it has a second row with a trust
coefficient of its own as well, found in the same way in steps of 2 times. All other variants keep
the rate of the whole recipe. Each run with all training images is evaluated on the
test set once, at its end, and where weights are averaged, the average is.

Finished runs are written to benchmarks/results/ablations.json and are not repeated. All take about
two hours on two cores.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

from benchmarks.recipes.ablations_report import (
    DIALECTS,
    OWN_TRUST,
    TRUST,
    WHOLE,
    best_rate,
    best_trust,
    tried_rates,
    tried_trust,
    write,
)
from benchmarks.recipes.large_batch_single import Rows, Single, find, parser, run_missing
from benchmarks.recipes.large_batch_starts import HELD_OUT
from benchmarks.tables import RESULTS

RESULT = RESULTS / "ablations.json"

RECIPE = "cifar10-b2560"
SHORT = ("epochs=10", "schedule.warmup=0.15dur", "precision=bf16")
SEEDS = range(8)

#: The learning rate of the recipe, and the step between rates that a dialect tries.
RATE, STEP = 4.5, 1.5
#: The step between the trust coefficients that ``larc`` tries.
TRUST_STEP = 2

#: Overrides by variant; the rate is that of the whole recipe.
VARIANTS = {
    "no warm-up": ("schedule.warmup=0",),
    "weight decay on biases and norm layers": ("optimizer.decay_bias_and_norm=true",),
    "trust ratio on biases and norm layers": ("optimizer.adapt_bias_and_norm=true",),
    "no zero gamma": ("model.zero_init_last_norm=false",),
    "Nesterov momentum": ("optimizer.nesterov=true",),
    "momentum 0.95, half the rate": ("optimizer.momentum=0.95",),
    "averaged weights (EMA, 0.95)": ("ema.decay=0.95",),
}
#: Factor of the rate, where it is not that of the whole recipe.
RATE_FACTORS = {"momentum 0.95, half the rate": 0.5}


def trials(rows: Rows) -> Iterator[Single]:
    """Yield the runs on held-out images that are known to be needed, finished or not.

    Args:
        rows: The finished ones. Where a dialect's best rate has no worse one on either side, the
            next rate on that side is needed; then the same for the trust coefficient of ``larc``.
    """
    for dialect in DIALECTS:
        tried = tried_rates(rows, dialect)
        best = best_rate(rows, dialect) if tried else RATE
        for lr in dict.fromkeys([*tried, *_beside(best, RATE, STEP)]):
            overrides = [*SHORT, f"optimizer.dialect={dialect}", f"optimizer.lr={lr:g}"]
            identity = {"kind": "trial", "variant": dialect, "lr": lr, "seed": 0}
            yield Single(RECIPE, [*overrides, f"data.holdout={HELD_OUT}"], identity)
    rates = tried_rates(rows, "larc")
    if rates and set(_beside(best_rate(rows, "larc"), RATE, STEP)) <= set(rates):
        yield from _trials_of_trust(rows, best_rate(rows, "larc"))


def _trials_of_trust(rows: Rows, lr: float) -> Iterator[Single]:
    """Yield the runs of ``larc`` at its best rate with other trust coefficients."""
    tried = tried_trust(rows, lr)
    for trust in dict.fromkeys([*tried, *_beside(best_trust(rows, lr), TRUST, TRUST_STEP)]):
        if trust != TRUST:
            identity = {"kind": "trial", "variant": OWN_TRUST, "lr": lr, "trust": trust, "seed": 0}
            overrides = [*SHORT, *_own_trust(trust), f"optimizer.lr={lr:g}"]
            yield Single(RECIPE, [*overrides, f"data.holdout={HELD_OUT}"], identity)


def _own_trust(trust: float) -> tuple[str, str]:
    return "optimizer.dialect=larc", f"optimizer.trust_coefficient={trust:g}"


def _beside(value: float, base: float, step: float) -> list[float]:
    """Return a value of the ladder through ``base`` and its neighbours, to four digits."""
    at = round(math.log(value / base, step))
    return [float(f"{base * step**rung:.4g}") for rung in (at - 1, at, at + 1)]


def finals(rows: Rows) -> Iterator[Single]:
    """Yield the runs that the table is made of, seed by seed.

    Args:
        rows: All rows of :func:`trials`, and maybe others.
    """
    rate = best_rate(rows, WHOLE)
    for seed in SEEDS:
        for dialect in DIALECTS:
            own = best_rate(rows, dialect)
            yield _final(dialect, own, seed, f"optimizer.dialect={dialect}")
        trust = best_trust(rows, own)
        yield _final(OWN_TRUST, own, seed, *_own_trust(trust), trust=trust)
        for variant, overrides in VARIANTS.items():
            yield _final(variant, rate * RATE_FACTORS.get(variant, 1.0), seed, *overrides)


def _final(variant: str, lr: float, seed: int, *overrides: str, **also: float) -> Single:
    identity = {"kind": "final", "variant": variant, "lr": lr, "seed": seed, **also}
    return Single(RECIPE, [*SHORT, f"optimizer.lr={lr:g}", *overrides, f"seed={seed}"], identity)


def judged(metrics: Rows) -> dict[str, float]:
    """Return the accuracy by which a run is judged, if not that of the weights at its end.

    Args:
        metrics: The lines of its ``metrics.jsonl``.
    """
    last = next(line for line in reversed(metrics) if line["split"] == "val")
    return {"top1": round(last["ema_top1"], 2)} if "ema_top1" in last else {}


def run(options: argparse.Namespace) -> Rows:
    """Make the missing runs, and return the rows of all."""
    made = (RESULT, __doc__ or "")
    rows, needed = Rows(), list(trials(Rows()))
    while any(find(rows, trial.identity) is None for trial in needed):
        rows = run_missing(*made, needed, options.data, options.workers)
        needed = list(trials(rows))
    return run_missing(*made, list(finals(rows)), options.data, options.workers, judged)


def main() -> None:
    run(parser(__doc__).parse_args())
    print(write(RESULT))


if __name__ == "__main__":
    main()
