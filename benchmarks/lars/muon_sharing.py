"""Claim: two ranks that share the orthogonalisation of Muon take no longer for a step than two that
do all of it each, and send the bytes that the formula states.

    python -m benchmarks.lars.muon_sharing [--repeats 15] [--cases NAME ...] [--out DIR]

A step of Muon over the hidden layers of a model, in FP32 on two ranks of one thread each, over
gloo on this machine. Both ways alternate, with the same weights and gradients; the time of a repeat
is that of the slower rank, from a barrier on. The ratio is the median of those of single repeats,
so that a change of the machine's speed hardly counts; spread is from the first to the ninth decile.

Measured beside it are the broadcasts alone, an all-gather of equal parts of as many bytes, and the
bytes that each rank broadcasts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.tables import RESULTS
from largebatch.lars import Muon, hidden_weights
from largebatch.lars.muon.share import traffic
from largebatch.recipes.models.resnet9 import ResNet9
from largebatch.recipes.training.summary import processor, versions

RANKS = 2
CASES: dict[str, Callable[[], nn.Module]] = {
    "ResNet-9, width 16": lambda: ResNet9(width=16),
    "ResNet-50": lambda: timm.create_model("resnet50"),
}


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_broadcast = function.namespace == "c10d" and "broadcast" in function.name()
        if is_broadcast and args[2] == dist.get_rank():
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in args[0])
        return function(*args, **(kwargs or {}))


def hidden_shapes(model: nn.Module) -> list[torch.Size]:
    """Return the shapes of the weights that Muon orthogonalises."""
    is_hidden = hidden_weights(model)
    return [
        parameter.shape
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(prefix, recurse=False)
        if is_hidden(module, name, parameter)  # type: ignore[arg-type]
    ]


def on_a_rank(rank: int, folder: str, cases: list[str], repeats: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(minutes=10),
    )
    found = {name: measure(hidden_shapes(CASES[name]()), repeats) for name in cases}
    Path(folder, f"rank-{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(shapes: list[torch.Size], repeats: int) -> dict[str, Any]:
    """Return the seconds of each repeat on this rank, by what was done, and the bytes it sent."""
    torch.manual_seed(0)
    weights = [0.05 * torch.randn(shape) for shape in shapes]
    gradients = [1e-3 * torch.randn(shape) for shape in shapes]

    def optimizer(group: Any) -> Muon:
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return Muon(parameters, 0.01, process_group=group)

    shared, alone = optimizer(dist.group.WORLD), optimizer(None)
    stated = traffic(shapes, RANKS, itemsize=4, device_type="cpu")
    buffer = torch.ones(stated.total_bytes // 4 // RANKS * RANKS)
    parts = buffer.chunk(RANKS)

    def broadcasts() -> None:
        works = [dist.broadcast(part, r, async_op=True) for r, part in enumerate(parts)]
        for work in works:
            work.wait()

    def all_gather() -> None:
        dist.all_gather_into_tensor(buffer, parts[dist.get_rank()])

    ways: dict[str, Callable[[], object]] = {
        "shared": shared.step,
        "alone": alone.step,
        "broadcasts": broadcasts,
        "all_gather": all_gather,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, repeats):  # the first one makes the state
        for name in sorted(ways, reverse=bool(turn % 2)):
            dist.barrier()
            start = time.perf_counter()
            ways[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    with Sent() as counter:
        shared.step()
    return {
        "seconds": seconds,
        "sent_bytes": counter.bytes,
        "stated_bytes": stated.total_bytes,
        "broadcasts": stated.broadcasts,
        "tensors": len(shapes),
        "numbers": sum(shape.numel() for shape in shapes),
    }


def summary(values: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(values, n=10)
    return {
        "median": round(statistics.median(values), 6),
        "decile_1": round(deciles[0], 6),
        "decile_9": round(deciles[-1], 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(on_a_rank, (folder, arguments.cases, arguments.repeats), RANKS)
        by_rank = [json.loads(Path(folder, f"rank-{r}").read_text()) for r in range(RANKS)]
    result: dict[str, Any] = {
        "claim": "shared by two ranks, a step takes no longer than done by each alone",
        "date": date.today().isoformat(),
        "machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0))},
        "versions": versions(),
        "ranks": RANKS,
        "repeats": arguments.repeats,
    }
    lines = [
        "| hidden layers of | tensors | numbers, M | each alone, ms | shared, ms | ratio "
        "| spread of the ratio | broadcasts alone, ms | all-gather alone, ms "
        "| bytes by the formula | bytes sent |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in arguments.cases:
        first = by_rank[0][name]
        slower = {
            way: list(map(max, *(of_rank[name]["seconds"][way] for of_rank in by_rank)))
            for way in first["seconds"]
        }
        ratios = [a / b for a, b in zip(slower["shared"], slower["alone"], strict=True)]
        row = {
            **{key: value for key, value in first.items() if key not in ("seconds", "sent_bytes")},
            "sent_bytes": sum(of_rank[name]["sent_bytes"] for of_rank in by_rank),
            "seconds": {way: summary(values) for way, values in slower.items()},
            "ratio": summary(ratios),
        }
        result[name] = row
        ms = {way: f"{1e3 * of_way['median']:.2f}" for way, of_way in row["seconds"].items()}
        ratio = row["ratio"]
        lines.append(
            f"| {name} | {row['tensors']} | {row['numbers'] / 1e6:.2f} | {ms['alone']} "
            f"| {ms['shared']} | {ratio['median']:.2f} | {ratio['decile_1']:.2f} to "
            f"{ratio['decile_9']:.2f} | {ms['broadcasts']} | {ms['all_gather']} "
            f"| {row['stated_bytes']:,} | {row['sent_bytes']:,} |"
        )
    print("\n".join(lines))
    about = (
        f"{result['date']}, {processor()}, {os.cpu_count()} cores, {RANKS} ranks of one thread "
        f"over gloo, {arguments.repeats} repeats, "
        + ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "muon_sharing.json").write_text(json.dumps(result, indent=2) + "\n")
    (arguments.out / "muon_sharing.md").write_text("\n".join(lines) + f"\n\n{about}\n")


if __name__ == "__main__":
    main()
