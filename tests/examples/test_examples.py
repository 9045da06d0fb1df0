"""The examples reach the accuracy that they claim, and stay short."""

import runpy
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("trains each example to the accuracy that it states")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def one_thread():
    """Use one thread: small layers gain nothing from two, and lose much on shared cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("pytorch_loop", "timm"),
        ("with_accelerate", "accelerate"),
        ("with_lightning", "lightning"),
    ],
)
def test_example_reaches_its_accuracy(name, needs, monkeypatch, tmp_path):
    pytest.importorskip(needs)
    monkeypatch.chdir(tmp_path)
    path = EXAMPLES / f"{name}.py"
    assert "more than 95 % accuracy" in path.read_text()
    assert runpy.run_path(str(path))["main"]() > 0.95
    assert not list(tmp_path.iterdir())


def run_on_a_rank(path):
    return runpy.run_path(path)["main"]()


def test_the_sharded_example_reaches_its_accuracy_on_two_ranks():
    pytest.importorskip("timm")
    path = EXAMPLES / "with_fsdp2.py"
    assert "more than 95 % accuracy" in path.read_text()
    # Each rank has its own batch norm statistics, and so its own accuracy.
    assert min(run_ranks(2, run_on_a_rank, str(path))) > 0.95


def test_examples_are_under_60_lines():
    paths = sorted(EXAMPLES.glob("*.py"))
    assert len(paths) >= 3
    for path in paths:
        assert len(path.read_text().splitlines()) < 60, path
