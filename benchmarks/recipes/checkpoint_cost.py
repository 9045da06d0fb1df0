"""Claim: a checkpoint that is flushed, hashed and verified takes under 2 % of the training time at
the interval of the large recipes, 8 epochs of ImageNet, also at 150,000 images per second.

    python -m benchmarks.recipes.checkpoint_cost

Weights and momentum of ResNet-50 in FP32, 204 MB, are saved by `Checkpoints`, by plain `torch.save`
and by `torch.distributed.checkpoint.save`, in turns, and each checkpoint of ours is verified and
loaded as before a resume. The disk is that of the temporary folder, or of --folder.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import timm
import torch
import torch.distributed.checkpoint as dcp

from benchmarks import tables
from largebatch.lars import LARS, split_parameters
from largebatch.recipes.ranks import Job
from largebatch.recipes.training.folder import checkpoint
from largebatch.recipes.training.folder.saving import Checkpoints

RESULT = tables.RESULTS / "checkpoint_cost.md"
STATE = {"loader": {}, "precision": {}, "recipe": {}}
EPOCHS, IMAGES = 8, 1_281_167
RATES = (2_500, 150_000)  # images per second: of one GPU, and of many
GOAL = 0.02
WAYS = {
    "ours": "checkpoint, flushed and hashed",
    "plain": "`torch.save`",
    "distributed": "`torch.distributed.checkpoint.save`",
    "verify": "verification before a resume",
    "load": "loading what was verified",
}


def seconds(function: Callable[[], object]) -> float:
    """Return the wall time of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(folder: Path, repeats: int, name: str = "resnet50") -> dict[str, list[float]]:
    """Return the seconds of each way, in turns."""
    job = Job(0, 1, 1, torch.device("cpu"))
    model = timm.create_model(name)
    optimizer = LARS(split_parameters(model, 5e-5), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(repeats):
        ours = Checkpoints(folder / "ours", job, keep=1)
        found["ours"].append(seconds(partial(ours.write, turn, model, optimizer, STATE)))
        tensors = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        plain = folder / f"plain-{turn}.pt"
        found["plain"].append(seconds(partial(torch.save, tensors, plain)))
        tensors = {"model": model.state_dict(), "state": optimizer.state_dict()["state"]}
        distributed = folder / f"distributed-{turn}"
        save = partial(dcp.save, tensors, checkpoint_id=distributed, no_dist=True)
        found["distributed"].append(seconds(save))
        checkpoint._verified.clear()
        newest = folder / "ours" / f"step-{turn:08d}"
        found["verify"].append(seconds(partial(checkpoint.read_state, newest)))
        found["load"].append(seconds(partial(checkpoint.load, newest, model, optimizer, job)))
    return found


def report(found: dict[str, list[float]]) -> str:
    """Tabulate the times, their ratio, and their share of the training time."""
    ratios = [a / b for a, b in zip(found["ours"], found["plain"], strict=True)]
    columns = {"": "l", "seconds, median (least to most)": "r"}
    seconds = [(name, tables.median_and_range(found[way])) for way, name in WAYS.items()]
    shares = []
    for rate in RATES:
        share = statistics.median(found["ours"]) / (EPOCHS * IMAGES / rate)
        shares.append((f"{rate:,}", f"{share:.2%}", "met" if share < GOAL else "missed"))
    goal = {"images per second": "r", "share of training time, every 8 epochs": "r"}
    parts = [
        tables.table(columns, seconds),
        f"Ratio to `torch.save`, median of {len(ratios)} turns: {statistics.median(ratios):.2f}.",
        tables.table(goal | {"goal, 2 %": "l"}, shares),
        tables.about(),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        text = report(measure(Path(folder), options.repeats))
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
