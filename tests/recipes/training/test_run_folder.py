"""What a run leaves: lines of metrics, valid and invalid ones, and why it ended."""

import json

import pytest

from largebatch.recipes.errors import LostRankError, RecipeError, StorageError, TrainingError
from largebatch.recipes.training.folder.ending import recorded
from largebatch.recipes.training.folder.lock import locked
from largebatch.recipes.training.folder.metrics import read_metrics
from largebatch.recipes.training.folder.names import ENDING, LOCK
from largebatch.recipes.training.folder.outcome import outcome_of
from largebatch.recipes.training.stopping import _end
from tests.ranks import CONTEXT
from tests.recipes.runs import leave_lock, refused

LINE = {"split": "train", "step": 1, "epoch": 0.5, "loss": 2.0}


def test_a_line_that_was_cut_short_is_left_out_and_an_invalid_one_named(tmp_path):
    assert read_metrics(tmp_path) == []
    path, whole = tmp_path / "metrics.jsonl", json.dumps(LINE).encode() + b"\n"
    path.write_bytes(whole + b'{"split": "tr')
    assert read_metrics(tmp_path) == [LINE]
    for line in (b"{", b"5", b"{}", b"\xff\x00", b'{"split": "val"}'):
        path.write_bytes(whole + line + b"\n")
        assert "metrics.jsonl:2: not a line of metrics, an" in refused(read_metrics, tmp_path)


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


def end_in_a_run(folder, taken_over):
    with locked(folder):
        if taken_over:
            (folder / LOCK).unlink()
            leave_lock(folder, pid=1)
        _end("rank 1 did not answer", folder)


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_standstills_end_is_recorded_in_a_folder_that_is_still_the_runs_own(tmp_path, taken_over):
    process = CONTEXT.Process(target=end_in_a_run, args=(tmp_path, taken_over))
    process.start()
    process.join(300)
    assert process.exitcode == 1
    assert (tmp_path / ENDING).exists() != taken_over
    if not taken_over:
        found = outcome_of(tmp_path)
        assert (found.state, found.reason) == ("failed", "rank 1 did not answer")
