"""Claim: the latency-bandwidth model behind `largebatch comm tune` and `comm simulate --fitted`
predicts times on an emulated cluster (messages of 1 MiB and more; goal: 15 %).

    python -m benchmarks.comm.simulation

It tunes on clusters of network namespaces (benchmarks/comm/cluster.py, which needs root), and then
measures message sizes and whole DDP steps that were not part of the fit. It takes about five
minutes per cluster.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.comm.cluster import Cluster
from benchmarks.comm.network import missing

#: Nodes, ranks of each, and Mbit/s of a link.
CLUSTERS = ((4, 2, 200.0), (4, 2, 1000.0), (2, 4, 200.0), (2, 4, 1000.0))
LEAST_BYTES = 2**20


def emulated(nodes: int, ranks: int, mbit: float) -> dict[str, Any]:
    """Measure and predict times on a cluster."""
    with tempfile.TemporaryDirectory() as folder, Cluster(nodes, ranks, mbit) as cluster:
        out = Path(folder) / "result.json"
        cluster.run(["-m", "benchmarks.comm.simulation_ranks", str(out)], timeout_seconds=900)
        found: dict[str, Any] = json.loads(out.read_text())
    return found | {"nodes": nodes, "ranks_per_node": ranks, "mbit": mbit}


def _errors(rows: Sequence[dict[str, Any]], key: str) -> dict[str, list[float]]:
    """Relative errors of predictions of at least 1 MiB, by candidate."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("size_bytes", LEAST_BYTES) >= LEAST_BYTES:
            name = row["algorithm"] + (", in chunks" if row["chunk_bytes"] else "")
            found.setdefault(name, []).append(row[key] / row["measured_seconds"] - 1)
    return found


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Tabulate the errors on each cluster."""
    lines = [
        "| emulated cluster | algorithm | messages of 1.5 to 12 MiB: median error "
        "| largest error | largest error without calibration | error of a DDP step |",
        "|---|---|---:|---:|---:|---:|",
    ]
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


def main() -> None:
    tables.parser(__doc__).parse_args()
    if reason := missing():
        print(f"cannot create a cluster: {reason}", file=sys.stderr)
        raise SystemExit(2)
    found = []
    for cluster in CLUSTERS:
        found.append(emulated(*cluster))
        print("\n".join(table(found[-1:])), flush=True)
    about = tables.about()
    path = tables.RESULTS / "simulation.json"
    content = json.loads(path.read_text()) if path.exists() else {}  # with the published points
    content |= {"emulated": found, "emulated_about": about}
    tables.store(path, content)
    lines = [*table(found), "", f"Emulated clusters: {about}"]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
