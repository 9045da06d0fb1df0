"""The ablations: which runs are made, and what the table says of them."""

import itertools
import json
import math

import pytest
from scipy.stats import ttest_rel

from benchmarks.recipes import ablations
from benchmarks.recipes.ablations_report import (
    DIALECTS,
    WHOLE,
    best_rate,
    interval,
    table,
    tried_rates,
    write,
)
from benchmarks.recipes.large_batch_single import find
from benchmarks.recipes.large_batch_starts import HELD_OUT
from largebatch.recipes.schema.load import load

#: Each dialect is best at a rate of its own, some outside the first three.
BEST = dict(zip(DIALECTS, (4.5, 3.0, 15.0, 1.5), strict=True))


def tried():
    """Make the trials that are needed until there are no more."""
    rows = []
    while missing := [t for t in ablations.trials(rows) if find(rows, t.identity) is None]:
        for run in missing:
            distance = abs(math.log(run.identity["lr"] / BEST[run.identity["variant"]]))
            rows.append({**run.identity, "top1": 70 - distance})
    return rows


def simulated():
    """Accuracies that depend on the seed, and a point less without warm-up in all seeds."""
    rows = tried()
    for run in ablations.finals(tried()):
        seed, variant = run.identity["seed"], run.identity["variant"]
        noise = 0.1 * math.sin(7 * seed + len(variant))
        top1 = 75 + 0.5 * math.sin(5 * seed) + noise - (variant == "no warm-up")
        rows.append({**run.identity, "top1": top1})
    return rows


def test_each_dialect_has_the_rate_of_its_best_trial_and_each_variant_that_of_the_whole():
    rates = {(r.identity["variant"], r.identity["lr"]) for r in ablations.finals(tried())}
    assert best_rate(tried(), "mlperf-corrected") == 3.0
    assert {rate for rate in rates if rate[0] in DIALECTS} == {
        *((WHOLE, 4.5), ("mlperf-corrected", 3.0), ("torch", 15.19), ("larc", 1.333))
    }
    others = {lr for name, lr in rates if name not in DIALECTS and "0.95, half" not in name}
    assert others == {4.5}
    assert ("momentum 0.95, half the rate", 2.25) in rates


def test_the_best_rate_of_a_dialect_has_a_worse_one_on_either_side():
    rows = tried()
    for dialect in DIALECTS:
        rates = sorted(tried_rates(rows, dialect))
        assert len(set(rates)) == len(rates) >= 3
        assert rates[0] < best_rate(rows, dialect) < rates[-1]
        steps = [high / low for low, high in itertools.pairwise(rates)]
        assert steps == pytest.approx([ablations.STEP] * len(steps), rel=1e-3)


def test_each_variant_differs_from_the_whole_recipe_in_one_part():
    finals = list(ablations.finals(tried()))
    assert len(finals) == 8 * (len(DIALECTS) + len(ablations.VARIANTS))
    first = [run for run in finals if run.identity["seed"] == 0]
    recipes = {r.identity["variant"]: load(r.recipe, r.overrides).recipe for r in first}
    whole = recipes[WHOLE].model_dump()
    for variant, recipe in recipes.items():
        assert recipe.data.holdout is None
        assert recipe.epochs == 10
        changed = {
            f"{section}.{key}"
            for section, values in recipe.model_dump().items()
            if isinstance(values, dict)
            for key, value in values.items()
            if value != whole[section][key]
        } - {"optimizer.lr"}
        assert len(changed) == (variant != WHOLE), (variant, changed)
    for run in ablations.trials(tried()):
        assert load(run.recipe, run.overrides).recipe.data.holdout == HELD_OUT


def test_a_run_that_averages_weights_is_judged_by_their_average():
    train, early = {"split": "train", "loss": 1.0}, {"split": "val", "top1": 50.0, "ema_top1": 40.0}
    last = {"split": "val", "top1": 73.0, "ema_top1": 74.004}
    assert ablations.judged([train, early, train, last, train]) == {"top1": 74.0}
    assert ablations.judged([train, {"split": "val", "top1": 73.0}]) == {}


def test_the_interval_is_that_of_a_paired_t_test():
    one, other = [3.0, 2.5, 4.0, 3.1], [2.0, 2.2, 2.9, 2.6]
    mean, half = interval([a - b for a, b in zip(one, other, strict=True)])
    low, high = ttest_rel(one, other).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((low, high))


def test_the_table_resolves_what_the_seeds_resolve(tmp_path):
    rows = simulated()
    text = table(rows)
    (line,) = [line for line in text.splitlines() if line.startswith("| no warm-up ")]
    assert "| below | 8 |" in line
    assert sum("| unresolved | 8 |" in line for line in text.splitlines()) >= 8
    assert "| the whole recipe (dialect mlperf) | 4.5 |" in text
    path = tmp_path / "ablations.json"
    dated = [row | {"date": "2026-11-24"} for row in rows]
    machine = {"processor": "x", "cores": 2}
    path.write_text(json.dumps({"runs": dated, "machine": machine, "versions": {"torch": "2"}}))
    assert write(path) == path.with_suffix(".md").read_text()
    assert f"{len(rows)} runs, 2026-11-24, x, 2 cores, torch 2" in write(path)
