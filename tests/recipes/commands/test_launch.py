"""The processes that a command starts, with its options."""

from collections import Counter

import pytest
from torch.distributed import run
from typer.testing import CliRunner

from largebatch.recipes.commands.tree import app


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The words that torchrun is given, in place of starting processes."""
    words = []
    monkeypatch.setattr(run, "main", words.extend)
    monkeypatch.setattr("largebatch.recipes.train.check", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return words


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("tune lr digits device=cpu", "--lr 0.5..2 --runs 8.0"),
        ("comm tune", "--out a.json --wire fp16 --wire bf16"),
        (
            "critical-batch digits data.path=PHOTOS batch_size=8 micro_batch_size=4",
            "--epochs 4.0 --rule sqrt --out mine",
        ),
    ],
)
def test_a_command_is_started_again_with_its_options(started, photos, words, options):
    words = words.replace("PHOTOS", str(photos))
    again = [*words.split(), *options.split()]
    for _ in range(2):  # what it is given gives the same once more
        result = CliRunner().invoke(app, [*again, "--nproc", "2"], prog_name="largebatch")
        assert result.exit_code == 0, result.output
        before, place = Counter(again), started.index("-m")
        module, *again = started[place + 1 :]
        assert module == "largebatch.recipes"
        assert again[: len(words.split())] == words.split()
        assert "--nproc" not in again
        assert before <= Counter(again)
        started.clear()
    assert before == Counter(again)
