"""Pieces that are appended to a file arrive whole and in order, whatever the disk refuses."""

import errno
import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from largebatch.recipes.training.callbacks import Metrics
from largebatch.recipes.training.folder.metrics import AppendedFile
from largebatch.recipes.training.watch.trackers import TensorBoard
from tests.recipes.runs import make

PIECES = st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.integers(0, 12)), max_size=20)


def with_room_for(room, pwrite=os.pwrite):
    """``os.pwrite`` of a disk with this many bytes of room."""

    def write(file, content, offset):
        part = content[: room[0]]
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= len(part)
        return pwrite(file, part, offset)

    return write


@given(PIECES)
def test_pieces_arrive_whole_and_in_order(pieces):
    """With any room at each of them; a part that is written before the room ends is repeated."""
    room, written, expected = [0], b"", b""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", with_room_for(room))
        path = Path(folder) / "file"
        path.write_bytes(b"head")
        file = AppendedFile(path, 4)
        for piece, room[0] in pieces:
            expected += piece
            try:
                file.append(piece)
            except OSError:
                assert file.waiting
                assert expected.endswith(file.waiting)
            else:
                assert not file.waiting
                written = expected
            assert path.read_bytes()[: 4 + len(written)] == b"head" + written
        room[0] = 10**6
        file.append()
        file.close()
        assert path.read_bytes() == b"head" + expected


def test_values_for_tensorboard_wait_for_room_without_a_thread(photos, tmp_path, monkeypatch):
    run = make(photos, tmp_path).context
    tmp_path.mkdir(exist_ok=True)
    room, tracker, threads = [10**6], TensorBoard(), threading.active_count()
    monkeypatch.setattr(os, "pwrite", with_room_for(room))
    tracker.on_start(run)
    for step in range(1, 9):
        room[0] = 7 if 3 <= step <= 5 else 10**6
        metrics = Metrics("train", step, 0.0, {"loss": 1.0 / step, "top1": 50.0 + step})
        if 3 <= step <= 5:
            with pytest.raises(OSError, match="No space left"):
                tracker.on_log(metrics)
        else:
            tracker.on_log(metrics)
    assert threading.active_count() == threads
    tracker.on_end("finished", {})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    steps = [(s.step, s.value) for s in events.Scalars("train/loss")]
    assert steps == [(step, pytest.approx(1 / step)) for step in range(1, 9)]
