"""Claim: the model behind `largebatch comm simulate` predicts published scaling efficiencies that
set none of its constants; goal: a median error of at most 5 points, and none over 15.

    python -m benchmarks.comm.scaling

The points, their inputs and the split are in benchmarks/comm/scaling_points.py. Constants are
fitted here and printed; those of largebatch.recipes.predict.presets are used. Takes a minute.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.comm.scaling_model import (
    CHANGES,
    LINES,
    fit,
    predict,
    predict_without,
)
from benchmarks.comm.scaling_points import POINTS, SPLIT, Point
from benchmarks.tables import RESULTS
from largebatch.recipes.predict.presets import GPUS, STRAGGLER_SIGMA
from largebatch.recipes.training.summary import versions

PICTURE = RESULTS.parents[1] / "docs" / "scaling.png"


def row(point: Point) -> dict[str, Any]:
    """Predict one point, with each input changed, and as the former model did."""
    changed = {change.name: predict(point, change) for change in CHANGES}
    predicted = predict(point)
    return {
        "name": point.name,
        "sets_constants": point.sets,
        "published": point.published,
        "predicted": predicted,
        "former": predict_without(point),
        "low": min(predicted, *changed.values()),
        "high": max(predicted, *changed.values()),
        "changed": changed,
        "source": point.source,
        "inputs": (point.system.source, *point.inputs),
        "algorithm": point.algorithm,
    }


def summary(rows: list[dict[str, Any]], key: str = "predicted") -> dict[str, float]:
    """Median and largest absolute error, and the mean error with its sign, in points."""
    errors = [100 * (one[key] - one["published"]) for one in rows]
    return {
        "points": len(rows),
        "median": statistics.median(map(abs, errors)),
        "largest": max(map(abs, errors)),
        "mean": statistics.fmean(errors),
        "over_15": sum(abs(error) > 15 for error in errors),
        "within_range": sum(one["low"] <= one["published"] <= one["high"] for one in rows),
    }


def measure() -> dict[str, Any]:
    """Fit the constants, and predict all points with those of the presets."""
    best, *_ = fit()
    rows = [row(point) for point in POINTS]
    kept = [one for one in rows if not one["sets_constants"]]
    used = [one for one in rows if one["sets_constants"]]
    tried = sorted((one.sigma, one.mean_error) for one in fit())
    return {
        "claim": "predicts published efficiencies that set no constant: median error at most 5",
        "versions": versions(),
        "split": SPLIT,
        "fitted": {
            "straggler_sigma": best.sigma,
            "fixed_seconds": best.fixed_seconds,
            "mean_error": best.mean_error,
            "mean_error_by_sigma": {f"{sigma:g}": error for sigma, error in tried[::10]},
        },
        "constants": {
            "straggler_sigma": STRAGGLER_SIGMA,
            "fixed_seconds": {gpu: GPUS[gpu].fixed_seconds for gpu in LINES},
        },
        "kept_apart": summary(kept),
        "kept_apart_former": summary(kept, "former"),
        "set_constants": summary(used),
        "set_constants_former": summary(used, "former"),
        "points": rows,
    }


def table(result: dict[str, Any]) -> list[str]:
    """Render the results in Markdown."""
    lines = [
        "| set | points | median error | largest | over 15 | mean | in the printed range | former "
        "model: median | largest |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, key in (("kept apart", "kept_apart"), ("may set constants", "set_constants")):
        now, former = result[key], result[f"{key}_former"]
        lines.append(
            f"| {name} | {now['points']} | {now['median']:.1f} | {now['largest']:.1f} "
            f"| {now['over_15']} | {now['mean']:+.1f} | {now['within_range']} "
            f"| {former['median']:.1f} | {former['largest']:.1f} |"
        )
    fitted = result["fitted"]
    times = ", ".join(
        f"{1e3 * seconds:.2f} ms ({gpu})" for gpu, seconds in fitted["fixed_seconds"].items()
    )
    errors = ", ".join(
        f"{100 * error:.1f} with {float(sigma):.1%}"
        for sigma, error in fitted["mean_error_by_sigma"].items()
    )
    lines += [
        "",
        "Errors in points of efficiency, predicted less published. The former model has line rates,"
        " a flat ring where NCCL is used, no t0 and no stragglers.",
        "",
        f"Split: {result['split']}",
        "",
        f"Fitted: sigma = {fitted['straggler_sigma']:.1%}, t0 = {times}. Mean error of the points "
        f"that may set constants: {errors}.",
    ]
    for title, sets in (("Kept apart", False), ("May set constants", True)):
        lines += [
            "",
            f"| {title.lower()} | published | predicted | error | range | former model |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for one in result["points"]:
            if one["sets_constants"] is sets:
                error = 100 * (one["predicted"] - one["published"])
                former = 100 * (one["former"] - one["published"])
                lines.append(
                    f"| {one['name']} | {one['published']:.1%} | {one['predicted']:.1%} "
                    f"| {error:+.1f} | {one['low']:.1%} to {one['high']:.1%} | {former:+.1f} |"
                )
    lines += ["", f"Range, one input changed at a time: {', '.join(c.name for c in CHANGES)}.", ""]
    sources: dict[str, list[str]] = {}
    for one in sorted(result["points"], key=lambda one: one["sets_constants"]):
        text = "; ".join((one["source"], *one["inputs"]))
        sources.setdefault(text, []).append(one["name"])
    lines += [f"- {'. '.join(names)}: {text}." for text, names in sources.items()]
    lines += [
        "",
        "[S]: read in the source; [C]: computed from such figures; [M]: recalled, not verified.",
    ]
    return lines


def draw(result: dict[str, Any]) -> None:
    """Plot predicted over published efficiencies, with the ranges of the points kept apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    for sets, color, label in (
        (True, "tab:gray", "may set constants"),
        (False, "tab:green", "kept apart"),
    ):
        rows = [one for one in result["points"] if one["sets_constants"] is sets]
        published = [100 * one["published"] for one in rows]
        predicted = [100 * one["predicted"] for one in rows]
        left.plot(published, predicted, "o", ms=5, color=color, alpha=0.8, label=label)
    former = [one for one in result["points"] if not one["sets_constants"]]
    left.plot(
        [100 * one["published"] for one in former],
        [100 * one["former"] for one in former],
        "x",
        ms=6,
        color="tab:red",
        label="kept apart, former model",
    )
    ends = [0, 105]
    left.plot(ends, ends, color="black", lw=0.8)
    left.fill_between(ends, [-5, 100], [5, 110], color="tab:green", alpha=0.12, label="± 5 points")
    left.set_xlim(30, 105)
    left.set_ylim(0, 105)
    left.set_xlabel("published efficiency (%)")
    left.set_ylabel("predicted efficiency (%)")
    left.legend(loc="lower right", fontsize="small")
    left.grid(alpha=0.3)
    places = range(len(former))
    for place, one in zip(places, former, strict=True):
        right.plot([100 * one["low"], 100 * one["high"]], [place] * 2, color="tab:green", alpha=0.5)
    right.plot(
        [100 * one["predicted"] for one in former], places, "o", ms=5, color="tab:green",
        label="predicted, with the range of changed inputs",
    )  # fmt: skip
    right.plot([100 * one["published"] for one in former], places, "k*", ms=8, label="published")
    right.set_yticks(places, [one["name"] for one in former], fontsize="small")
    right.invert_yaxis()
    right.set_xlabel("scaling efficiency (%)")
    right.grid(alpha=0.3)
    right.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=2)
    figure.suptitle("Published scaling efficiencies and their prediction")
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    result = measure()
    draw(result)
    lines = table(result)
    print("\n".join(lines))
    (RESULTS / "scaling.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    (RESULTS / "scaling.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
