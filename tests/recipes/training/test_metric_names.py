"""The table of metrics in docs/guides/watch.md has the names that runs write, and no other."""

import re
from pathlib import Path

import pytest

from largebatch.recipes.training.callbacks import Metrics
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.watch.meters import NAMES
from largebatch.recipes.training.watch.trackers import named
from tests.ranks import run_ranks
from tests.recipes.runs import train

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "watch.md"
ROW = re.compile(r"^\| `(\w+)` \| (train|val|train, val) \|[^|]*\|[^|]+\|$", re.MULTILINE)

#: All that a recipe can ask to be measured, on two ranks.
EVERYTHING = [
    *("precision=fp16", "optimizer.clip_grad_norm=1", "gradient_noise_every=1", "ema.decay=0.9"),
    *("stages=[{from: 1ep, batch_size: 24, lr: keep}]", "trust_ratios_every=2", "track=[]"),
]
#: Names that a run on CPUs does not have.
ELSEWHERE = {*NAMES[1:], "copy_seconds"}


def documented():
    """The lines that each name is in, by name."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    names = [name for name, _ in rows]
    assert len(names) == len(set(names))
    return {name: set(splits.split(", ")) for name, splits in rows}


def written_by(root, run_dir):
    train(root, run_dir, *EVERYTHING)


@pytest.mark.slow("trains on two ranks in half precision")
def test_the_table_has_the_names_that_runs_write_and_no_other(photos, tmp_path):
    run_ranks(2, written_by, photos, tmp_path)
    written = {}
    for line in read_metrics(tmp_path):
        if line["split"] != "trust_ratio":
            for name in line.keys() - {"split", "step", "epoch"}:
                written.setdefault(name, set()).add(line["split"])
    table = documented()
    assert written == {name: table.get(name) for name in written}
    assert table.keys() - written.keys() <= ELSEWHERE


def test_trackers_have_the_same_names_with_their_split():
    values = {"loss": 1.0, "memory_bytes": 2.0}
    metrics = Metrics("train", 5, 0.5, values, {"step_wait_seconds": [0.1]})
    assert named(metrics) == {"epoch": 0.5, "train/loss": 1.0, "train/memory_bytes": 2.0}
