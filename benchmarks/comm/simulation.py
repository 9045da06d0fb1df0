"""Claim: the latency-bandwidth model behind `largebatch comm tune` and `comm simulate --fitted`
predicts Jia et al.'s step counts and speed-ups from inputs that are not fitted to them, and times
on an emulated cluster (messages of 1 MiB and more; goal: 15 %).

    python -m benchmarks.comm.simulation [--published-only]

The second part tunes on clusters of network namespaces (benchmarks/comm/cluster.py, which needs
root), and then measures message sizes and whole DDP steps that were not part of the fit. It takes
about five minutes per cluster. With --published-only, its earlier results are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.comm.published import (
    CHANGES,
    P40_CASE,
    SPEED_UPS,
    best_groups,
    paper_form,
    steps_of_the_paper,
)
from benchmarks.tables import RESULTS
from largebatch.comm import ALGORITHMS, Cluster, Plan, Topology, simulate
from largebatch.recipes.training.summary import processor, versions

PICTURE = Path(__file__).parents[2] / "docs" / "simulation.png"
CLUSTERS = ("4x2@200", "4x2@1000", "2x4@200", "2x4@1000")
LEAST_BYTES = 2**20


def published() -> dict[str, Any]:
    """Predict the speed-ups and the latency steps of Jia et al."""
    speed_ups = []
    for entry in SPEED_UPS:
        step, reduction = entry.run()
        speed_ups.append(
            {
                "name": entry.name,
                "published": entry.published,
                "source": "abstract: up to 11x and 3x at 1,024 P40, over NCCL [S]",
                "predicted": step,
                "predicted_of_all_reduces_alone": reduction,
                "inputs": entry.case.fixed,
                "changed": {c.name: entry.run(c)[0] for c in CHANGES},
            }
        )
    counts = []
    paper_counts = ((1024, {8: 282, 16: 186, 32: 186, 64: 282}), (2048, {16: 314, 32: 250}))
    for p, published_steps in paper_counts:
        flat = ALGORITHMS["ring"].traffic(1, Topology.of(p, 8))
        counts.append(
            {
                "gpus": p,
                "ring_published": 2 * (p - 1),
                "ring": flat.intra_messages + flat.inter_messages,
                "paper_published": published_steps,
                "paper": {k: steps_of_the_paper(p, k) for k in published_steps},
                "best": best_groups(p),
            }
        )
    return {"speed_up": speed_ups, "latency_steps": counts}


def emulated(clusters: Sequence[str]) -> list[dict[str, Any]]:
    """Measure and predict times on each of ``clusters``."""
    from benchmarks.comm.cluster import Cluster as Machines

    results = []
    for cluster in clusters:
        layout, mbit = cluster.split("@")[0], float(cluster.split("@")[1])
        nodes, ranks = (int(number) for number in layout.split("x"))
        print(f"{nodes} × {ranks} ranks, {mbit:g} Mbit/s", flush=True)
        with tempfile.TemporaryDirectory() as folder, Machines(nodes, ranks, mbit) as machines:
            out = Path(folder) / "result.json"
            machines.run(["-m", "benchmarks.comm.simulation_ranks", str(out)], timeout_seconds=900)
            result = json.loads(out.read_text())
        result |= {"nodes": nodes, "ranks_per_node": ranks, "mbit": mbit}
        results.append(result)
        for line in _emulated_lines([result]):
            print(line, flush=True)
    return results


def _errors(rows: Sequence[dict[str, Any]], key: str) -> dict[str, list[float]]:
    """Relative errors of predictions of at least 1 MiB, by candidate."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("size_bytes", LEAST_BYTES) >= LEAST_BYTES:
            name = row["algorithm"] + (", in chunks" if row["chunk_bytes"] else "")
            found.setdefault(name, []).append(row[key] / row["measured_seconds"] - 1)
    return found


def _emulated_lines(results: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for result in results:
        calibrated = _errors(result["messages"], "predicted_seconds")
        alone = _errors(result["messages"], "links_alone_seconds")
        steps = _errors(result["steps"], "predicted_seconds")
        where = f"{result['nodes']} × {result['ranks_per_node']}, {result['mbit']:g} Mbit/s"
        for name, values in calibrated.items():
            median = statistics.median(abs(v) for v in values)
            lines.append(
                f"| {where} | {name} | {median:.0%} | {max(values, key=abs):+.0%} "
                f"| {max(alone[name], key=abs):+.0%} | {steps[name][0]:+.0%} |"
            )
    return lines


def table(result: dict[str, Any]) -> list[str]:
    """Render all results in Markdown."""
    lines = [
        "| speed-up over an unfused flat ring, 1,024 P40 | published, up to | predicted "
        "| difference | range with changed inputs | all-reduces alone |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["published"]["speed_up"]:
        changed = row["changed"].values()
        lines.append(
            f"| {row['name']} | {row['published']:g} | {row['predicted']:.1f} "
            f"| {row['predicted'] / row['published'] - 1:+.0%} "
            f"| {min(changed):.1f} to {max(changed):.1f} "
            f"| {row['predicted_of_all_reduces_alone']:.1f} |"
        )
    lines += [
        "",
        "| latency steps | ring, 2(p - 1) | ring as modelled | paper, 4(k - 1) + 2(p/k - 1) "
        "| paper as modelled | fewest |",
        "|---|---:|---:|---|---|---|",
    ]
    for row in result["published"]["latency_steps"]:
        least, groups = row["best"]
        theirs, ours = (
            ", ".join(f"{n} (k = {k})" for k, n in row[key].items())
            for key in ("paper_published", "paper")
        )
        best = " or ".join(map(str, groups))
        lines.append(
            f"| {row['gpus']:,} GPUs | {row['ring_published']} | {row['ring']} | {theirs} | {ours} "
            f"| {least}, with k = {best} |"
        )
    lines += [
        "",
        "No input is fitted to these figures. Latencies are those of NCCL's own model: 9.6 us "
        "between nodes, 3.4 us over NVLink, 5.7 us over PCIe [S]. Link rates are line rates. Two "
        "thirds of a step are backward, distributed over the layers by FLOPs. [S]: read in the "
        "source; [C]: computed from such figures; [M]: recalled, not verified.",
        "",
    ]
    seen: set[str] = set()
    for row in result["published"]["speed_up"]:
        new = [line for line in (row["source"], *row["inputs"]) if line not in seen]
        seen.update(new)
        lines.append(
            f"- {row['name']}: {'; '.join(new)}." if new else f"- {row['name']}: as above."
        )
    changes = ", ".join(change.name for change in CHANGES)
    lines += ["", f"Changed inputs, one at a time: {changes}."]
    if result.get("emulated"):
        lines += [
            "",
            "| emulated cluster | algorithm | messages of 1.5 to 12 MiB: median error "
            "| largest error | largest error without calibration | error of a DDP step |",
            "|---|---|---:|---:|---:|---:|",
            *_emulated_lines(result["emulated"]),
            "",
            f"Emulated clusters: {result['emulated_about']}",
        ]
    return lines


def draw(result: dict[str, Any]) -> None:
    """Plot the predicted efficiency of ResNet-50 over the number of P40s, with published values."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    case = P40_CASE
    sizes = [2**k for k in range(3, 16)]
    clusters = [Cluster.of(n, case.per_node, case.cluster().links) for n in sizes]
    plans = {
        "the paper's algorithm or flat ring, by size; fused": None,
        "flat ring, 25 MiB buckets": Plan.single("ring"),
        "flat ring, unfused": Plan.single("ring", fusion_threshold_bytes=1),
    }
    for (name, plan), color in zip(
        plans.items(), ("tab:green", "tab:gray", "tab:red"), strict=True
    ):
        values = [
            case.on(cluster).efficiency
            if plan is None
            else simulate(case.profile(), cluster, plan).efficiency
            for cluster in clusters
        ]
        axes.plot(sizes, [100 * v for v in values], "-", color=color, label=f"predicted: {name}")
    axes.plot((1024, 2048), (99, 97), "*", ms=13, color="black", clip_on=False)
    axes.plot([], [], "*", ms=13, color="black", label="published (Jia et al.)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=45)
    axes.set_ylim(0, 103)
    axes.set_xlabel("number of P40 GPUs, 8 per node, 100 Gbit/s between nodes")
    axes.set_ylabel("scaling efficiency (%)")
    axes.set_title("Scaling of ResNet-50, 64 images per GPU, gradients in FP16")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--published-only", action="store_true", help="skip the emulated clusters")
    parser.add_argument(
        "--clusters", nargs="+", default=CLUSTERS, help="NODESxRANKS@MBIT for each cluster"
    )
    options = parser.parse_args()
    path = RESULTS / "simulation.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    result: dict[str, Any] = {
        "claim": "predicts published speed-ups without a fit, and an emulated cluster within 15 %",
        "versions": versions(),
    }
    with paper_form():
        result["published"] = published()
        draw(result)
    for key in ("emulated", "emulated_about"):
        if key in before:
            result[key] = before[key]
    if not options.published_only:
        from benchmarks.comm.network import missing

        if reason := missing():
            print(
                f"cannot create a cluster: {reason}; valid here: --published-only", file=sys.stderr
            )
            raise SystemExit(2)
        result["emulated"] = emulated(options.clusters)
        packages = ", ".join(f"{name} {number}" for name, number in versions().items())
        result["emulated_about"] = (
            f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores, {packages}"
        )
    lines = table(result)
    print("\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "simulation.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
