"""Render ablations.json as tables and a plot."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from scipy.stats import ttest_1samp

from benchmarks.recipes.large_batch_single import Rows
from benchmarks.recipes.spread import Spread

#: The variant that the others are compared with: the recipe as it is.
WHOLE = "mlperf"
#: Dialects of LARS, each with a rate of its own.
DIALECTS = (WHOLE, "mlperf-corrected", "torch", "larc")
#: ``larc`` with a trust coefficient of its own, too.
OWN_TRUST = "larc, own trust coefficient"
#: The trust coefficient of the recipe, which all other runs have.
TRUST = 0.01


def tried_rates(rows: Rows, dialect: str) -> list[float]:
    """Return the rates of a dialect's trials on held-out images, in their order."""
    return [r["lr"] for r in rows if (r["kind"], r["variant"]) == ("trial", dialect)]


def best_rate(rows: Rows, dialect: str) -> float:
    """Return the rate of a dialect's best trial on held-out images."""
    tried = [r for r in rows if (r["kind"], r["variant"]) == ("trial", dialect)]
    best: float = max(tried, key=lambda row: row["top1"])["lr"]
    return best


def tried_trust(rows: Rows, lr: float) -> list[float]:
    """Return the trust coefficients that ``larc`` has tried at a rate, in their order."""
    return list(_top1_by_trust(rows, lr))


def best_trust(rows: Rows, lr: float) -> float:
    """Return the trust coefficient of the best trial of ``larc`` at a rate."""
    top1 = _top1_by_trust(rows, lr)
    return max(top1, key=lambda trust: top1[trust])


def _top1_by_trust(rows: Rows, lr: float) -> dict[float, float]:
    return {
        r.get("trust", TRUST): r["top1"]
        for r in rows
        if r["kind"] == "trial" and r["variant"] in ("larc", OWN_TRUST) and r["lr"] == lr
    }


def by_seed(rows: Rows, variant: str) -> dict[int, float]:
    """Return the accuracy of a variant on the test set, by seed."""
    return {r["seed"]: r["top1"] for r in rows if (r["kind"], r["variant"]) == ("final", variant)}


def interval(differences: list[float]) -> tuple[float, float]:
    """Return the mean of paired differences and half of its 95 % interval (Student's t)."""
    spread = Spread.of([differences])
    assert spread, "two pairs at least"
    return statistics.mean(differences), spread.half(len(differences))


def table(rows: Rows) -> str:
    """Tabulate each variant, and its difference from the whole recipe over the same seeds."""
    pairs = differences(rows)
    lines = [
        "| variant | learning rate | top-1 % on the test set, ± standard deviation "
        "| minus the whole recipe, 95 % interval | | seeds |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for variant in variants(rows):
        top1 = by_seed(rows, variant)
        first = next(r for r in rows if (r["kind"], r["variant"]) == ("final", variant))
        spread = f" ± {statistics.stdev(top1.values()):.2f}" if len(top1) > 1 else ""
        name = f"{_name(variant)} ({first['trust']:g})" if "trust" in first else _name(variant)
        lines.append(
            f"| {name} | {first['lr']:g} | {statistics.mean(top1.values()):.2f}{spread} "
            f"| {_difference(pairs.get(variant, []))} | {len(top1)} |"
        )
    return "\n".join(lines) + "\n"


def _name(variant: str) -> str:
    if variant == WHOLE:
        return f"the whole recipe (dialect {WHOLE})"
    return f"dialect {variant}" if variant in (*DIALECTS, OWN_TRUST) else variant


def variants(rows: Rows) -> list[str]:
    """Return the variants that have been trained, dialects first."""
    found = dict.fromkeys(r["variant"] for r in rows if r["kind"] == "final")
    return sorted(found, key=lambda variant: variant not in (*DIALECTS, OWN_TRUST))


def differences(rows: Rows) -> dict[str, list[float]]:
    """Return each variant's accuracy minus that of the whole recipe, over the seeds of both."""
    whole = by_seed(rows, WHOLE)
    found = {}
    for variant in variants(rows):
        top1 = by_seed(rows, variant)
        pairs = [top1[seed] - whole[seed] for seed in sorted(top1.keys() & whole.keys())]
        if variant != WHOLE and len(pairs) > 1:
            found[variant] = pairs
    return found


def significant(differences: dict[str, list[float]], level: float = 0.05) -> set[str]:
    """Return the variants that differ, by Holm's method for several comparisons (Holm 1979).

    With it, the probability that any of them is named without a difference is at most ``level``.
    """
    p = {variant: float(ttest_1samp(pairs, 0).pvalue) for variant, pairs in differences.items()}
    found = set[str]()
    for rank, variant in enumerate(sorted(p, key=lambda variant: p[variant])):
        if p[variant] > level / (len(p) - rank):
            break
        found.add(variant)
    return found


def together(rows: Rows) -> str:
    """State which differences remain when all comparisons are taken together."""
    found = differences(rows)
    remain = significant(found)
    alone = [v for v in found if abs(interval(found[v])[0]) > interval(found[v])[1]]
    lost = [variant for variant in alone if variant not in remain]
    text = f"With Holm's method for {len(found)} comparisons at 5 % in all, "
    if not lost:
        return f"{text}the same variants differ from the whole recipe.\n"
    return f"{text}all of these remain except: {'; '.join(map(_name, lost))}.\n"


def _difference(pairs: list[float]) -> str:
    if not pairs:
        return " | "
    mean, half = interval(pairs)
    verdict = "unresolved" if abs(mean) <= half else "above" if mean > 0 else "below"
    return f"{mean:+.2f}, {mean - half:+.2f} to {mean + half:+.2f} | {verdict}"


def trial_table(rows: Rows) -> str:
    """Tabulate the rates that each dialect tried."""
    lines = [
        "| dialect | learning rate | trust coefficient | top-1 % on held-out images |",
        "|---|---:|---:|---:|",
    ]
    order = (*DIALECTS, OWN_TRUST)
    for row in sorted(
        (r for r in rows if r["kind"] == "trial"),
        key=lambda r: (order.index(r["variant"]), r["lr"], r.get("trust", TRUST)),
    ):
        dialect = "larc" if row["variant"] == OWN_TRUST else row["variant"]
        lines.append(
            f"| {dialect} | {row['lr']:g} | {row.get('trust', TRUST):g} | {row['top1']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: Rows, path: Path) -> None:
    """Plot each variant's difference from the whole recipe with its interval."""
    found = differences(rows)
    order = sorted(found, key=lambda variant: statistics.mean(found[variant]))
    figure, axes = plt.subplots(figsize=(7, 1 + 0.34 * len(order)), layout="constrained")
    for place, variant in enumerate(order):
        mean, half = interval(found[variant])
        color = "tab:blue" if abs(mean) > half else "tab:gray"
        axes.errorbar(mean, place, xerr=half, color=color, marker="o", capsize=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(order)), [_name(variant) for variant in order])
    axes.set_xlabel("points of top-1 on the test set, minus the whole recipe")
    figure.suptitle("CIFAR-10 at 2,560: paired differences, 95 % intervals (gray: 0 is in it)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write(path: Path) -> str:
    """Write the tables and the plot next to the results, and return the tables."""
    content = json.loads(path.read_text())
    rows, machine = content["runs"], content["machine"]
    days = sorted({row["date"] for row in rows})
    span = " to ".join(dict.fromkeys((days[0], days[-1])))
    packages = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    origin = (
        f"{len(rows)} runs, {span}, {machine['processor']}, {machine['cores']} cores, {packages}\n"
    )
    parts = [table(rows)]
    if differences(rows):
        parts.append(together(rows))
        draw(rows, path.with_suffix(".png"))
    text = "\n".join([*parts, trial_table(rows), origin])
    path.with_suffix(".md").write_text(text)
    return text
