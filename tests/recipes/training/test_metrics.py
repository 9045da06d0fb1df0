"""Reading the lines of a run's metrics, valid and invalid ones."""

import json

import pytest

from largebatch.recipes.errors import RecipeError
from largebatch.recipes.training.folder.metrics import read_metrics

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
