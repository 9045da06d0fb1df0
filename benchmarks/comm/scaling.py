"""Claim: the efficiency that `largebatch comm simulate` prints is that of published runs that had
no part in its making; goal: a median error of at most 5 points, at most 10 % outside its range.

    python -m benchmarks.comm.scaling

The constants of the model are fitted to the runs of scaling_points.py, whose spread is the range;
the runs that test it are in forecast_points.json. results/forecast_before.md has the same of the
model before that list was made. Takes two minutes.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.comm.scaling_model import fit, predict
from benchmarks.comm.scaling_points import POINTS, SPLIT
from benchmarks.tables import RESULTS
from largebatch.recipes.predict.scaling import setting, sweep
from largebatch.recipes.schema.load import load
from largebatch.recipes.training.folder.ending import versions

TESTS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("forecast_points.json").read_text(encoding="utf-8")
)["points"]

_COLUMNS = ("| run | published | predicted | error |", "|---|---:|---:|---:|")


def tested(point: dict[str, Any]) -> dict[str, Any]:
    """Predict a run of :data:`TESTS` as the command does, from the base's or its node's rate.

    The efficiency is the rate per GPU relative to that of the base; DDP's default is predicted.
    """
    base = point["base"]
    one = base["images_per_second"] / base["gpus"]
    known = point.get("node", base)
    common = setting(
        load(
            "resnet50-b65536",
            [
                f"model.name={point['model']}",
                f"precision={'fp16-master' if point['gradients'] == 'fp16' else 'bf16'}",
            ],
        ),
        gpu=point["gpu"],
        links=point["links"],
        gpus_per_node=point["gpus_per_node"],
        images_per_gpu=point["images_per_gpu"],
        measured="{gpus}x{images_per_gpu}:{images_per_second}".format(**known),
    )
    step = sweep(common, point["gpus"])[-1].step
    rate = common.images / step.step_seconds
    shares = common.between(point["gpus"], common.efficiency(rate))
    return {
        "name": point["name"],
        "published": point["images_per_second"] / point["gpus"] / one,
        "predicted": rate / one,
        "range": [rate / one * share for share in shares],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors in points of efficiency, and the share of runs outside the printed range."""
    errors = [100 * (one["predicted"] - one["published"]) for one in rows]
    ratios = [one["published"] / one["predicted"] for one in rows]
    found: dict[str, Any] = {
        "runs": len(rows),
        "median": statistics.median(map(abs, errors)),
        "mean": statistics.fmean(errors),
        "largest": max(map(abs, errors)),
        "published_over_predicted": [min(ratios), statistics.median(ratios), max(ratios)],
    }
    if "range" in rows[0]:
        outside = [
            one for one in rows if not one["range"][0] <= one["published"] <= one["range"][1]
        ]
        found["outside"] = len(outside) / len(rows)
    return found


def measure() -> dict[str, Any]:
    """Fit the constants, and predict all runs with those of the presets."""
    best, *_ = fit()
    points = [
        {
            "name": point.name,
            "sets_constants": point.sets,
            "published": point.published,
            "predicted": predict(point),
            "source": "; ".join((point.source, point.system.source, *point.inputs)),
        }
        for point in POINTS
    ]
    tests = [tested(point) for point in TESTS]
    return {
        "versions": versions(),
        "fitted": {"straggler_sigma": best.sigma, "fixed_seconds": best.fixed_seconds},
        "tests": {"summary": summary(tests), "runs": tests},
        "points": {"summary": summary(points), "runs": points},
    }


def table(result: dict[str, Any]) -> list[str]:
    """Render the results in Markdown."""
    tests, points, fitted = result["tests"], result["points"], result["fitted"]
    total, made = tests["summary"], points["summary"]
    low, middle, high = made["published_over_predicted"]
    lines = [
        f"{total['runs']} runs that had no part in the model: median error {total['median']:.1f} "
        f"points of efficiency, mean {total['mean']:+.1f}; {total['outside']:.0%} outside the "
        "printed range.",
        "",
        _COLUMNS[0] + " printed range |",
        _COLUMNS[1] + "---:|",
        *(f"{_row(one)} {one['range'][0]:.0%} to {one['range'][1]:.0%} |" for one in tests["runs"]),
        "",
        f"{made['runs']} runs that the model was made on: median error {made['median']:.1f} "
        f"points; published over predicted {low:.2f} to {high:.2f}, median {middle:.2f}. Fitted: "
        f"sigma {fitted['straggler_sigma']:.1%}, t0 "
        + ", ".join(f"{1e3 * t0:.1f} ms ({gpu})" for gpu, t0 in fitted["fixed_seconds"].items())
        + f". {SPLIT}",
        "",
        *(line for line in _COLUMNS),
        *(_row(one) for one in points["runs"]),
        "",
    ]
    sources: dict[str, list[str]] = {}
    for one in points["runs"]:
        sources.setdefault(one["source"], []).append(one["name"])
    lines += [f"- {'. '.join(names)}: {text}." for text, names in sources.items()]
    lines += ["", "[S]: read in the source; [C]: computed from that; [M]: recalled, not verified."]
    return lines


def _row(one: dict[str, Any]) -> str:
    error = 100 * (one["predicted"] - one["published"])
    return f"| {one['name']} | {one['published']:.1%} | {one['predicted']:.1%} | {error:+.1f} |"


def main() -> None:
    result = measure()
    lines = table(result)
    print("\n".join(lines))
    for name, text in (
        ("json", json.dumps(result, indent=1, ensure_ascii=False)),
        ("md", "\n".join(lines)),
    ):
        (RESULTS / f"scaling.{name}").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
