"""Damaged files of a run: listing, reporting and resuming it end in a line or in a result."""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from largebatch.recipes.commands.runs import SORTS, lines, sort_value
from largebatch.recipes.errors import RecipeError
from largebatch.recipes.report.page import render
from largebatch.recipes.report.runs import read_runs
from largebatch.recipes.training.folder import lock as run_lock
from largebatch.recipes.training.folder.outcome import find_runs, outcome_of
from largebatch.recipes.training.screen import closing
from tests.recipes.runs import leave_lock, make

KEYS = ("optimizer.lr=0.1", "micro_batch_size=16", "checkpoint.every=2", "epochs=1")
#: What stands in place of a value: of a type that it never has, or beyond all bounds.
VALUES = st.sampled_from(
    [
        *(None, True, -1, 2**31, 2**70, 10**400, 1e300, float("nan"), "", "\x1b[1m", "9" * 400),
        *([], [None], {}, {"a": 1}, [[]], 0.5),
    ]
)


@pytest.fixture(scope="module")
def stopped(photos, tmp_path_factory):
    """A run that can be resumed, as it is after it was killed on another machine."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    make(photos, folder, *KEYS, "stop_after=2").run()
    os.utime(leave_lock(folder, host="elsewhere", duration=0.3), (1, 1))
    return folder


def files_of(folder):
    """The small files that are read of a run, as paths relative to its folder."""
    texts = [".lock", "metrics.jsonl", "recipe.yaml", "summary.json", "ending.json", "classes.txt"]
    (state,) = folder.glob("checkpoints/step-*/state.json")
    return [*texts, str(state.relative_to(folder))]


@st.composite
def swapped(draw, text):
    """JSON, one value of which is another one, or missing."""
    content = json.loads(text)
    inside, key, place = None, None, content
    while isinstance(place, dict | list) and place and (inside is None or draw(st.booleans())):
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inside, place = place, place[key]
    if isinstance(inside, dict) and draw(st.booleans()):
        del inside[key]
    elif inside is not None:
        inside[key] = draw(VALUES)
    return json.dumps(content)


@st.composite
def damaged(draw, content):
    """The content of a file, damaged."""
    kind = draw(st.sampled_from(["flip", "cut", "swap", "swap", "swap"]))
    if kind == "cut":
        return content[: draw(st.integers(0, len(content)))]
    if kind == "flip":
        flipped = bytearray(content)
        for place in draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
            flipped[place] ^= 1 << draw(st.integers(0, 7))
        return bytes(flipped)
    if content.startswith(b"{\n"):
        return draw(swapped(content)).encode()
    written = content.decode().splitlines()
    place = draw(st.integers(0, len(written) - 1))
    if written[place].startswith("{"):
        written[place] = draw(swapped(written[place]))
    else:
        key, colon, _ = written[place].partition(": ")
        written[place] = f"{key}{colon}{draw(VALUES)!r}"
    return "".join(f"{line}\n" for line in written).encode()


def read_in_every_way(folder):
    """List and report a run, as the commands do."""
    found = [outcome_of(path) for path in find_runs(folder.parent)]
    assert json.dumps([{**asdict(run), "folder": ""} for run in found], allow_nan=False)
    assert [sorted(found, key=lambda run: sort_value(run, key)) for key in SORTS]
    assert lines(found, folder.parent, 80)
    with suppress(RecipeError):
        assert render(*read_runs([folder]))


def resume(photos, folder):
    """Resume a run to its end, or to a line for the user."""
    times = {"PATIENCE_SECONDS": 0.3, "_BEAT_SECONDS": 0.1, "_MOST_SECONDS": 3.0}
    with (
        mock.patch.multiple(run_lock, **times),
        mock.patch.object(closing, "write_picture"),
        suppress(RecipeError),
    ):
        make(photos, folder, *KEYS, "resume=true").run()
        assert outcome_of(folder).state == "finished"


@pytest.mark.slow("resumes a run many times")
@given(st.data(), st.sampled_from([False, False, True]))
@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=20)
def test_a_run_with_a_damaged_file_is_listed_and_reported_and_resumes_or_ends_in_a_line(
    photos, stopped, tmp_path_factory, data, resumes
):
    folder = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(stopped, folder, ignore=shutil.ignore_patterns("*.png", "weights.pt"))
    path = folder / data.draw(st.sampled_from(files_of(folder)))
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    read_in_every_way(folder)
    if resumes:
        resume(photos, folder)
