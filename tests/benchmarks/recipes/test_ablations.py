"""The ablations: which runs are made, and what the table says of them."""

import itertools
import json
import math

import pytest
from scipy.stats import t, ttest_rel

from benchmarks.recipes import ablations
from benchmarks.recipes.ablations_report import (
    DIALECTS,
    OWN_TRUST,
    TRUST,
    WHOLE,
    best_rate,
    best_trust,
    interval,
    significant,
    table,
    tried_rates,
    tried_trust,
    write,
)
from benchmarks.recipes.large_batch_single import find
from benchmarks.recipes.large_batch_starts import HELD_OUT
from largebatch.recipes.schema.load import load

#: Each dialect is best at a rate of its own, some outside the first three.
BEST = dict(zip(DIALECTS, (4.5, 3.0, 15.0, 1.5), strict=True))
#: The best trust coefficient of larc, four times that of the recipe.
BEST_TRUST = 0.04


def tried():
    """Make the trials that are needed until there are no more."""
    rows = []
    while missing := [t for t in ablations.trials(rows) if find(rows, t.identity) is None]:
        for run in missing:
            variant = run.identity["variant"]
            dialect = "larc" if variant == OWN_TRUST else variant
            distance = abs(math.log(run.identity["lr"] / BEST[dialect]))
            if dialect == "larc":
                trust = run.identity.get("trust", TRUST)
                distance += abs(math.log(trust / BEST_TRUST))
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
    assert (OWN_TRUST, 1.333) in rates
    own = (*DIALECTS, OWN_TRUST, "momentum 0.95, half the rate")
    assert {lr for name, lr in rates if name not in own} == {4.5}
    assert ("momentum 0.95, half the rate", 2.25) in rates


def test_the_best_rate_of_a_dialect_has_a_worse_one_on_either_side():
    rows = tried()
    for dialect in DIALECTS:
        rates = sorted(tried_rates(rows, dialect))
        assert len(set(rates)) == len(rates) >= 3
        assert rates[0] < best_rate(rows, dialect) < rates[-1]
        steps = [high / low for low, high in itertools.pairwise(rates)]
        assert steps == pytest.approx([ablations.STEP] * len(steps), rel=1e-3)


def test_larc_has_a_trust_coefficient_of_its_own_with_worse_ones_on_either_side():
    tried_now = tried()
    assert sorted(tried_trust(tried_now, 1.333)) == [0.005, 0.01, 0.02, 0.04, 0.08]
    assert best_trust(tried_now, 1.333) == BEST_TRUST
    own = [run for run in ablations.finals(tried_now) if run.identity["variant"] == OWN_TRUST]
    recipes = [load(run.recipe, run.overrides).recipe.optimizer for run in own]
    assert len(own) == 8
    assert {(r.dialect, r.lr, r.trust_coefficient) for r in recipes} == {("larc", 1.333, 0.04)}


def test_each_variant_differs_from_the_whole_recipe_in_one_part():
    finals = list(ablations.finals(tried()))
    assert len(finals) == 8 * (len(DIALECTS) + len(ablations.VARIANTS) + 1)
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
        number = 2 if variant == OWN_TRUST else int(variant != WHOLE)
        assert len(changed) == number, (variant, changed)
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


def test_holms_method_names_what_is_significant_among_all_comparisons():
    p_values = {"a": 0.011, "b": 0.02, "c": 0.04, "d": 0.3}  # limits 0.0125, 0.0167
    pairs = {
        name: [1 + x, 1 - x, 1.0] for name, x in zip(p_values, _spreads(p_values), strict=True)
    }
    assert significant(pairs) == {"a"}
    assert significant({name: pairs[name] for name in "ab"}) == {"a", "b"}
    assert significant({name: pairs[name] for name in "bc"}) == {"b", "c"}
    assert significant({name: pairs[name] for name in "cd"}) == set()


def _spreads(p_values):
    """Return the spread of three differences of mean 1 that gives each p value."""
    return [math.sqrt(3) / t.isf(p / 2, 2) for p in p_values.values()]


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
    assert (
        "With Holm's method for 11 comparisons at 5 % in all, "
        in path.with_suffix(".md").read_text()
    )
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert f"{len(rows)} runs, 2026-11-24, x, 2 cores, torch 2" in write(path)
