"""Sections of results, and processes that start quickly."""

import pytest

from benchmarks.gpu import child
from benchmarks.gpu.report import Report, write
from tests.ranks import CONTEXT


@pytest.fixture
def report_of(tmp_path, monkeypatch):
    """Return a function that makes the section of a part, with as many seconds left."""

    def make(name, seconds_left=10_000.0):
        file = tmp_path / "results.json"
        if not file.exists():
            head = {"call": "a", "dry": True, "date": "", "versions": {}}
            write(file, head | {"machine": {"device": "cpu"}, "parts": {}})
        found = Report(file, name, 0.0)
        monkeypatch.setattr(Report, "seconds_left", property(lambda self: seconds_left))
        return found

    return make


@pytest.fixture
def quick_processes(monkeypatch):
    """Fork processes from a server that has imported what takes long."""
    monkeypatch.setattr(child, "_CONTEXT", CONTEXT)
