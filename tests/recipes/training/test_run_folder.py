"""What a run leaves: lines of metrics, valid and invalid ones, and why it ended."""

import json

import pytest

from largebatch.recipes.errors import LostRankError, RecipeError, StorageError, TrainingError
from largebatch.recipes.training.folder.ending import recorded
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.folder.outcome import outcome_of

LINE = {"split": "train", "step": 1, "epoch": 0.5, "loss": 2.0}


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LINE) + '\n{"split": "tr')
    assert read_metrics(tmp_path) == [LINE]


@pytest.mark.parametrize("line", [b"{", b"5", b"{}", b"\xff\x00", b'{"split": "val"}'])
def test_an_invalid_line_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(json.dumps(LINE).encode() + b"\n" + line + b"\n")
    with pytest.raises(RecipeError, match=r"metrics.jsonl:2: not a line of metrics, an object"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (TrainingError("a; b", "lower it"), "diverged"),
        (StorageError("a; b", "make room"), "failed"),
        (RecipeError("a; b", "valid: c"), "failed"),
        (LostRankError("a; b", True, "resume"), "failed"),
    ],
)
def test_the_reason_of_an_end_is_the_whole_problem_without_advice(tmp_path, error, state):
    with pytest.raises(type(error)), recorded(tmp_path, lambda: None, lambda: True):
        raise error
    found = outcome_of(tmp_path)
    assert (found.state, found.reason) == (state, "a; b")
    assert str(error).startswith("a; b; ")
