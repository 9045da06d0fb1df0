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


def main() -> None:
    result = measure()
    lines = table(result)
    print("\n".join(lines))
    (RESULTS / "scaling.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    (RESULTS / "scaling.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
