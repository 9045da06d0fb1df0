"""Claim: the efficiency that `largebatch comm simulate` prints is that of published runs that had
no part in its making; goal: a median error of at most 5 points, at most 10 % outside its range.

    python -m benchmarks.comm.forecast [NAME]

The runs are in forecast_points.json. Writes results/NAME.json and results/NAME.md (forecast).
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.tables import RESULTS
from largebatch.recipes.predict.scaling import setting, sweep
from largebatch.recipes.schema.load import load

POINTS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("forecast_points.json").read_text(encoding="utf-8")
)["points"]


def published(point: dict[str, Any]) -> float:
    """Rate per GPU relative to that of the base."""
    base = point["base"]
    each = point["images_per_second"] / point["gpus"]
    return float(each / (base["images_per_second"] / base["gpus"]))


def predict(point: dict[str, Any]) -> tuple[float, float | None, float | None]:
    """The efficiency with NCCL's own all-reduce, and the range that is printed with it.

    A rate of one GPU with the same images is given to the command; of other rates, which it takes
    no account of, the preset stands in.
    """
    base = point["base"]
    alone = base["gpus"] == 1 and base["images_per_gpu"] == point["images_per_gpu"]
    precision = "fp16-master" if point["gradients"] == "fp16" else "bf16"
    common = setting(
        load("resnet50-b65536", [f"model.name={point['model']}", f"precision={precision}"]),
        gpu=point["gpu"],
        links=point["links"],
        gpus_per_node=point["gpus_per_node"],
        images_per_gpu=point["images_per_gpu"],
        images_per_second=base["images_per_second"] if alone else None,
    )
    return sweep(common, point["gpus"])[-1].default.efficiency, None, None


def row(point: dict[str, Any]) -> dict[str, Any]:
    """Predict one point."""
    predicted, low, high = predict(point)
    return {
        "name": point["name"],
        "published": published(point),
        "predicted": predicted,
        "low": low,
        "high": high,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors in points of efficiency, and the share of points outside the printed range."""
    errors = [100 * (one["predicted"] - one["published"]) for one in rows]
    ranged = [one for one in rows if one["low"] is not None]
    outside = sum(not one["low"] <= one["published"] <= one["high"] for one in ranged)
    return {
        "points": len(rows),
        "median_absolute_error": statistics.median(map(abs, errors)),
        "mean_error": statistics.fmean(errors),
        "too_optimistic": sum(error > 0 for error in errors),
        "outside_range": outside / len(ranged) if ranged else None,
    }


def table(result: dict[str, Any]) -> list[str]:
    """Render the results in Markdown."""
    total = result["summary"]
    share = total["outside_range"]
    lines = [
        f"{total['points']} points: median absolute error "
        f"{total['median_absolute_error']:.1f} points of efficiency, mean error "
        f"{total['mean_error']:+.1f}, too optimistic on {total['too_optimistic']}; "
        + ("no range is printed." if share is None else f"{share:.0%} outside the printed range."),
        "",
        "| run | published | predicted | error | printed range |",
        "|---|---:|---:|---:|---:|",
    ]
    for one in result["points"]:
        span = "-" if one["low"] is None else f"{one['low']:.0%} to {one['high']:.0%}"
        lines.append(
            f"| {one['name']} | {one['published']:.1%} | {one['predicted']:.1%} "
            f"| {100 * (one['predicted'] - one['published']):+.1f} | {span} |"
        )
    return lines


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "forecast"
    rows = [row(point) for point in POINTS]
    result = {"summary": summary(rows), "points": rows}
    lines = table(result)
    print("\n".join(lines))
    (RESULTS / f"{name}.json").write_text(
        json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
