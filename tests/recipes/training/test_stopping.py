"""A run that the watch over standstills ends leaves a record of it."""

import json

import pytest

from largebatch.recipes.training.folder.lock import LOCK, locked
from largebatch.recipes.training.folder.names import ENDING
from largebatch.recipes.training.folder.outcome import outcome_of
from largebatch.recipes.training.stopping import _end
from tests.ranks import CONTEXT


def end_in_a_run(folder, is_main, taken_over):
    with locked(folder):
        if taken_over:
            lock = json.loads((folder / LOCK).read_text())
            (folder / LOCK).write_text(json.dumps({**lock, "process": lock["process"] + 1}))
        _end("rank 1 did not answer", folder if is_main else None)


@pytest.mark.parametrize(
    ("is_main", "taken_over", "records"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_the_end_is_recorded_by_rank_0_in_its_own_folder(tmp_path, is_main, taken_over, records):
    process = CONTEXT.Process(target=end_in_a_run, args=(tmp_path, is_main, taken_over))
    process.start()
    process.join(60)
    assert process.exitcode == 1
    assert (tmp_path / ENDING).exists() == records
    if records:
        found = outcome_of(tmp_path)
        assert (found.state, found.reason) == ("failed", "rank 1 did not answer")
