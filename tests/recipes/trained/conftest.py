"""Runs whose weights are evaluated and exported."""

import shutil

import pytest

from largebatch.recipes.training.folder.metrics import read_metrics
from tests.recipes.runs import make

#: An average that differs from the weights, and statistics of half-precision steps.
HALF = ["precision=fp16-master", "loss_scale=128", "optimizer.lr=0.2", "ema.decay=0.5"]
HALF += ["model.args.drop_rate=0.1"]


@pytest.fixture(scope="session")
def half(photos, tmp_path_factory):
    """A finished run in half precision with masters, and an average of its weights."""
    folder = tmp_path_factory.mktemp("half") / "run"
    make(photos, folder, *HALF, "stop_after=4").run()
    return folder


@pytest.fixture(scope="session")
def plain(photos, tmp_path_factory):
    """A finished run in FP32, without an average."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    make(photos, folder, "optimizer.lr=0.2", "stop_after=2").run()
    return folder


def last_evaluation(folder):
    return [line for line in read_metrics(folder) if line["split"] == "val"][-1]


def stopped(folder, path):
    """A run as it is before its weights are written."""
    shutil.copytree(folder, path)
    for name in ("weights.pt", "weights_ema.pt", "summary.json"):
        (path / name).unlink(missing_ok=True)
    return path
