"""Claim: in 10.24 epochs at a batch of 4,096, Muon gains about a third of a point from 2/3 of the
learning rate that its search found, and loses from 3/2 of it.

    python -m benchmarks.recipes.muon_limits --data data/cifar10 --package CHECKOUT

Four questions for runs on all training images, scored on the test set, beside those of
`epochs_to_target`, whose settings they have, and but for the last its network:

- tuning: does another learning rate, or the second best setting of the search, do better? Of Muon
  at 4,096; of LARS and SGD at 2,560, the learning rate alone.
- method: do other steps of Muon, an average of the weights or another momentum, at 8,192? Does SOAP
  (pytorch-optimizer 4.1, on CHECKOUT's path), at 4,096, at its default rate and higher ones?
- floor: is 86 % reached in fewer updates, with a batch of 16,384?
- residual: how many epochs do Muon and LARS take on ResNet-9, whose recipes (`cifar10-…`) scale
  Muon's learning rate by the square root of the batch?

CHECKOUT is a work tree of commit 9e2c0a5, whose package trains, as it trained the runs beside which
these stand. Runs that are stored in benchmarks/results/muon_limits.json are not repeated; without
``--data`` the table is made from them alone. A run takes 5 to 15 minutes of one of two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.recipes.epochs_to_target import RESULT as BESIDE
from benchmarks.recipes.epochs_to_target_estimates import finals

RESULT = tables.RESULTS / "muon_limits.json"
#: As in epochs_to_target: nothing is evaluated before the end, and memory is taken in large pages.
PLAIN = ("evaluate_every=1dur", "checkpoint.every=null")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1000000000"
    ":glibc.malloc.trim_threshold=10000000000",
}
#: Settings of the search at 4,096: the best, and the second best.
FIRST = "schedule.power=0.646 optimizer.momentum=0.899 schedule.warmup=0.14dur"
SECOND = "schedule.power=1.4 optimizer.momentum=0.818 schedule.warmup=0.237dur"
#: Batches and epochs of Muon on ResNet-9.
RESIDUAL = ((256, 20), (2560, 26), (8192, 40), (8192, 56))
SOAP = ("optimizer.name=pytorch_optimizer:SOAP", "optimizer.weight_decay=0.01")
OTHERS = "optimizer.args.others={{rule: sgd, lr_scale: {}, momentum: 0.85}}"


@dataclass(frozen=True)
class Case:
    """A setting: which question it belongs to, its batch, its epochs and its overrides."""

    question: str
    name: str
    batch_size: int
    epochs: float
    overrides: tuple[str, ...] = ()
    optimizer: str = "Muon"

    @property
    def recipe(self) -> str:
        """The recipe whose batch, epochs and overrides it changes."""
        base = BASES.get(self.batch_size, f"b{self.batch_size}")
        if self.question == "residual":
            return f"cifar10-muon-{base}" if self.optimizer == "Muon" else f"cifar10-{base}"
        return f"airbench-{NAMES[self.optimizer]}-{base}"


def line(
    name: str, setting: str, rate: float, of: tuple[int, float, str] = (4096, 10.24, "Muon")
) -> list[Case]:
    """The cases of a setting at the rate of the search, and at 2/3 and 3/2 of it."""
    size, epochs, rule = of
    found = []
    for text, factor in (("2/3", 2 / 3), ("1", 1), ("3/2", 1.5)):
        overrides = (*setting.split(), f"optimizer.lr={rate * factor:.3g}")
        found.append(Case("tuning", f"{name}, rate × {text}", size, epochs, overrides, rule))
    return found


def other(name: str, *overrides: str) -> Case:
    """A case of the second question."""
    return Case("method", name, 8192, 12.8, overrides)


CASES = (
    *line("best setting", FIRST, 0.18),
    *line("second setting", SECOND, 0.303),
    *line("LARS", "", 12.7, (2560, 16.0, "LARS")),
    *line("SGD", "", 3.75, (2560, 16.0, "SGD")),
    other("as found"),
    other("5 Newton-Schulz steps", "optimizer.args.ns_steps=5"),
    other("average of the weights", "ema.decay=0.9"),
    other(
        "weight decay for norm projection",
        "optimizer.args.norm_projection=false",
        "optimizer.weight_decay=5e-4",
    ),
    other("twice the rate of biases and head", OTHERS.format(13.8)),
    other("momentum 0.95", "optimizer.momentum=0.95"),
    *(
        Case("method", f"SOAP, rate {lr}", 4096, 10.24, (*SOAP, f"optimizer.lr={lr}"))
        for lr in (0.003, 0.01, 0.03)
    ),
    *(Case("residual", "Muon", b, n) for b, n in RESIDUAL),
    *(Case("residual", "LARS", 8192, n, (), "LARS") for n in (40, 64)),
    *(Case("floor", "as at 8,192", 16384, n, ("optimizer.lr=0.362",)) for n in (25.6, 40)),
)
#: Those that epochs_to_target has trained.
KNOWN = {
    "best setting, rate × 1": ("Muon", 4096, 10.24),
    "LARS, rate × 1": ("LARS", 2560, 16.0),
    "SGD, rate × 1": ("Nesterov-1x", 2560, 16.0),
    "as found": ("Muon", 8192, 12.8),
}
#: Runs at 16,384 start from the setting of 8,192.
BASES = {16384: "b8192"}
NAMES = {"Muon": "muon", "LARS": "lars", "SGD": "nesterov"}
#: Further seeds of the cases that decide a question.
SEEDS: dict[str, int] = {}


def train(case: Case, seed: int, data: Path, package: Path) -> dict[str, Any]:
    """Train a case and return the row that is stored."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "largebatch.recipes.train", case.recipe]
        command += [f"data.path={data}"]
        command += [f"run_dir={folder}/run", f"batch_size={case.batch_size}", f"seed={seed}"]
        command += [f"epochs={case.epochs:g}", *PLAIN, *case.overrides]
        path = {"PYTHONPATH": str(package / "src")}
        subprocess.run(
            command, check=True, env=os.environ | ENVIRONMENT | path, stdout=sys.stderr, cwd=folder
        )
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    last = {row["split"]: row for row in map(json.loads, lines)}
    what = {
        key: value for key, value in vars(case).items() if key not in ("overrides", "optimizer")
    }
    top1, steps = round(last["val"]["top1"], 2), last["train"]["step"]
    when = {"date": date.today().isoformat(), "torch": tables.packages()["torch"]}
    return {**what, "overrides": case.overrides, "seed": seed, "top1": top1, "steps": steps, **when}


def table(rows: list[dict[str, Any]]) -> str:
    """Tabulate what was trained, each seed, with the runs of epochs_to_target among it."""
    stored = json.loads(BESIDE.read_text())["runs"]
    cells, asked = [], {row["question"] for row in rows}
    for case in (case for case in CASES if case.question in asked):
        key = (case.question, case.name, case.epochs)
        found = [r["top1"] for r in rows if (r["question"], r["name"], r["epochs"]) == key]
        if case.name in KNOWN:
            found = [row["top1"] for row in finals(stored, *KNOWN[case.name])]
        if not found:
            continue
        top1 = ", ".join(f"{value:.2f}" for value in found)
        updates = round(case.epochs * 50_000 / case.batch_size)
        cells.append(
            (case.question, f"{case.batch_size:,}", f"{case.epochs:g}", updates, case.name, top1)
        )
    columns = dict.fromkeys(("question", "batch", "epochs", "updates", "setting", "top-1 %"), "l")
    return tables.table(columns, cells)


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--data", type=Path, help="prepared CIFAR-10")
    parser.add_argument("--package", type=Path, help="work tree of commit 9e2c0a5")
    parser.add_argument("--question", choices=("tuning", "method", "floor", "residual"))
    options = parser.parse_args()
    rows = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    lock = threading.Lock()

    def run(task: tuple[Case, int]) -> None:
        row = train(*task, options.data.absolute(), options.package.absolute())
        with lock:
            rows.append(row)
            tables.store(
                RESULT, {"claim": tables.claim_of(__doc__), **tables.origin(), "runs": rows}
            )
            print(row, flush=True)

    done = {(row["question"], row["name"], row["epochs"], row["seed"]) for row in rows}
    tasks = [
        (case, seed)
        for case in CASES
        if case.name not in KNOWN and options.question in (None, case.question)
        for seed in range(1 + SEEDS.get(case.name, 0))
        if (case.question, case.name, case.epochs, seed) not in done
    ]
    if options.data:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, tasks))
    RESULT.with_suffix(".md").write_text(table(rows) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
